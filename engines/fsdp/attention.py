"""Packed causal attention for Hugging Face models, with Ulysses sequence parallelism.

Importing this file registers the attention implementation "packed" with transformers. Its layout (where sequences
begin, which ranks share them) reaches it as the model's keyword argument `packing`.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from config import InputError
from engines.varlen import causal_attention

# Arguments that models pass to their attention and that mean nothing to it.
HARMLESS = {"position_ids", "use_cache", "cache_position", "output_attentions", "is_causal"}


@dataclass
class Packing:
    """Where the sequences of one packed micro-batch lie.

    cu_seqlens  [n+1] int32 on the model's device, over all T tokens (padding at the end is a sequence of its own)
    bounds      the same numbers as a list
    max_length  longest sequence, tokens
    group       ranks among which the T tokens are divided (Ulysses); None: this rank has them all
    """

    cu_seqlens: Tensor
    bounds: list[int]
    max_length: int
    group: dist.ProcessGroup | None = None

    def arguments(self) -> dict:
        """The model's keyword arguments. The mask of four dimensions is not read; it keeps transformers from building one, for
        which it would wait for the device."""
        return {"packing": self, "attention_mask": torch.empty(1, 1, 1, 1, device=self.cu_seqlens.device)}


def packed_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
                     packing: Packing, scaling: float | None = None, dropout: float = 0.0,
                     sliding_window: int | None = None, **others) -> tuple[Tensor, None]:
    """Causal attention inside each sequence; the signature is transformers' attention interface.

    query [1, heads, T', dim], key and value [1, kv_heads, T', dim] -> [1, T', heads, dim], T' this rank's tokens.
    Raises InputError for a model that asks its attention for something else: soft caps, sinks, biases, dropout.
    """
    asked = [name for name, value in others.items() if value is not None and name not in HARMLESS]
    if dropout or asked:
        raise InputError(f"the model wants {'dropout' if dropout else asked[0]} in its attention, which is not supported")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))          # [T', heads, dim]
    group, window = packing.group, (sliding_window or 0)
    if group is not None:
        repeats = max(1, dist.get_world_size(group) // k.shape[1])         # every rank needs a KV head of its own
        k, v = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (k, v))
        q, k, v = (exchange(x, group, True) for x in (q, k, v))            # [T, heads / ranks, dim]
    if q.is_cuda and q.dtype != torch.float32:
        out = causal_attention(q, k, v, packing.cu_seqlens, packing.cu_seqlens, packing.max_length, packing.max_length,
                               scaling, window)
    else:                                                                  # no such kernel on CPU or in fp32
        out = by_sequence(q, k, v, packing, scaling, window)
    if group is not None:
        out = exchange(out, group, False)
    return out[None], None


# Not compiled: it would be compiled again for every new set of lengths, without any gain for collectives.
@torch.compiler.disable
def by_sequence(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float | None, window: int) -> Tensor:
    return torch.cat([_sdpa(q[a:b], k[a:b], v[a:b], scale, window) for a, b in zip(packing.bounds, packing.bounds[1:])])


@torch.compiler.disable
def exchange(x: Tensor, group: dist.ProcessGroup, scatter_heads: bool) -> Tensor:
    return AllToAll.apply(x, group, scatter_heads)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int) -> Tensor:
    """One sequence, [t, heads, dim]; window 0: all earlier tokens."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    mask = None
    if 0 < window < q.shape[2]:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril().triu(1 - window)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale,
                                         enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


class AllToAll(torch.autograd.Function):
    """Ulysses (Jacobs et al. 2023): trade tokens for heads. scatter_heads: [T/R, H, D] -> [T, H/R, D], else back."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, scatter_heads: bool) -> Tensor:
        ctx.group, ctx.scatter_heads = group, scatter_heads
        ranks = dist.get_world_size(group)
        if scatter_heads:
            tokens, heads, dim = x.shape
            send = x.view(tokens, ranks, heads // ranks, dim).transpose(0, 1).contiguous()
        else:
            send = x.contiguous()                                          # rank r's tokens are the r-th block
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=group)
        if scatter_heads:
            return receive.flatten(0, 1)
        tokens = x.shape[0] // ranks
        return receive.view(ranks, tokens, *x.shape[1:]).transpose(0, 1).reshape(tokens, -1, x.shape[2])

    @staticmethod
    def backward(ctx, grad: Tensor):
        return AllToAll.apply(grad, ctx.group, not ctx.scatter_heads), None, None


AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", lambda *args, **kwargs: None)
