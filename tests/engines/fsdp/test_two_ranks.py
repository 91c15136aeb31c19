"""Two ranks of FSDP take the same steps as one rank. The quick check of test_training.py."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engines.fsdp.cases import CP2, build, train
from tests.support.guarded import unguarded
from tests.support.models import make_model
from tests.support.ranks import on_ranks
from tests.support.training import make_batch

LAYOUTS = {"sharded": "", "replicas": "fsdp_size=1", "shared sequences": CP2}
Steps = tuple[list[dict[str, float]], dict[str, Tensor]]


def take_steps(model: Path, layout: str) -> Steps:
    """Return the metrics of two steps of several micro-batches, and the weights after them."""
    # With a smaller epsilon, Adam would make a whole step of a rounding error in a tiny gradient.
    with unguarded():
        engine = build(model, torch.device("cpu"), layout, ["optim.eps=1e-5"])
    return train(engine, range(2)), dict(engine.export_weights())


def take_steps_in_all_layouts(model: Path) -> dict[str, Steps]:
    return {name: take_steps(model, layout) for name, layout in LAYOUTS.items()}


def test_two_ranks_train_as_one_does(tmp_path):
    model = make_model(tmp_path / "model", "qwen3", num_hidden_layers=1)
    by_rank = on_ranks(2, tmp_path, take_steps_in_all_layouts, model)
    ((expected_metrics, expected_weights),) = on_ranks(1, tmp_path, take_steps, model, "")
    for results in by_rank:
        for name, (metrics, weights) in results.items():
            for own, expected in zip(metrics, expected_metrics, strict=True):
                assert own == pytest.approx(expected, rel=1e-5), name
            assert weights.keys() == expected_weights.keys()
            for key, expected in expected_weights.items():
                torch.testing.assert_close(weights[key], expected, rtol=1e-4, atol=1e-5)


def loss_with_dropout(model: Path) -> float:
    """Return this rank's own loss of a batch that both ranks have."""
    with unguarded():
        engine = build(model, torch.device("cpu"), more=["model.lora.dropout=0.5"], lora=True)
    batch = make_batch(0)
    losses = []

    def loss_fn(log_probs, entropy, fields):
        loss = -log_probs.sum()
        losses.append(loss.item())
        return loss, {}

    engine.train_batch(batch, loss_fn, 0)
    return sum(losses)


def test_each_rank_draws_its_own_dropout(folder, tmp_path):
    first, second = on_ranks(2, tmp_path, loss_with_dropout, folder / "qwen3")
    assert first != pytest.approx(second, rel=1e-4)
