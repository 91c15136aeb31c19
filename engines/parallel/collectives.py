"""Collectives with a gradient for both engines, and the groups of ranks for them."""

from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from engines.parallel.device import gather_values

# torch 2.13 renamed these two. Both names take (output, input).
if hasattr(dist, "all_gather_single"):
    gather_tensor = dist.all_gather_single
    reduce_scatter_tensor = dist.reduce_scatter_single
else:
    gather_tensor = dist.all_gather_into_tensor
    reduce_scatter_tensor = dist.reduce_scatter_tensor


class AllGatherSliceGrad(torch.autograd.Function):
    """All-gather [T/R, ...] -> [T, ...] over R ranks that compute the same loss from the result.

    So all ranks have the same gradient, and the backward pass returns this rank's slice of it.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.length = len(x)
        out = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
        gather_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        start = dist.get_rank(ctx.group) * ctx.length
        return grad[start : start + ctx.length], None


class AllToAll(torch.autograd.Function):
    """[R, ...] -> [R, ...]: rank r gets entry r of each of the R ranks."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        return AllToAll.apply(grad, ctx.group), None


class AllGatherSumGrad(torch.autograd.Function):
    """All-gather [T/R, ...] -> [T, ...] over R ranks that use the result for different purposes.

    So the backward pass sums the ranks' gradients, and returns this rank's slice of the sum.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty(len(x) * group.size(), *x.shape[1:])
        gather_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        own = grad.new_empty(len(grad) // ctx.group.size(), *grad.shape[1:])
        reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


def groups_of_grid(shape: tuple[int, ...]) -> list[dist.ProcessGroup]:
    """Arrange all ranks in a grid, row by row; for each axis, return the group along it.

    Each group has the ranks that differ from this one only in their place on the axis. All ranks
    call this together. (init_device_mesh() divides the group of all ranks instead, and on GPUs
    torch warns that gloo cannot take over NCCL's options.)

    shape: the number of ranks along each axis.
    """
    ranks = torch.arange(dist.get_world_size()).reshape(shape)
    return [
        _group_with_this_rank(ranks.movedim(axis, -1).reshape(-1, size))
        for axis, size in enumerate(shape)
    ]


def _group_with_this_rank(rows: Tensor) -> dist.ProcessGroup:
    """Create a group for each row of ranks, and return the one that contains this rank."""
    if len(rows) == 1:
        return dist.group.WORLD
    for members in rows.tolist():
        group = dist.new_group(members)
        if dist.get_rank() in members:
            own_group = group
    return own_group


def groups_by_size(
    dp_group: dist.ProcessGroup, single: dist.ProcessGroup
) -> dict[int, dist.ProcessGroup]:
    """Return this rank's groups for dynamic context parallelism, by size.

    Sizes are powers of two. Group i of size s has the data-parallel ranks i * s to
    (i + 1) * s - 1. Groups are created only once. All ranks call this together.

    single: the group that contains only this rank.
    """
    own_dp_ranks = tuple(dist.get_process_group_ranks(dp_group))
    return {1: single} | _create_groups(dist.group.WORLD, own_dp_ranks)


@cache
def _create_groups(
    world: dist.ProcessGroup, own_dp_ranks: tuple[int, ...]
) -> dict[int, dist.ProcessGroup]:
    """Create the groups of more than one rank. All ranks create all groups, in the same order."""
    groups = {}
    for dp_ranks in sorted({*gather_values(own_dp_ranks)}):
        for level in range(1, len(dp_ranks).bit_length()):
            size = 1 << level
            for start in range(0, len(dp_ranks) - size + 1, size):
                members = dp_ranks[start : start + size]
                group = dist.new_group(members)
                if dist.get_rank() in members:
                    groups[size] = group
    return groups
