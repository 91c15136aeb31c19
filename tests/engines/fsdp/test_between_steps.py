"""What an engine does between two steps of training leaves no trace in the next one."""

import copy
import math
from collections.abc import Callable

import pytest
import torch

from engines.dropout import DropoutSeeds
from engines.fsdp.engine import FSDPEngine
from engines.teacher import HiddenHead
from tests.engines.fsdp.cases import build, train
from tests.support.training import make_batch

pytestmark = pytest.mark.usefixtures("process_group")


def without_adapters(engine: FSDPEngine) -> None:
    with engine.without_adapters():
        engine.log_probs(make_batch(0))
        list(engine.export_weights())


def padded(engine: FSDPEngine) -> None:
    with engine.padded():
        engine.log_probs(make_batch(0))


PASSES: dict[str, Callable[[FSDPEngine], object]] = {
    "log_probs": lambda engine: engine.log_probs(make_batch(0)),
    "one by one": lambda engine: engine.head_outputs_one_by_one(make_batch(0)),
    "another head": lambda engine: engine.token_outputs(make_batch(0), HiddenHead()),
    "without adapters": without_adapters,
    "padded": padded,
    "export": lambda engine: list(engine.export_weights()),
    "adapters": lambda engine: list(engine.export_adapter()),
    "output matrix": lambda engine: engine.output_matrix(),
    "offloaded": lambda engine: engine.offload("parameters", "optimizer"),
    "saved": lambda engine: engine.state(),
}


@pytest.fixture(scope="module")
def engine(folder) -> FSDPEngine:
    # Dropout shows whether a model is in training mode.
    more = ["model.lora.dropout=0.5"]
    return build(folder / "qwen3", torch.device("cpu"), lora=True, more=more)


@pytest.fixture(scope="module")
def start(engine) -> dict:
    """The state before the first step."""
    return copy.deepcopy(engine.state())


def restart(engine: FSDPEngine, start: dict) -> None:
    engine.load_state(copy.deepcopy(start))
    engine.dropout_seeds = DropoutSeeds(engine.config)


@pytest.fixture(scope="module")
def expected(engine, start) -> list[dict[str, float]]:
    restart(engine, start)
    return train(engine, range(2))


def test_dropout_is_applied_from_the_first_step_on(folder, expected):
    without_dropout = build(folder / "qwen3", torch.device("cpu"), lora=True)
    for metrics, others in zip(expected, train(without_dropout, range(2)), strict=True):
        assert metrics["loss"] != others["loss"]


@pytest.mark.parametrize("name", PASSES)
def test_it_changes_no_number_of_the_next_step(engine, start, expected, name):
    restart(engine, start)
    metrics = train(engine, [0])
    PASSES[name](engine)
    assert [*metrics, *train(engine, [1])] == expected


def test_a_step_without_a_finite_gradient_changes_nothing(engine, start):
    restart(engine, start)
    train(engine, [0])
    before = copy.deepcopy(engine.state())

    def overflowing_loss(log_probs, entropy, fields):
        return log_probs.sum() * torch.inf, {}

    metrics = engine.train_batch(make_batch(1), overflowing_loss, 1)
    assert metrics["skipped"] == 1.0
    assert not math.isfinite(metrics["grad_norm"])
    torch.testing.assert_close(engine.state(), before, rtol=0, atol=0)


def test_what_is_offloaded_comes_back_for_every_method_that_needs_it(engine, start):
    """A step needs it as well: see above."""
    restart(engine, start)
    train(engine, [0])
    results = {
        "log_probs": lambda: engine.log_probs(make_batch(0)),
        "one by one": lambda: engine.head_outputs_one_by_one(make_batch(0)),
        "output matrix": engine.output_matrix,
        "export": lambda: dict(engine.export_weights()),
        "adapter": lambda: dict(engine.export_adapter()),
        "saved": engine.state,
    }
    for name, compute in results.items():
        expected = copy.deepcopy(compute())
        engine.offload("parameters", "optimizer")
        sizes = [x.untyped_storage().nbytes() for x in engine.tensors_of("parameters", "optimizer")]
        assert 0 in sizes
        torch.testing.assert_close(compute(), expected, rtol=0, atol=0, msg=name)
    state = copy.deepcopy(engine.state())
    engine.offload("parameters", "optimizer")
    engine.load_state(copy.deepcopy(state))
    torch.testing.assert_close(engine.state(), state, rtol=0, atol=0)
