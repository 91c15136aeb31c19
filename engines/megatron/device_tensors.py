"""The tensors of an engine that take up device memory, for offloading.

Parameters and gradients are views of DDP's few large buffers. If parameters are fp32, the
optimizer's weights are views of the same buffers.
"""

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn


def parameters_of(models: list[nn.Module]) -> list[Tensor]:
    """Return all parameters."""
    return [parameter for model in models for parameter in model.parameters()]


def optimizer_tensors(models: list[nn.Module], optimizer: MegatronOptimizer) -> list[Tensor]:
    """Return the optimizer's weights and state that share no storage with the parameters."""
    parameter_storages = {x.untyped_storage()._cdata for x in parameters_of(models)}
    tensors = []
    for inner in optimizer.chained_optimizers:
        tensors += inner.get_parameters()
        for state in inner.state.values():
            tensors += state.values()
    return [x for x in tensors if x.untyped_storage()._cdata not in parameter_storages]


def weights_without_state(optimizer: MegatronOptimizer) -> list[Tensor]:
    """Return the optimizer's weights that have no state yet, since no step has been taken."""
    weights = []
    for inner in optimizer.chained_optimizers:
        if not inner.state:
            weights += inner.get_parameters()
    return weights


def gradient_buffers(stages: list[DistributedDataParallel]) -> list[Tensor]:
    """Return DDP's gradient buffers."""
    return [
        buffer.grad_data
        for stage in stages
        for buffer in (*stage.buffers, *stage.expert_parallel_buffers)
    ]
