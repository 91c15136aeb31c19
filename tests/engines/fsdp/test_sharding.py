"""What ranks of FSDP exchange and report, in processes with a gloo group."""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engines.fsdp.engine import FSDPEngine
from engines.fsdp.sharding import gradient_norm, is_one_unit, largest_layer
from engines.fsdp.transforms import build_model
from engines.heads import Head
from engines.model.hf import layer_modules
from tests.engines.fsdp.cases import make_config
from tests.support.guarded import unguarded
from tests.support.models import make_model
from tests.support.ranks import on_ranks
from tests.support.training import make_batch, make_loss

ZERO_2 = "engine.reshard_after_forward=false"
ONCE = "engine.sync_each_micro_batch=false"
# The numbers of the 8 sequences of a batch.
FOUR_MICRO_BATCHES = [(1, [7, 2]), (1, [5]), (1, [0, 3, 6]), (1, [4, 1])]


class CountOperators(TorchDispatchMode):
    """Counts calls of operators by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor comes back with what it does on the local parts.
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


@dataclass
class Step:
    """The results of a step of four micro-batches.

    Attributes:
        num_gathers: how often weights are gathered from the ranks, all layers together.
        num_reductions: how often gradients are put together to be divided over the ranks.
        num_all_reduces: how often all ranks sum something, gradients of replicas among it.
        num_units: the parts that FSDP handles one by one: the layers, and the rest.
    """

    metrics: dict[str, float]
    weights: dict[str, torch.Tensor]
    num_gathers: int
    num_reductions: int
    num_all_reduces: int
    num_units: int


def run_step(model: Path, *settings: str) -> Step:
    pairs = [f"model.path={model}", "engine.compute_dtype=bfloat16", *settings]
    config = make_config(model.parent, *pairs)
    with unguarded():
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
        num_all_reduces=operators.counts["c10d.allreduce_.default"],
        num_units=sum(isinstance(module, FSDPModule) for module in engine.model.modules()),
    )


def run_both(folder, tmp_path, monkeypatch, num_ranks, *settings) -> tuple[Step, Step]:
    """Return a step that spares communication between micro-batches, and one that does not."""
    for name in ("sparing", "plain"):
        (tmp_path / name).mkdir()
    sparing = on_ranks(num_ranks, tmp_path / "sparing", run_step, folder / "qwen3", *settings)[0]
    monkeypatch.setattr("engines.fsdp.sharding.begin_micro_batch", lambda *_: None)
    plain = on_ranks(num_ranks, tmp_path / "plain", run_step, folder / "qwen3", *settings)[0]
    return sparing, plain


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("zero2", [True, False])
def test_sparing_communication_changes_no_bit(folder, tmp_path, monkeypatch, zero2, num_ranks):
    setting = f"engine.reshard_after_forward={not zero2}"
    sparing, plain = run_both(folder, tmp_path, monkeypatch, num_ranks, setting)
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
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_unit_for_the_whole_model_changes_no_bit(folder, tmp_path, monkeypatch, num_ranks):
    settings = [ZERO_2, ONCE] if num_ranks > 1 else [ZERO_2]
    for name in ("whole", "layers"):
        (tmp_path / name).mkdir()
    whole = on_ranks(num_ranks, tmp_path / "whole", run_step, folder / "qwen3", *settings)[0]
    monkeypatch.setattr("engines.fsdp.sharding.LARGE_LAYER", 0)
    if num_ranks == 1:
        monkeypatch.setattr("engines.fsdp.sharding.is_one_unit", lambda *_: False)
    layers = on_ranks(num_ranks, tmp_path / "layers", run_step, folder / "qwen3", *settings)[0]
    assert whole.metrics == layers.metrics
    for name, weight in layers.weights.items():
        assert whole.weights[name].equal(weight), name
    assert whole.num_reductions == whole.num_units == 1
    assert layers.num_reductions == layers.num_units > 1


def test_which_models_are_one_unit(folder):
    def is_one(*settings: str, world_size: int = 2) -> bool:
        config = make_config(folder, *settings)
        hf, _ = build_model(config, Head.LOG_PROBS)
        return is_one_unit(config, layer_modules(hf, hf), world_size)

    assert is_one(ZERO_2, world_size=1)
    assert not is_one(world_size=1)
    assert is_one(ZERO_2, ONCE)
    assert not is_one(ONCE)
    assert not is_one(ZERO_2)
    assert not is_one(ZERO_2, "engine.cpu_offload=true", world_size=1)


WHOLE_LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
ADAPTERS_OF_LAYER = 4 * (2 * 64 + 2 * 48 + 3 * 80)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ([], WHOLE_LAYER),
        (["model.freeze=[mlp]"], WHOLE_LAYER),
        (["model.lora.rank=4"], WHOLE_LAYER + ADAPTERS_OF_LAYER),
        (["model.lora.rank=4", "engine.fsdp_size=1"], ADAPTERS_OF_LAYER),
    ],
    ids=["whole", "frozen", "adapters", "adapters of replicas"],
)
def test_the_size_of_a_layer_is_that_of_what_fsdp_divides(folder, settings, expected):
    """Replicas of adapters each have the frozen weights."""
    config = make_config(folder, *settings)
    hf, _ = build_model(config, Head.LOG_PROBS)
    assert largest_layer(config, layer_modules(hf, hf), 2) == expected
    assert largest_layer(config, [], 2) == 0


def test_a_model_with_large_layers_keeps_its_units(tmp_path):
    sizes = {"hidden_size": 4096, "intermediate_size": 4096}
    make_model(tmp_path / "llama", "llama", num_hidden_layers=1, **sizes)
    adapters = "model.lora.rank=4"
    cases = [([], False), ([adapters], False), ([adapters, "engine.fsdp_size=1"], True)]
    for settings, expected in cases:
        config = make_config(tmp_path, ZERO_2, ONCE, *settings)
        hf, _ = build_model(config, Head.LOG_PROBS)
        assert is_one_unit(config, layer_modules(hf, hf), 2) == expected, settings


def gathers_beside_fsdp(model: Path, *settings: str) -> list[str]:
    """Return what gathers in a step, other than FSDP itself."""
    pairs = [f"model.path={model}", "engine.compute_dtype=bfloat16", *settings]
    engine = FSDPEngine(make_config(model.parent, *pairs), torch.device("cpu"), total_steps=4)
    batch = make_batch(1)
    loss_fn = make_loss(len(batch.input_ids))
    with CountOperators() as operators:
        engine.train_batch(batch, loss_fn, 1, FOUR_MICRO_BATCHES)
    assert any("c10d_functional.all_reduce" in name for name in operators.counts)  # the norm's
    return [name for name in operators.counts if "c10d_functional.all_gather" in name]


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["engine.param_dtype=bfloat16", "optim.state_dtype=int8"])
def test_an_update_gathers_no_weights(folder, tmp_path, settings):
    found = on_ranks(2, tmp_path, gathers_beside_fsdp, folder / "qwen3", settings)
    assert found == [[], []]


def norm_of_gradients(shape: tuple[int, ...]) -> tuple[float, float]:
    """Return the norm of gradients in all layouts, and the same from float64.

    shape: of the mesh; with two dimensions, parts are copied over the first one.
    """
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(size, generator=generator) for size in [(3, 5), (7,), (2, 2), (4,)]]
    wholes[1:] = [whole.bfloat16() for whole in wholes[1:]]
    names = ("copies", "parts")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    copies = [Replicate()] * len(shape)
    parts = [*copies[1:], Shard(0)]  # three rows on two ranks
    sharded = [
        distribute_tensor(whole, mesh, layout)
        for whole, layout in zip(wholes, [parts, copies, parts])
    ]
    expected = torch.cat([whole.flatten().double() for whole in wholes]).norm()
    return gradient_norm([*sharded, wholes[3]]).item(), expected.item()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1,), (2,), (2, 1)])
def test_the_norm_of_bfloat16_gradients_is_not_rounded_to_bfloat16(tmp_path, shape):
    for norm, expected in on_ranks(math.prod(shape), tmp_path, norm_of_gradients, shape):
        assert norm == pytest.approx(expected, rel=1e-6)


def test_the_norm_of_no_gradients_is_zero():
    assert gradient_norm([]) == 0


def reports_own_group(model: Path, context_parallel_size: int | str) -> bool:
    settings = f"engine.context_parallel_size={context_parallel_size}"
    config = make_config(model.parent, f"model.path={model}", settings)
    with unguarded():
        engine = FSDPEngine(config, torch.device("cpu"), total_steps=4)
    return engine.reports_group(engine.cp_groups[2])


@pytest.mark.slow
@pytest.mark.parametrize("size, reports", [(2, [True, True]), ("auto", [True, False])])
def test_who_reports_the_results_of_two_ranks_that_share_sequences(folder, tmp_path, size, reports):
    """With a fixed size, sums are over the data-parallel group of each rank, otherwise over all."""
    assert on_ranks(2, tmp_path, reports_own_group, folder / "qwen3", size) == reports


@pytest.mark.slow
@pytest.mark.parametrize("reduce_dtype, spared", [("float32", 3), ("bfloat16", 0)])
def test_replicas_sum_their_gradients_once_per_step(
    folder, tmp_path, monkeypatch, reduce_dtype, spared
):
    """In bfloat16, adding up the four micro-batches would round more than fp32 weights do."""
    settings = ["engine.fsdp_size=1", f"engine.reduce_dtype={reduce_dtype}"]
    sparing, plain = run_both(folder, tmp_path, monkeypatch, 2, *settings)
    assert plain.num_all_reduces - sparing.num_all_reduces == spared * plain.num_units
    for name, expected in plain.metrics.items():
        assert sparing.metrics[name] == pytest.approx(expected, rel=1e-5), name
    for name, expected in plain.weights.items():
        torch.testing.assert_close(sparing.weights[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp_size, zero2", [(-1, True), (-1, False), (1, False)])
def test_ranks_sum_their_gradients_once_per_step(folder, tmp_path, monkeypatch, fsdp_size, zero2):
    layout = [f"engine.fsdp_size={fsdp_size}", f"engine.reshard_after_forward={not zero2}"]
    settings = [*layout, ONCE]
    sparing, plain = run_both(folder, tmp_path, monkeypatch, 2, *settings)
    assert plain.num_reductions == 4 * sparing.num_reductions > 0
    for name, expected in plain.metrics.items():
        assert sparing.metrics[name] == pytest.approx(expected, rel=1e-5), name
    for name, expected in plain.weights.items():
        torch.testing.assert_close(sparing.weights[name], expected, rtol=1e-4, atol=1e-5)


def error_of_step(model: Path, *settings: str) -> str:
    with pytest.raises(RuntimeError) as raised:
        run_step(model, *settings)
    return str(raised.value)


def never_sum_replicas(model, *_) -> None:
    model.set_requires_all_reduce(False)


def never_sum(model, *_) -> None:
    model.set_requires_gradient_sync(False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "begin_micro_batch, setting",
    [
        (never_sum_replicas, "engine.fsdp_size=1"),
        (never_sum, ONCE),
    ],
)
def test_gradients_that_ranks_have_not_summed_are_an_error(
    folder, tmp_path, monkeypatch, begin_micro_batch, setting
):
    monkeypatch.setattr("engines.fsdp.sharding.begin_micro_batch", begin_micro_batch)
    for error in on_ranks(2, tmp_path, error_of_step, folder / "qwen3", setting):
        assert "the ranks have not summed it" in error
