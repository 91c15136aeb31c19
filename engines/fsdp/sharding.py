"""How FSDP2 divides a model over ranks."""

from collections import defaultdict

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Partial

from engines.parallel.collectives import groups_of_grid

# The parameters of a layer in which a micro-batch of 8,192 tokens computes for 8 ms at 400 TFLOP/s.
LARGE_LAYER = 64_000_000
# The axes of the mesh: copies of the weights, and the ranks that share one copy.
REPLICATE = "replicate"
SHARD = "shard"


def shard(
    model: nn.Module, layers: list[nn.Module], config: DictConfig, device_type: str, world_size: int
) -> None:
    """Shard each layer, then the rest of the model, in place. See is_one_unit()."""
    if not is_sharded(config, world_size):
        return
    engine = config.engine
    options = {
        "mesh": fsdp_mesh(engine, device_type, world_size),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, engine.compute_dtype),
            reduce_dtype=getattr(torch, engine.reduce_dtype),
        ),
        "offload_policy": offload_policy(engine, device_type),
    }
    if is_replicated(config, world_size):
        options["ignored_params"] = {p for p in model.parameters() if not p.requires_grad}
    units = [] if is_one_unit(config, layers, world_size) else layers
    for layer in units:
        fully_shard(layer, reshard_after_forward=engine.reshard_after_forward, **options)
    fully_shard(model, reshard_after_forward=False, **options)


def is_sharded(config: DictConfig, world_size: int) -> bool:
    """Return whether to use FSDP.

    A single rank has nothing to divide. Unless weights must be cast to another dtype for computing,
    FSDP would only copy every weight through its buffers. (Adapters are cast by their own layers:
    see engines/model/lora.py.)
    """
    engine = config.engine
    has_adapters = config.model.lora.rank > 0
    needs_cast = engine.param_dtype != engine.compute_dtype and not has_adapters
    return world_size > 1 or engine.cpu_offload or needs_cast


def is_one_unit(config: DictConfig, layers: list[nn.Module], world_size: int) -> bool:
    """Return whether FSDP treats the whole model as one unit, instead of each layer.

    For each layer and micro-batch, FSDP keeps the host busy for some 3 ms. In a small model, the
    GPU waits for it half of the time. Units are only needed to gather weights and to reduce
    gradients layer by layer. With ZeRO-2, all weights stay gathered anyway. So if gradients are
    reduced once per step, or there are no other ranks, one unit serves as well. Its price is memory
    for a copy of all gradients. A model with large layers, whose computation hides FSDP's work,
    keeps its units.
    """
    engine = config.engine
    if engine.reshard_after_forward or engine.cpu_offload:
        return False
    if world_size == 1:
        return True
    if engine.sync_each_micro_batch:
        return False
    return largest_layer(config, layers, world_size) < LARGE_LAYER


def largest_layer(config: DictConfig, layers: list[nn.Module], world_size: int) -> int:
    """Return the number of parameters that FSDP divides in the layer with most of them."""
    has_only_adapters = is_replicated(config, world_size)
    sizes = []
    for layer in layers:
        divided = [p for p in layer.parameters() if p.requires_grad or not has_only_adapters]
        sizes.append(sum(p.numel() for p in divided))
    return max(sizes, default=0)


def is_replicated(config: DictConfig, world_size: int) -> bool:
    """Return whether each rank holds all frozen weights, so that FSDP divides only the adapters."""
    engine = config.engine
    has_whole_model = world_size == 1 or engine.fsdp_size == 1
    return config.model.lora.rank > 0 and not engine.cpu_offload and has_whole_model


def num_shards(engine: DictConfig, world_size: int) -> int:
    """Return the number of ranks that share one copy of the weights."""
    return engine.fsdp_size if engine.fsdp_size > 0 else world_size


def has_replicas(engine: DictConfig, world_size: int) -> bool:
    """Return whether there are several copies of the weights, each shared by some of the ranks."""
    return num_shards(engine, world_size) < world_size


def fsdp_mesh(engine: DictConfig, device_type: str, world_size: int) -> DeviceMesh:
    """Return the mesh for sharding, with a second axis if there are several replicas."""
    size = num_shards(engine, world_size)
    if not has_replicas(engine, world_size):
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=(SHARD,))
    shape = (world_size // size, size)
    ranks = torch.arange(world_size).reshape(shape)
    names = (REPLICATE, SHARD)
    groups = groups_of_grid(shape)
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)


