"""Cases that run under torchrun: their registry, and the functions that they share.

A case is a function of the folder of models and the device. It returns numbers, which worker.py
writes to FOLDER/{number of ranks}.json under the case's name. The test modules register their cases
when they are imported.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig

from config import load
from data.batching.batch import Batch
from engines.fsdp.engine import FSDPEngine
from engines.heads import Head
from tests.support.cases import CaseKey, needs
from tests.support.guarded import guarded_once
from tests.support.plain import LORA_ALPHA, LORA_RANK
from tests.support.training import (
    SETTINGS,
    TOTAL_STEPS,
    gather,
    make_batch,
    make_loss,
    share_of,
)

CaseFunction = Callable[[Path, torch.device], object]

LORA = (f"rank={LORA_RANK}", f"alpha={LORA_ALPHA}")
# A whole layer at the bottom; above it, and outside of layers, some parameters of several modules.
FREEZE = ("embed_tokens", "layers[.]0[.]", "layers[.]1[.]self_attn", "^model[.]norm")
FREEZE_SETTING = f"model.freeze={[*FREEZE]}"
CP2 = "context_parallel_size=2"
CP4 = "context_parallel_size=4"
AUTO = "context_parallel_size=auto"
PADDED = "use_remove_padding=false"
RECOMPUTE = "activation_checkpointing=true"
OFFLOAD = "cpu_offload=true"
ZERO2 = "reshard_after_forward=false"
ONCE = "sync_each_micro_batch=false"
MASTER = "compute_dtype=bfloat16"
BF16 = "compute_dtype=bfloat16 param_dtype=bfloat16"
AUX = "router_aux_loss_coef=0.3"
COMPILED = "torch_compile=always"


# -- registry --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerCase:
    """A case, and the cases whose files it reads."""

    function: CaseFunction
    reads: tuple[CaseKey, ...] = ()


REGISTRY: dict[CaseKey, WorkerCase] = {}


def register(
    function: CaseFunction, name: str, ranks: Iterable[int], reads: Iterable[CaseKey] = ()
) -> None:
    """Let worker.py run a function under this name, on each of these numbers of ranks."""
    for num_ranks in ranks:
        key = (num_ranks, name)
        assert key not in REGISTRY, key
        REGISTRY[key] = WorkerCase(function, tuple(other for other in reads if other != key))


def worker_case(*ranks: int, reads: Iterable[CaseKey] = ()) -> Callable:
    """Register the decorated function under its own name."""

    def decorate(function: CaseFunction) -> CaseFunction:
        register(function, function.__name__, ranks, reads)
        return function

    return decorate


def on_ranks(name: str, *ranks: int, also: Sequence[CaseKey] = ()) -> pytest.MarkDecorator:
    """Parametrize a test by `world`, the number of ranks that run the case whose result it judges.

    also: further cases whose results the test reads.
    """
    params = [pytest.param(world, marks=needs((world, name), *also)) for world in ranks]
    return pytest.mark.parametrize("world", params)


def with_prerequisites(selected: dict[int, list[str]]) -> dict[int, list[str]]:
    """Add the cases that selected ones read the files of, before those that read them."""
    complete: dict[int, list[str]] = {}

    def add(key: CaseKey) -> None:
        for other in REGISTRY[key].reads:
            add(other)
        num_ranks, name = key
        names = complete.setdefault(num_ranks, [])
        if name not in names:
            names.append(name)

    for num_ranks, names in selected.items():
        for name in names:
            add((num_ranks, name))
    return complete


# -- engines ---------------------------------------------------------------------------------------


def make_config(folder: Path, *pairs: str) -> DictConfig:
    """Return a configuration for checks and estimates, of llama unless pairs name another model."""
    return load("sft.yaml", [f"model.path={folder / 'llama'}", "data.train_files=unused", *pairs])


def build(
    model: Path,
    device: torch.device,
    engine: str = "",
    more: Sequence[str] = (),
    lora: bool = False,
    head: Head = Head.LOG_PROBS,
    always_guarded: bool = False,
) -> FSDPEngine:
    """Build an engine.

    engine: settings of the engine, separated by spaces. more: any other settings.
    lora: with adapters, which begin as those beside the model.
    always_guarded: whether to check that sequences are kept apart even if this process has checked
        the same model, and the same settings of the engine; see guarded_once().
    """
    settings = [
        f"model.path={model}",
        "data.max_tokens_per_micro_batch=60",
        *SETTINGS,
        *(f"engine.{setting}" for setting in engine.split()),
    ]
    if lora:
        adapter = (f"adapter_path={model}_adapter", *LORA)
        settings += [f"model.lora.{setting}" for setting in adapter]
    config = load("sft.yaml", [*settings, *more])
    check = nullcontext() if always_guarded else guarded_once(str(model), (engine, head))
    with check:
        return FSDPEngine(config, device, TOTAL_STEPS, head=head)


def token_cap(num_tokens: int) -> list[str]:
    return [f"data.max_tokens_per_micro_batch={num_tokens}"]


def train(engine: FSDPEngine, steps: Iterable[int], uneven: bool = False) -> list[dict[str, float]]:
    """Take these steps and return their metrics. uneven: see divide()."""
    metrics = []
    for step in steps:
        batch = make_batch(step)
        sequences, micro_batches = share_of(engine, batch.lengths, uneven)
        loss_fn = make_loss(len(batch.input_ids))
        metrics.append(engine.train_batch(batch.select(sequences), loss_fn, step, micro_batches))
    return metrics


def answers_of(engine: FSDPEngine, uneven: bool = False) -> torch.Tensor:
    """Return log_probs, entropy and greedy of batch 0, [ranks, 3, T], NaN where a rank has none."""
    whole = make_batch(0)
    batch = Batch(whole.input_ids, whole.cu_seqlens)  # no mask: all tokens count
    sequences, micro_batches = share_of(engine, batch.lengths, uneven)
    token_indices = Batch(torch.arange(len(batch.input_ids)), batch.cu_seqlens)
    mine = token_indices.select(sequences).input_ids
    outputs = engine.log_probs(batch.select(sequences), micro_batches)
    answers = torch.full((3, len(batch.input_ids)), torch.nan)
    answers[:, mine] = torch.stack([x.float() for x in outputs]).cpu()
    return torch.stack(gather(answers))
