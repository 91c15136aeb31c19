"""Low-precision weights and moments in an engine: checkpoints, host memory, estimates."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from engines.checkpoint.checkpointer import Checkpointer
from engines.fsdp.engine import FSDPEngine
from engines.fsdp.sharding import full_tensor
from engines.fsdp.state import future_optimizer_sizes
from engines.memory import GIB
from engines.parallel import offload
from tests.engines.fsdp.cases import BF16, OFFLOAD, build, make_config, on_ranks, train, worker_case
from tests.support.cases import needs
from tests.support.estimates import estimate_gib
from tests.support.plain import column
from tests.support.training import digest, gather, make_tokenizer

INT8 = "optim.state_dtype=int8"
# name -> (settings of the engine, other settings)
SETTINGS = {
    "bfloat16": (BF16, []),
    "bfloat16, 8 bits": (BF16, [INT8]),
    "8 bits, on the host": (OFFLOAD, [INT8]),
    "muon, fp32 moments": (BF16, ["optim.name=muon", "optim.state_dtype=float32"]),
}


def moments(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Return the optimizers' whole tensors by the name of the weight and of the moment."""
    names = {parameter: name for name, parameter in engine.model.named_parameters()}
    whole = {}
    for torch_optimizer in engine.optimizers:
        for parameter, state in torch_optimizer.state.items():
            for key, tensor in state.items():
                whole[f"{names[parameter]} {key}"] = full_tensor(tensor.to(engine.device))
    return dict(sorted(whole.items()))


def local_bytes(engine: FSDPEngine) -> int:
    """Return the bytes of the moments on this rank, without counters of steps."""
    parts = [x.to_local() if isinstance(x, DTensor) else x for x in engine.tensors_of("optimizer")]
    return sum(part.nbytes for part in parts if part.ndim)


@worker_case(1, 2, reads=[(2, "storage_resume")])
def storage_resume(folder: Path, device: torch.device) -> dict:
    """Resume on any number of ranks what 2 ranks have saved after two steps, for two more.

    2 ranks also go on without interruption.
    """
    offload.MIN_BYTES = 64
    results = {}
    for name, (engine_settings, more) in SETTINGS.items():
        directory = folder / f"checkpoints_{name.replace(' ', '_').replace(',', '')}"
        checkpointer = Checkpointer(directory, 2, asynchronous=False)
        result = results[name] = {}
        if dist.get_world_size() == 2:
            engine = build(folder / "qwen3", device, engine_settings, more)
            expected = sum(future_optimizer_sizes(engine.optimizers, "cpu"))
            train(engine, range(2))
            result["expected and real bytes"] = gather((expected, local_bytes(engine)))
            engine.offload("optimizer")
            result["bytes while offloaded"] = gather(local_storage(engine))
            checkpointer.save(2, engine, {"step": 2}, make_tokenizer())
            result["saved"] = digest(moments(engine))
            result["uninterrupted"] = train(engine, range(2, 4))
            result["weights"] = digest(dict(engine.export_weights()))
        engine = build(folder / "qwen3", device, engine_settings, more)
        checkpointer.load(directory / "step_00000002", engine)
        result["loaded"] = digest(moments(engine))
        result["resumed"] = train(engine, range(2, 4))
        result["resumed weights"] = digest(dict(engine.export_weights()))
        result["bytes"] = gather(local_bytes(engine))
    return results


def local_storage(engine: FSDPEngine) -> int:
    """Return the bytes of the moments' storages that are not offloaded."""
    storages = engine.host_memory.storages(engine.tensors_of("optimizer"))
    return sum(storage.nbytes() for storage in storages)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
@on_ranks("storage_resume", 1, 2, also=[(2, "storage_resume")])
def test_a_checkpoint_is_loaded_bit_by_bit_on_any_number_of_ranks(results, world, name):
    whole = results(2)["storage_resume"][name]
    result = results(world)["storage_resume"][name]
    assert result["loaded"] == whole["saved"]
    losses = column(result["resumed"], "loss")
    assert losses == pytest.approx(column(whole["uninterrupted"], "loss"), rel=5e-3)
    if world == 2:
        assert result["resumed"] == whole["uninterrupted"]
        assert result["resumed weights"] == whole["weights"]


@pytest.mark.slow
@needs((2, "storage_resume"))
@pytest.mark.parametrize("name", SETTINGS)
def test_host_memory_is_reserved_for_the_moments_as_they_are(results, name):
    result = results(2)["storage_resume"][name]
    for expected, real in result["expected and real bytes"]:
        assert expected == real
    if OFFLOAD not in SETTINGS[name][0]:
        # Storages of less than 64 bytes, such as counters of steps, stay.
        assert max(result["bytes while offloaded"]) < 0.1 * max(result["bytes"])


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
@on_ranks("storage_resume", 1, 2)
def test_the_estimate_counts_the_moments(results, folder, world, name):
    result = results(world)["storage_resume"][name]
    engine_settings, more = SETTINGS[name]
    settings = [f"engine.{setting}" for setting in engine_settings.split()]
    config = make_config(folder, f"model.path={folder / 'qwen3'}", *settings, *more)
    terms = estimate_gib(config, world, "cpu")[0]
    label = "optimizer, host" if OFFLOAD in engine_settings else "optimizer"
    estimate = terms[label] * GIB
    assert sum(result["bytes"]) / world == pytest.approx(estimate, rel=0.01)


def test_eight_bit_moments_take_a_quarter(folder):
    plain = estimate_gib(make_config(folder), 1, "cpu")[0]["optimizer"]
    in_8_bits = estimate_gib(make_config(folder, INT8), 1, "cpu")[0]["optimizer"]
    assert 0.25 < in_8_bits / plain < 0.3
