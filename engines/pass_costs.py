"""What a pass costs besides its sequences' work, for the plans of dynamic context parallelism.

`engine.context_parallel_costs` has the numbers that benchmarks/cp_cost.py measures. Without them,
the numbers below are used, which were measured on two H200 (docs/benchmarks.md). Nothing is
measured when a run starts: a resumed run has to make the same plans again.
"""

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from config import InputError
from data.batching.groups import SLOWDOWN
from data.batching.plan import PassCosts
from engines.context_parallel import has_dynamic_cp
from engines.parallel import device

# The least time of a pass per decoder layer, in seconds: with a micro-batch for each rank, and with
# micro-batches that ranks share.
LAYER_SECONDS_ALONE = 7e-3
LAYER_SECONDS_SHARED = 10e-3
# The fraction of a device's peak FLOP/s that large micro-batches reach.
REACHED_FRACTION = 0.4


def pass_costs(
    engine: DictConfig, num_layers: int, dp_size: int, this_device: torch.device
) -> PassCosts:
    """Return what a pass costs, in FLOPs of matrix products on one data-parallel rank.

    All ranks call this together and get the same, or they would make different plans.

    Args:
        engine: the group `engine` of the configuration.
        num_layers: the number of decoder layers of the whole model.
        dp_size: the number of data-parallel ranks, including those that may share a sequence.
    """
    if engine.context_parallel_costs is not None:
        return measured_costs(*engine.context_parallel_costs)
    peak_flops = lowest_peak_flops(this_device)
    if peak_flops == 0:
        return PassCosts(slowdown=SLOWDOWN)
    devices_per_rank = dist.get_world_size() // dp_size
    flops_per_second = REACHED_FRACTION * peak_flops * devices_per_rank
    # Pipeline stages start their layers at the same time.
    layer_flops = flops_per_second * num_layers / engine.get("pipeline_model_parallel_size", 1)
    return PassCosts(
        LAYER_SECONDS_ALONE * layer_flops, LAYER_SECONDS_SHARED * layer_flops, SLOWDOWN
    )


def lowest_peak_flops(this_device: torch.device) -> float:
    """Return the lowest peak FLOP/s of all ranks' devices; 0 if that of any is not known."""
    peak_flops = torch.tensor(device.peak_flops(this_device) or 0.0, device=this_device)
    dist.all_reduce(peak_flops, dist.ReduceOp.MIN)
    return peak_flops.item()


def measured_costs(tflops: float, ms_alone: float, ms_shared: float, slowdown: float) -> PassCosts:
    """Return what a pass costs, given the numbers of engine.context_parallel_costs, in order."""
    flops_per_ms = 1e9 * tflops
    return PassCosts(ms_alone * flops_per_ms, ms_shared * flops_per_ms, slowdown)


def check_pass_costs(engine: DictConfig) -> None:
    """Raise InputError if costs are set, but group sizes are not chosen per batch."""
    if engine.context_parallel_costs is not None and not has_dynamic_cp(engine):
        raise InputError(
            f"engine.context_parallel_costs={list(engine.context_parallel_costs)} has no effect "
            f"with engine.context_parallel_size={engine.context_parallel_size}: leave it out, or "
            "set engine.context_parallel_size=auto"
        )
