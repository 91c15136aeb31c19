"""Which families of models the FSDP engine computes as plain transformers does: the table in docs/models.md.

    python -m tests.families [family ...]

For each a tiny model with random weights: log-probabilities and gradients of a few sequences, packed and padded, against
transformers' eager attention on one sequence at a time, in fp32. What is refused shows the engine's line.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM

from config import InputError, load
from data.packing import Batch
from engines import device
from engines.fsdp.engine import FSDPEngine
from tests.models import FAMILIES, make_model

BOUND = 1e-5                # of log-probabilities [nats], and of gradients, relative to the largest
NO_DROPOUT = dict(attention_dropout=0.0)
ALL = {
    **{family: dict(model_type=family) for family in (
        "arcee", "bitnet", "cohere", "cohere2", "cpmant", "diffllama", "doge", "ernie4_5", "exaone4", "gemma", "glm", "glm4",
        "gpt_neox", "gptj", "granite", "helium", "hunyuan_v1_dense", "hyperclovax", "jais2", "lfm2", "llama", "minicpm3", "ministral",
        "ministral3", "mistral", "mpt", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "opt", "persimmon", "phi3", "qwen2", "qwen3",
        "smollm3", "stablelm", "starcoder2", "bloom", "apertus", "gemma2", "gpt_oss", "mixtral", "qwen3_moe", "mamba")},
    "lfm2": dict(model_type="lfm2", layer_types=["conv", "full_attention", "conv"]),
    **{family: dict(model_type=family, head_dim=8) for family in ("helium", "hunyuan_v1_dense", "ministral", "gemma3_text")},
    "falcon": dict(model_type="falcon"), "seed_oss": dict(model_type="seed_oss", head_dim=8),
    "gemma4_text": dict(model_type="gemma4_text", head_dim=8, global_head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=97),
    "phi3 longrope": dict(model_type="phi3", rope_parameters=dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0]*4, long_factor=[2.0]*4, original_max_position_embeddings=64)),
    "llama dynamic": dict(model_type="llama", rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)),
    "llama partial": dict(model_type="llama", rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0, partial_rotary_factor=0.5)),
    "glm partial llama3": dict(model_type="glm", rope_parameters=dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64, partial_rotary_factor=0.5)),
}


class Watched(FSDPEngine):
    """Keeps the gradients of a step."""

    def _clip(self) -> float:
        self.gradients = {name: p.grad.clone() for name, p in self.hf.named_parameters() if p.grad is not None}
        return super()._clip()


def sequences() -> Batch:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([30, 7, 41, 2])
    return Batch(torch.randint(3, 97, (int(lengths.sum()),), generator=generator), torch.cat([torch.zeros(1, dtype=int), lengths.cumsum(0)]))


def plain(directory: Path, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """([T] log-probabilities, gradients of their negative mean by name) of transformers, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    log_probs = torch.zeros(len(batch.input_ids))
    for start, length in zip(batch.cu_seqlens.tolist(), batch.lengths):
        ids = batch.input_ids[None, start:start + length]
        mine = -F.cross_entropy(model(ids, use_cache=False).logits[0, :-1], ids[0, 1:], reduction="none")
        (-mine.sum() / len(batch.input_ids)).backward()
        log_probs[start + 1:start + length] = mine.detach()
    return log_probs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(directory: Path, packed: bool) -> str:
    """How far the engine is from transformers, or what it says."""
    batch, pairs = sequences(), [f"engine.use_remove_padding={str(packed).lower()}", "engine.compute_dtype=float32"]
    config = load("sft.yaml", [f"model.path={directory}", "data.train_files=unused", "optim.clip_grad=0", "data.max_length=64", *pairs])
    try:
        engine = Watched(config, torch.device("cpu"), 1)
    except InputError as error:
        return f"refused: {str(error).replace(f'model.path={directory}: ', '')}"
    log_probs, gradients = plain(directory, batch)
    off = (engine.log_probs(batch)[0] - log_probs).abs().max().item()
    engine.train_batch(batch, lambda x, *_: (-x.sum() / len(batch.input_ids), {}), 0)
    largest = max(g.abs().max() for g in gradients.values())
    missing = gradients.keys() ^ engine.gradients.keys()
    if missing:
        return f"other parameters: {min(missing)}"
    gradient = max(((g - engine.gradients[name]).abs().max() / largest).item() for name, g in gradients.items())
    return f"{off:.0e}, {gradient:.0e}" + " WRONG" * (not max(off, gradient) < BOUND)


def main(names: list[str]) -> None:
    transformers.logging.set_verbosity_error()
    device.init()
    print("| family | packed | padded |\n| --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for name in names or ALL:
            FAMILIES.setdefault(name, ALL.get(name, {"model_type": name}))
            try:
                directory = make_model(Path(folder) / name, name)
            except Exception as error:
                print("CANNOT", name, type(error), error)
                continue
            cells = []
            for packed in (True, False):
                try: cells.append(compare(directory, packed))
                except Exception as error: import traceback; traceback.print_exc(); cells.append(f"RAW {type(error)} {error}"[:300])
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    device.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
