"""Print the table of docs/models.md: which families FSDP2 computes as plain transformers does.

    python -m tests.families [family ...]

For each family, a tiny model with random weights: log-probabilities and gradients of a few
sequences, packed and padded, against transformers' eager attention on one sequence at a time, in
fp32 on a CPU. For a checkpoint of your own, use python -m engines.check.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers

from config import InputError, load
from data.batching.batch import Batch, make_cu_seqlens
from engines.fsdp.engine import FSDPEngine
from engines.model.hf import auto_class, read_hf_config
from engines.parallel import device
from tests.support.foreign import FOREIGN
from tests.support.models import FAMILIES, MULTIMODAL, write_model

# For log-probabilities [nats], and for gradients relative to the largest one.
BOUND = 2e-5
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
    "deepseek_v4": dict(
        head_dim=16,
        qk_rope_head_dim=8,
        q_lora_rank=16,
        o_lora_rank=16,
        o_groups=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        index_head_dim=16,
        index_n_heads=2,
        index_topk=4,
    ),
    "gemma4_text": dict(
        head_dim=8, global_head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=97
    ),
    "gpt2": dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "lfm2": dict(layer_types=["conv", "full_attention", "conv"]),
    "olmoe": dict(num_experts=4, num_experts_per_tok=2),
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
    "zaya": dict(head_dim=8, router_hidden_size=16, num_experts=4, moe_intermediate_size=24),
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
    # phi3 has a key of its own for the original length.
    **{
        name: dict(
            model_type=family,
            rope_parameters=dict(rope_theta=10000.0, **rope),
            original_max_position_embeddings=64,
        )
        for name, (family, rope) in ROPES.items()
    },
}


@dataclass(frozen=True)
class Difference:
    """How far an engine is from plain transformers."""

    # The largest difference of a log-probability [nats].
    log_probs: float
    # The largest difference of a gradient, relative to the largest gradient.
    gradients: float

    @property
    def is_small(self) -> bool:
        return self.log_probs < BOUND and self.gradients < BOUND

    def __str__(self) -> str:
        return f"{self.log_probs:.0e}, {self.gradients:.0e}"


class RecordingEngine(FSDPEngine):
    """An engine that keeps the gradients of its last step."""

    def _clip_gradients(self) -> float:
        self.gradients = {
            name: parameter.grad.clone()
            for name, parameter in self.hf.named_parameters()
            if parameter.grad is not None
        }
        return super()._clip_gradients()


def make_batch() -> Batch:
    lengths = torch.tensor([30, 7, 41, 2])
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 97, (int(lengths.sum()),), generator=generator)
    return Batch(tokens, make_cu_seqlens(lengths))


def plain_results(directory: Path, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute with transformers, one sequence at a time.

    Returns:
        The log-probabilities [T], and by name the gradients of minus their mean.
    """
    kind = auto_class(read_hf_config(directory))
    model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    num_tokens = len(batch.input_ids)
    log_probs = torch.zeros(num_tokens)
    for start, length in zip(batch.cu_seqlens.tolist(), batch.lengths):
        ids = batch.input_ids[start : start + length]
        logits = model(ids[None], use_cache=False).logits[0, :-1]
        sequence_log_probs = -F.cross_entropy(logits, ids[1:], reduction="none")
        (-sequence_log_probs.sum() / num_tokens).backward()
        log_probs[start + 1 : start + length] = sequence_log_probs.detach()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return log_probs, gradients


def compare(directory: Path, packed: bool) -> Difference:
    """Compare the engine with transformers. Raises InputError for a model that it rejects."""
    batch = make_batch()
    settings = [
        f"model.path={directory}",
        "data.train_files=none",
        "data.max_length=64",
        "engine.compute_dtype=float32",
        f"engine.use_remove_padding={packed}".lower(),
    ]
    engine = RecordingEngine(load("sft.yaml", settings), torch.device("cpu"), total_steps=1)
    expected_log_probs, expected_gradients = plain_results(directory, batch)
    log_probs, *_ = engine.log_probs(batch)
    log_prob_difference = (log_probs - expected_log_probs).abs().max().item()

    def loss_fn(log_probs, *_):
        return -log_probs.sum() / len(batch.input_ids), {}

    engine.train_batch(batch, loss_fn, 0)
    only_in_one = expected_gradients.keys() ^ engine.gradients.keys()
    assert not only_in_one, sorted(only_in_one)
    largest = max(gradient.abs().max() for gradient in expected_gradients.values())
    gradient_difference = max(
        ((gradient - engine.gradients[name]).abs().max() / largest).item()
        for name, gradient in expected_gradients.items()
    )
    return Difference(log_prob_difference, gradient_difference)


def main(families: list[str]) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device.init()
    print("| family | packed | padded |\n| --- | --- | --- |")
    reasons = {}
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for family in families or sorted(SHAPES):
            directory = write_model(Path(folder) / family.replace(" ", "_"), **SHAPES[family])
            cells = []
            for packed in (True, False):
                try:
                    difference = compare(directory, packed)
                except InputError as error:
                    cells.append("rejected")
                    reasons[family] = str(error).replace(f"model.path={directory}: ", "")
                    continue
                cells.append(str(difference))
                if not difference.is_small:
                    wrong.append(family)
            print(f"| {family} | {' | '.join(cells)} |", flush=True)
    print("\nWhy models are rejected:\n")
    for family, reason in reasons.items():
        print(f"* {family}: {reason}")
    device.shutdown()
    if wrong:
        sys.exit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main(sys.argv[1:])
