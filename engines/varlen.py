"""Causal attention over sequences laid end to end: in one kernel of an accelerator, or one after another."""

import inspect
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

# torch 2.13 has to be told that heads are grouped; 2.11 has no such argument and sees it.
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def causal_attention(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int,
                     scale: float | None, window: int = 0) -> Tensor:
    """query [T, heads, dim], key and value [T', kv_heads, dim], of a half-precision dtype -> [T, heads, dim].

    cu_q, cu_k [n+1] int32: where the segments of queries and keys begin; each segment's last query sees its last key.
    longest_*: the longest segment, or more. window: how many keys a query sees, itself included; 0: all
    """
    return varlen_attn(query.contiguous(), key.contiguous(), value.contiguous(), cu_q, cu_k, longest_q, longest_k, scale=scale,
                       window_size=(window - 1, 0), **GROUPED)


def by_segment(query: Tensor, key: Tensor, value: Tensor, segments: Iterable[tuple[int, int, int, int]], scale: float | None,
               window: int = 0) -> Tensor:
    """query [T, b, heads, dim], key and value [T', b, kv_heads, dim] of any dtype -> [T, b, heads, dim]. segments: (first and
    last query, first and last key) of each, whose last query sees its last key; window as above."""
    out = []
    for q0, q1, k0, k1 in segments:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        num_q, num_k = q1 - q0, k1 - k0
        mask = {"is_causal": True} if num_q == num_k else {"attn_mask": causal_lower_right(num_q, num_k)}
        if 0 < window < num_k:
            seen = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device).tril(num_k - num_q)
            mask = {"attn_mask": seen.triu(num_k - num_q + 1 - window)}
        attended = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **mask)
        out.append(attended.permute(2, 0, 1, 3))
    return torch.cat(out)
