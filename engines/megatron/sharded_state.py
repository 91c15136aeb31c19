"""The state of a Megatron model and its optimizer, in a form that any layout of ranks can read.

The optimizer's state is stored per weight, in the same format for all of Megatron's optimizers.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from engines.megatron.adapters import adapter_names, sharded_adapter_state

# The distributed optimizer's state is stored per whole weight, so that any layout can read it. One
# of the ranks that share it gathers it in host memory. (Without the second key, each of these ranks
# would gather it in device memory, which takes 4 bytes per parameter.)
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}


def sharded_state(
    models: list[nn.Module],
    optimizer: MegatronOptimizer | None,
    loading: bool,
    has_frozen_layers: bool,
) -> dict:
    """Return an engine's state for checkpoint_files.write() or read().

    Args:
        loading: True for read(), which fills the state.
        has_frozen_layers: True stores each layer's tensors under their own names. Otherwise
            Megatron stacks all layers, and would need optimizer state for the frozen ones, too.
    """
    metadata = {
        **METADATA,
        "non_homogeneous_layers": has_frozen_layers,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }
    state = {}
    for name, model in zip(model_keys(models), models):
        if adapter_names(model):
            state[name] = sharded_adapter_state(model)
        else:
            state[name] = model.sharded_state_dict(metadata=metadata)
    if optimizer is not None:
        device = next(models[0].parameters()).device
        state["optimizer"] = sharded_optimizer_state(optimizer, dict(state), loading, device)
    return state


def model_keys(models: list[nn.Module]) -> list[str]:
    """Return the keys in the state for this rank's virtual pipeline stages."""
    if len(models) == 1:
        return ["model"]
    return [f"model{number}" for number in range(len(models))]


def load_state(models: list[nn.Module], optimizer: MegatronOptimizer | None, state: dict) -> None:
    """Load a state that checkpoint_files.read() returned."""
    for name, model in zip(model_keys(models), models):
        missing, unexpected = model.load_state_dict(state[name], strict=False)
        frozen = {
            name for name, parameter in model.named_parameters() if not parameter.requires_grad
        }
        # TransformerEngine has an extra state for fp8, which may be missing.
        missing = [
            name for name in missing if name not in frozen and not name.endswith("_extra_state")
        ]
        assert not missing, missing
        assert not unexpected, unexpected
    if optimizer is not None:
        for number, inner in enumerate(optimizer.chained_optimizers):
            load_optimizer_state(inner, state["optimizer"].get(number, {}))
            set_step(inner, state["optimizer"]["step"])


# -- optimizers ------------------------------------------------------------------------------------


def sharded_optimizer_state(
    optimizer: MegatronOptimizer, model_state: dict, loading: bool, device: torch.device
) -> dict:
    """Return the state of all chained optimizers by number, and the "step".

    Experts have their own optimizer. A pipeline stage that has nothing to train has no state.
    """
    chained = optimizer.chained_optimizers
    states = [weight_states(inner, dict(model_state), loading) for inner in chained]
    state = {number: tensors for number, tensors in enumerate(states) if tensors}
    state["step"] = num_steps_of_run(chained, device)
    return state


def num_steps_of_run(chained: list, device: torch.device) -> float:
    """Return the largest number of steps that an optimizer of any rank has taken.

    A pipeline stage that has nothing to train counts no steps.
    """
    num_steps = torch.tensor(max(map(get_step, chained)), device=device)
    dist.all_reduce(num_steps, dist.ReduceOp.MAX)
    return num_steps.item()


def weight_states(optimizer, model_state: dict, loading: bool) -> dict[int, dict]:
    """Return the state of each weight in an optimizer, by the number of the weight.

    The state consists of exp_avg, exp_avg_sq and, if the weight is not fp32, fp32_param.
    """
    # Before the first step there is no state, so create it. init_state_fn() leaves out the step.
    optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    set_step(optimizer, get_step(optimizer))
    if isinstance(optimizer, DistributedOptimizer):
        return distributed_weight_states(optimizer, model_state, loading)
    sharded_tensors = extract_sharded_tensors_and_factories(model_state)[0]
    sharded_by_id = {id(sharded.data): sharded for sharded in nested_values(sharded_tensors)}
    states = {}
    for number, (weight, tensors) in enumerate(replicated_states(optimizer)):
        states[number] = {
            name: make_sharded_optimizer_tensor(
                sharded_by_id[id(weight)], tensor, f"optimizer.state.{name}"
            )
            for name, tensor in tensors.items()
        }
    return states


