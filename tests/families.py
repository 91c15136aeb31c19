"""The table of docs/models.md: which families of models the FSDP engine computes as plain transformers does.

    python -m tests.families [family ...]

Of each family a tiny model with random weights: log-probabilities and gradients of a few sequences, packed and padded, against
transformers' eager attention on one sequence at a time, in fp32 on a CPU. A checkpoint of yours: python -m engines.check.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers

from config import InputError, load
from data.batching.packing import Batch, bounds
from engines.fsdp.engine import FSDPEngine
from engines.model.hf import auto_class, read_hf_config
from engines.parallel import device
from tests.support.foreign import FOREIGN
from tests.support.models import FAMILIES, MULTIMODAL, write_model

BOUND = 2e-5  # of log-probabilities [nats], and of gradients relative to the largest
PLAIN = (
    "apertus",
    "arcee",
    "bitnet",
    "bloom",
    "cohere",
    "cohere2",
    "cpmant",
    "diffllama",
    "ernie4_5",
    "exaone4",
    "falcon",
    "gemma",
    "gemma2",
    "glm",
    "glm4",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "hrm_text",
    "hyperclovax",
    "jais2",
    "llama",
    "mamba",
    "ministral3",
    "mpt",
    "nanochat",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "opt",
    "persimmon",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "stablelm",
    "starcoder2",
    "vaultgemma",
)
HEADS_OF_8 = ("gemma3_text", "helium", "hunyuan_v1_dense", "ministral")
MODELS = {
    **{family: {} for family in PLAIN},
    **{family: {"head_dim": 8} for family in HEADS_OF_8},
    "gemma4_text": dict(
        head_dim=8, global_head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=97
    ),
    "gpt2": dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "lfm2": dict(layer_types=["conv", "full_attention", "conv"]),
    "qwen3_vl_moe": dict(
        vision_config=dict(
            depth=1,
            hidden_size=16,
            intermediate_size=24,
            num_heads=2,
            out_hidden_size=32,
            num_position_embeddings=16,
            deepstack_visual_indexes=[0],
        ),
        text_config=dict(
            model_type="qwen3_vl_moe_text",
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1]),
        ),
    ),
    "seed_oss": dict(head_dim=8, attention_dropout=0.0, residual_dropout=0.0),
}
ROPES = {
    "llama with dynamic rope": ("llama", dict(rope_type="dynamic", factor=2.0)),
    "llama with llama3 rope": (
        "llama",
        dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama with yarn": (
        "llama",
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128),
    ),
    "glm with linear rope": (
        "glm",
        dict(rope_type="linear", factor=2.0, partial_rotary_factor=0.5),
    ),
    "phi3 with longrope": (
        "phi3",
        dict(
            rope_type="longrope",
            short_factor=[1.0, 1.5, 2.0, 3.0],
            long_factor=[2.0] * 4,
            original_max_position_embeddings=64,
        ),
    ),
}
SHAPES = {
    **{
        family: FAMILIES.get(family, dict(model_type=family, **changes))
        for family, changes in MODELS.items()
    },
    **FOREIGN,
    **MULTIMODAL,
    # phi3 has its own key for that length.
    **{
        name: dict(
            model_type=family,
            rope_parameters=dict(rope_theta=10000.0, **rope),
            original_max_position_embeddings=64,
        )
        for name, (family, rope) in ROPES.items()
    },
}


class Watched(FSDPEngine):
    """Keeps the gradients of its last step."""

    def _clip(self) -> float:
        self.gradients = {
            name: p.grad.clone() for name, p in self.hf.named_parameters() if p.grad is not None
        }
        return super()._clip()


def make_batch() -> Batch:
    lengths = torch.tensor([30, 7, 41, 2])
    return Batch(
        torch.randint(3, 97, (int(lengths.sum()),), generator=torch.Generator().manual_seed(1)),
        bounds(lengths),
    )


def plain(directory: Path, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """([T] log-probabilities, gradients by name of minus their mean) of transformers, one sequence at a time."""
    kind = auto_class(read_hf_config(directory))
    model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    log_probs = torch.zeros(len(batch.input_ids))
    for start, length in zip(batch.cu_seqlens.tolist(), batch.lengths):
        ids = batch.input_ids[start : start + length]
        mine = -F.cross_entropy(
            model(ids[None], use_cache=False).logits[0, :-1], ids[1:], reduction="none"
        )
        (-mine.sum() / len(batch.input_ids)).backward()
        log_probs[start + 1 : start + length] = mine.detach()
    return log_probs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(directory: Path, packed: bool) -> tuple[float, float]:
    """The largest differences of log-probabilities [nats] and of gradients, relative to the largest gradient. Raises InputError for
    a model that the engine refuses."""
    batch = make_batch()
    engine = Watched(
        load(
            "sft.yaml",
            [
                f"model.path={directory}",
                "data.train_files=none",
                "data.max_length=64",
                "engine.compute_dtype=float32",
                f"engine.use_remove_padding={packed}".lower(),
            ],
        ),
        torch.device("cpu"),
        total_steps=1,
    )
    log_probs, gradients = plain(directory, batch)
    off = (engine.log_probs(batch)[0] - log_probs).abs().max().item()
    engine.train_batch(
        batch, lambda log_probs, *_: (-log_probs.sum() / len(batch.input_ids), {}), 0
    )
    assert gradients.keys() == engine.gradients.keys(), sorted(
        gradients.keys() ^ engine.gradients.keys()
    )
    largest = max(gradient.abs().max() for gradient in gradients.values())
    return off, max(
        ((gradient - engine.gradients[name]).abs().max() / largest).item()
        for name, gradient in gradients.items()
    )


def main(names: list[str]) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device.init()
    print("| family | packed | padded |\n| --- | --- | --- |")
    said, wrong = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for name in names or sorted(SHAPES):
            directory, cells = (
                write_model(Path(folder) / name.replace(" ", "_"), **SHAPES[name]),
                [],
            )
            for packed in (True, False):
                try:
                    off = compare(directory, packed)
                    cells.append(f"{off[0]:.0e}, {off[1]:.0e}")
                    wrong += [name] * (not max(off) < BOUND)
                except InputError as error:
                    cells.append("refused")
                    said[name] = str(error).replace(f"model.path={directory}: ", "")
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(
        "\nWhat is said of those refused:\n\n"
        + "\n".join(f"* {name}: {line}" for name, line in said.items())
    )
    device.shutdown()
    if wrong:
        sys.exit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main(sys.argv[1:])
