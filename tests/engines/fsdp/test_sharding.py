"""What ranks of FSDP exchange and report, in processes with a gloo group."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engines.fsdp.engine import FSDPEngine
from tests.engines.fsdp.cases import make_config
from tests.support.ranks import on_ranks
from tests.support.training import make_batch, make_loss

# The numbers of the 8 sequences of a batch.
FOUR_MICRO_BATCHES = [(1, [7, 2]), (1, [5]), (1, [0, 3, 6]), (1, [4, 1])]


class CountOperators(TorchDispatchMode):
    """Counts calls of operators by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


@dataclass
class Step:
    """The results of a step of four micro-batches.

    Attributes:
        num_gathers: how often weights are gathered from the ranks, all layers together.
        num_reductions: how often gradients are put together to be divided over the ranks.
    """

    metrics: dict[str, float]
    weights: dict[str, torch.Tensor]
    num_gathers: int
    num_reductions: int


def run_step(model: Path, zero2: bool) -> Step:
    settings = ["engine.compute_dtype=bfloat16", f"engine.reshard_after_forward={not zero2}"]
    config = make_config(model.parent, f"model.path={model}", *settings)
    engine = FSDPEngine(config, torch.device("cpu"), total_steps=4)
    batch = make_batch(1)
    loss_fn = make_loss(len(batch.input_ids))
    with CountOperators() as operators:
        metrics = engine.train_batch(batch, loss_fn, 1, FOUR_MICRO_BATCHES)
    return Step(
        metrics=metrics,
        weights=dict(engine.export_weights()),
        num_gathers=operators.counts["c10d._allgather_base_.default"],
        num_reductions=operators.counts["fsdp.chunk_cat.default"],
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("zero2", [True, False])
def test_sparing_communication_changes_no_bit(folder, tmp_path, monkeypatch, zero2, num_ranks):
    for name in ("sparing", "plain"):
        (tmp_path / name).mkdir()
    sparing = on_ranks(num_ranks, tmp_path / "sparing", run_step, folder / "qwen3", zero2)[0]
    monkeypatch.setattr("engines.fsdp.engine.begin_micro_batch", lambda *_: None)
    plain = on_ranks(num_ranks, tmp_path / "plain", run_step, folder / "qwen3", zero2)[0]
    assert sparing.metrics == plain.metrics
    for name, weight in plain.weights.items():
        assert sparing.weights[name].equal(weight), name

    assert plain.num_reductions > 0
    spared = 4 if num_ranks == 1 else 1
    assert plain.num_reductions == spared * sparing.num_reductions
    if num_ranks == 1:
        return  # There is nobody to gather from.
    assert plain.num_gathers > 0
    spared = 4 if zero2 else 1
    assert plain.num_gathers == spared * sparing.num_gathers


@pytest.mark.slow
def test_one_unit_for_the_whole_model_changes_no_bit(folder, tmp_path, monkeypatch):
    for name in ("whole", "layers"):
        (tmp_path / name).mkdir()
    whole = on_ranks(1, tmp_path / "whole", run_step, folder / "qwen3", True)[0]
    monkeypatch.setattr("engines.fsdp.sharding.is_one_unit", lambda *_: False)
    layers = on_ranks(1, tmp_path / "layers", run_step, folder / "qwen3", True)[0]
    assert whole.metrics == layers.metrics
    for name, weight in layers.weights.items():
        assert whole.weights[name].equal(weight), name
    assert whole.num_reductions == 1
    assert layers.num_reductions > 1


def reports_own_group(model: Path, context_parallel_size: int | str) -> bool:
    settings = f"engine.context_parallel_size={context_parallel_size}"
    config = make_config(model.parent, f"model.path={model}", settings)
    engine = FSDPEngine(config, torch.device("cpu"), total_steps=4)
    return engine.reports_group(engine.cp_groups[2])


@pytest.mark.slow
@pytest.mark.parametrize("size, reports", [(2, [True, True]), ("auto", [True, False])])
def test_who_reports_the_results_of_two_ranks_that_share_sequences(folder, tmp_path, size, reports):
    """With a fixed size, sums are over the data-parallel group of each rank, otherwise over all."""
    assert on_ranks(2, tmp_path, reports_own_group, folder / "qwen3", size) == reports
