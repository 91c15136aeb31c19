"""Collectives with a gradient that both engines use."""

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
        return grad[start:start + ctx.length], None


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
