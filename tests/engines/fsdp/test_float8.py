"""Training with layers in FP8: on one and two ranks, recomputed, with adapters, resumed."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engines.checkpoint.checkpointer import Checkpointer
from engines.model import float8
from tests.engines.fsdp.cases import AUX, MASTER, RECOMPUTE, build, on_ranks, train, worker_case
from tests.support.cases import needs
from tests.support.plain import column
from tests.support.torchao import make_importable
from tests.support.training import digest, make_tokenizer

ROWWISE = f"{MASTER} float8=rowwise"
TENSORWISE = f"{MASTER} float8=tensorwise"
GATHERED = "reshard_after_forward=false"
# name -> (family, settings of the engine, with adapters)
SETTINGS = {
    "bf16": ("qwen3", MASTER, False),
    "rowwise": ("qwen3", ROWWISE, False),
    "tensorwise": ("qwen3", TENSORWISE, False),
    "gathered": ("qwen3", f"{TENSORWISE} {GATHERED}", False),
    "cached": ("qwen3", f"{TENSORWISE} {GATHERED} float8_cache_weights=true", False),
    "adapters, whole weights": ("qwen3", f"{TENSORWISE} fsdp_size=1", True),
    "adapters, cached": ("qwen3", f"{TENSORWISE} fsdp_size=1 float8_cache_weights=true", True),
    "recomputed": ("qwen3", f"{ROWWISE} {RECOMPUTE}", False),
    "adapters": ("qwen3", ROWWISE, True),
    "adapters in bf16": ("qwen3", MASTER, True),
    "experts": ("qwen3_moe_balanced", f"{ROWWISE} {AUX}", False),
}
NUM_STEPS = 2


@worker_case(1, 2)
def float8_training(folder: Path, device: torch.device) -> dict:
    make_importable()
    results = {}
    for name, (family, settings, has_adapters) in SETTINGS.items():
        engine = build(folder / family, device, settings, lora=has_adapters)
        layers = [module for module in engine.hf.modules() if float8.is_float8(module)]
        results[name] = {
            "layers": len(layers),
            "dtypes": sorted({str(layer.weight.dtype) for layer in layers}),
            "metrics": train(engine, range(NUM_STEPS)),
            "weights": digest(dict(engine.export_weights())),
        }
    return results


@worker_case(2)
def float8_resume(folder: Path, device: torch.device) -> dict:
    make_importable()
    directory = folder / "float8_checkpoints"
    checkpointer = Checkpointer(directory, 2, asynchronous=False)
    engine = build(folder / "qwen3", device, ROWWISE)
    train(engine, range(2))
    checkpointer.save(2, engine, {"step": 2}, make_tokenizer())
    uninterrupted = train(engine, range(2, 4))
    dist.barrier()
    engine = build(folder / "qwen3", device, ROWWISE)
    checkpointer.load(directory / "step_00000002", engine)
    return {"uninterrupted": uninterrupted, "resumed": train(engine, range(2, 4))}


def losses(results, world: int, name: str) -> list[float]:
    return column(results(world)["float8_training"][name]["metrics"], "loss")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rowwise", "tensorwise", "adapters"])
@on_ranks("float8_training", 1, 2)
def test_losses_in_fp8_are_near_those_in_bf16(results, world, name):
    exact = losses(results, world, "adapters in bf16" if name == "adapters" else "bf16")
    in_fp8 = losses(results, world, name)
    assert in_fp8 == pytest.approx(exact, rel=0.01)
    assert in_fp8 != exact
    assert losses(results, world, "bf16")[-1] != exact[0]  # the model learns


@pytest.mark.slow
@on_ranks("float8_training", 1, 2)
def test_the_linear_layers_of_a_decoder_are_in_fp8(results, world):
    result = results(world)["float8_training"]
    num_layers = result["rowwise"]["layers"] // 7
    assert num_layers > 1
    assert result["rowwise"]["layers"] == 7 * num_layers
    assert result["adapters"]["layers"] == 7 * num_layers
    assert result["bf16"]["layers"] == 0
    assert result["experts"]["layers"] > 0
    assert result["experts"]["layers"] % 4 == 0  # attention alone
    # Without a cast by FSDP, as with adapters, weights have the compute dtype.
    assert result["adapters"]["dtypes"] == ["torch.bfloat16"]


@pytest.mark.slow
@on_ranks("float8_training", 1, 2)
def test_recomputing_layers_changes_nothing(results, world):
    result = results(world)["float8_training"]
    assert result["recomputed"]["metrics"] == result["rowwise"]["metrics"]
    assert result["recomputed"]["weights"] == result["rowwise"]["weights"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cached, plain", [("cached", "gathered"), ("adapters, cached", "adapters, whole weights")]
)
@on_ranks("float8_training", 1, 2)
def test_weights_rounded_once_per_batch_change_nothing(results, world, cached, plain):
    result = results(world)["float8_training"]
    assert result[cached]["layers"] > 0
    assert result[cached]["metrics"] == result[plain]["metrics"]
    assert result[cached]["weights"] == result[plain]["weights"]


@pytest.mark.slow
@needs((1, "float8_training"), (2, "float8_training"))
@pytest.mark.parametrize("name", ["rowwise", "tensorwise", "adapters", "experts"])
def test_the_number_of_ranks_changes_only_rounding(results, name):
    assert losses(results, 2, name) == pytest.approx(losses(results, 1, name), rel=0.01)


@pytest.mark.slow
@needs((2, "float8_resume"))
def test_a_resumed_run_repeats_every_bit(results):
    result = results(2)["float8_resume"]
    assert result["resumed"] == result["uninterrupted"]