def offload_policy(engine: DictConfig, device_type: str) -> OffloadPolicy:
    if engine.cpu_offload:
        return CPUOffloadPolicy(pin_memory=device_type != "cpu")
    return OffloadPolicy()


def sums_replicas_once(model: nn.Module, engine: DictConfig, world_size: int) -> bool:
    """Return whether replicas sum their gradients once per step, not after each micro-batch.

    Until then, FSDP adds up the micro-batches in reduce_dtype. This must not round more than the
    dtype of the weights does.
    """
    if engine.cpu_offload or not has_replicas(engine, world_size):
        return False
    return engine.sync_each_micro_batch and sums_precisely(model, engine)


def reduces_once(model: nn.Module, engine: DictConfig, world_size: int) -> bool:
    """Return whether ranks exchange gradients once per step, not after each micro-batch.

    Until then, each rank keeps the gradients of all weights, in reduce_dtype. A single rank, which
    has nobody to exchange them with, keeps them in any case if this does not round more than the
    dtype of the weights does.
    """
    if engine.cpu_offload:
        return False
    if world_size == 1:
        return sums_precisely(model, engine)
    return not engine.sync_each_micro_batch


def sums_precisely(model: nn.Module, engine: DictConfig) -> bool:
    """Return whether sums in reduce_dtype round no more than the dtype of the weights does."""
    reduce_bytes = getattr(torch, engine.reduce_dtype).itemsize
    trained = [p for p in model.parameters() if p.requires_grad]
    return all(p.element_size() <= reduce_bytes for p in trained)


def begin_micro_batch(model: nn.Module, engine: DictConfig, world_size: int, is_last: bool) -> None:
    """Skip communication between a step's micro-batches where this changes only the rounding.

    With ZeRO-2, the weights stay gathered until the step's last backward pass. Gradients are
    reduced in the last micro-batch where reduces_once() says so. Otherwise, only the sum over
    replicas waits for it. See check_all_are_summed(). With engine.cpu_offload, nothing is skipped.

    is_last: whether this is the step's last micro-batch.
    """
    if not isinstance(model, FSDPModule) or engine.cpu_offload:
        return
    if not engine.reshard_after_forward:
        model.set_reshard_after_backward(is_last)
    if reduces_once(model, engine, world_size):
        model.set_requires_gradient_sync(is_last)
    elif sums_replicas_once(model, engine, world_size):
        model.set_requires_all_reduce(is_last)


def check_all_are_summed(model: nn.Module, engine: DictConfig, world_size: int) -> None:
    """Check that no gradient still waits to be summed over ranks after a step's last backward.

    FSDP would add it to the next step's.

    Raises:
        RuntimeError: a layer had a gradient in an earlier micro-batch, but none in the last one.
    """
    waits = reduces_once(model, engine, world_size) or sums_replicas_once(model, engine, world_size)
    if not waits:
        return
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        group = module._get_fsdp_state()._fsdp_param_group
        if group is not None and has_unsummed_gradients(group):
            raise RuntimeError(
                f"{name or 'the model'} has no gradient in the last micro-batch of a step, but in "
                "an earlier one: the ranks have not summed it"
            )


def has_unsummed_gradients(group: FSDPParamGroup) -> bool:
    """Return whether gradients of a unit still wait for a sum over ranks or replicas."""
    if group._partial_reduce_output is not None:
        return True
    return any(p.unsharded_accumulated_grad is not None for p in group.fsdp_params)


def gather(model: nn.Module) -> None:
    """Gather all parameters. They stay gathered until FSDP or reshard() frees them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def reshard(model: nn.Module) -> None:
    """Free all gathered parameters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor on every rank; return any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """Return the norm of all elements of all gradients, [] fp32. Called by all ranks.

    torch.nn.utils.get_total_norm() would round the norm of bfloat16 gradients to bfloat16.
    """
    parts_by_layout: dict[tuple, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            layout = (gradient.device_mesh, gradient.placements)
            parts_by_layout[layout].append(gradient.to_local())
        else:
            parts_by_layout[()].append(gradient)
    squares = []
    for layout, parts in parts_by_layout.items():
        norms = torch._foreach_norm(parts, 2, dtype=torch.float32)
        square = torch.stack(norms).square().sum()
        if layout:
            mesh, placements = layout
            sums = [p if p.is_replicate() else Partial() for p in placements]
            square = DTensor.from_local(square, mesh, sums, run_check=False).full_tensor()
        squares.append(square)
    if not squares:
        return torch.zeros(())
    device = squares[0].device  # not the host: the device would have to wait for it
    return torch.stack([square.to(device) for square in squares]).sum().sqrt()