def distributed_weight_states(
    optimizer: DistributedOptimizer, model_state: dict, loading: bool
) -> dict[int, dict]:
    """Do the same as weight_states() for the distributed optimizer.

    When loading, only the states of this rank's weights are returned.
    """
    keep_bucket_padding(optimizer)
    states = optimizer.sharded_param_state_fully_reshardable(model_state, loading, METADATA) or {}
    if loading:
        states = {number: states[number] for number, _ in own_weights(optimizer)}
    for tensors in states.values():
        main = tensors.pop("param")
        if optimizer.config.bf16:
            key = main.key.replace("state.param", "state.fp32_param", 1)
            tensors["fp32_param"] = replace(main, key=key)
    return states


def own_weights(optimizer: DistributedOptimizer) -> Iterator[tuple[int, Tensor]]:
    """Yield (number in the state, weight) if this data-parallel rank has a piece of the weight."""
    weights = chain.from_iterable(buffer.param_index_map for buffer in optimizer.buffers)
    for number, weight in enumerate(weights):
        if weight in optimizer.model_param_gbuf_map:
            yield number, weight


def keep_bucket_padding(optimizer: DistributedOptimizer) -> None:
    """Keep the padding between buckets when the state is gathered.

    megatron-core 0.16.1 removes the padding, but computes each weight's position as if it were
    still there. So it would store a shifted state for all weights after the first bucket.
    """
    for buffer in optimizer.buffers:
        buffer.numel_unpadded = buffer.numel
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()


def replicated_states(optimizer) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield (weight, its state) for an optimizer that is not distributed."""
    main_weights = optimizer.get_parameters()
    weights = main_weights
    if optimizer.config.bf16:
        weights = chain.from_iterable(optimizer.float16_groups)
    for weight, main_weight in zip(weights, main_weights, strict=True):
        state = optimizer.optimizer.state[main_weight]
        tensors = {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
        if optimizer.config.bf16:
            tensors["fp32_param"] = main_weight
        yield weight, tensors


@torch.no_grad()
def load_optimizer_state(optimizer, states: dict[int, dict[str, Tensor]]) -> None:
    """Copy the states of weights into an optimizer."""
    if not isinstance(optimizer, DistributedOptimizer):
        for number, (_, tensors) in enumerate(replicated_states(optimizer)):
            for name, tensor in tensors.items():
                tensor.copy_(states[number][name])
        return
    for number, weight in own_weights(optimizer):
        own_range = optimizer._get_model_param_range_map(weight)["param"]
        own_tensors = optimizer._get_main_param_and_optimizer_states(weight)
        for name, tensor in states[number].items():
            own_name = "param" if name == "fp32_param" else name
            own_tensors[own_name].copy_(tensor.flatten()[own_range.start : own_range.end])


def get_step(optimizer) -> float:
    """Return the number of steps that an optimizer has taken.

    torch counts steps per weight; TransformerEngine and apex count them per group of weights.
    """
    inner = optimizer.optimizer
    counters = inner.state.values() if USING_PYTORCH_OPTIMIZER else inner.param_groups
    return max((float(counter.get("step", 0)) for counter in counters), default=0.0)


def set_step(optimizer, step: float) -> None:
    """Set the number of steps that an optimizer has taken."""
    if USING_PYTORCH_OPTIMIZER:
        for state in optimizer.optimizer.state.values():
            # The fused optimizer keeps the step on the device.
            state["step"] = torch.tensor(step, device=state["exp_avg"].device)
    else:
        for group in optimizer.optimizer.param_groups:
            group["step"] = int(step)
