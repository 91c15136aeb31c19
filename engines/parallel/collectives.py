"""Collectives with a gradient that both engines use, and the groups of ranks for them."""

from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor


class AllGather(torch.autograd.Function):
    """[T/R, ...] of R ranks -> [T, ...] on each. Every rank goes on to compute the same loss from it, so that its own
    slice of the gradient is complete as it stands."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.length = group, len(x)
        out = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        start = dist.get_rank(ctx.group) * ctx.length
        return grad[start : start + ctx.length], None


class AllToAll(torch.autograd.Function):
    """[R, ...] -> [R, ...]: rank r gets what each of the R ranks has in its place r."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, x = group, x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        return AllToAll.apply(grad, ctx.group), None


class GatherAll(torch.autograd.Function):
    """[T/R, ...] of R ranks -> [T, ...] on each. Every rank computes something else from it: gradients are added up."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty(len(x) * group.size(), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        own = grad.new_empty(len(grad) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


def groups_of(
    dp_group: dist.ProcessGroup, alone: dist.ProcessGroup
) -> dict[int, dist.ProcessGroup]:
    """This rank's groups by their size, a power of two: of each size s the data-parallel ranks i * s : (i + 1) * s for all i. They
    are made once. alone: the group of this rank. Called by all ranks."""
    return {1: alone} | _groups_of(dist.group.WORLD, tuple(dist.get_process_group_ranks(dp_group)))


@cache
def _groups_of(world: dist.ProcessGroup, own: tuple[int, ...]) -> dict[int, dist.ProcessGroup]:
    everybodys = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, own)
    groups = {}
    for ranks in sorted({*everybodys}):
        for size in (1 << level for level in range(1, len(ranks).bit_length())):
            for start in range(0, len(ranks) - size + 1, size):
                group = dist.new_group(ranks[start : start + size])
                if dist.get_rank() in ranks[start : start + size]:
                    groups[size] = group
    return groups
