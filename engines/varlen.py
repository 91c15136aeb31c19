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
    width = value.shape[-1]
    if width != query.shape[-1]:
        value = F.pad(value, (0, query.shape[-1] - width))      # the kernel has one size for keys and values
    return varlen_attn(query.contiguous(), key.contiguous(), value.contiguous(), cu_q, cu_k, longest_q, longest_k, scale=scale,
                       window_size=(window - 1, 0), **GROUPED)[..., :width]


def by_segment(query: Tensor, key: Tensor, value: Tensor, segments: Iterable[tuple[int, int, int, int]], scale: float | None,
               window: int = 0, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
    """query [T, b, heads, dim], key and value [T', b, kv_heads, dim] of any dtype -> [T, b, heads, dim]. segments: (first and
    last query, first and last key) of each, whose last query sees its last key; window as above; softcap, sinks: see below."""
    out = []
    for q0, q1, k0, k1 in segments:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        num_q, num_k = q1 - q0, k1 - k0
        seen = None
        if 0 < window < num_k or softcap or sinks is not None:
            seen = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device).tril(num_k - num_q)
            seen = seen.triu(num_k - num_q + 1 - window) if window > 0 else seen
        if softcap or sinks is not None:
            attended = explicit_attention(q, k, v, seen, scale, softcap, sinks)
        else:
            causal = {"is_causal": True} if num_q == num_k else {"attn_mask": causal_lower_right(num_q, num_k)}
            attended = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
                                                      **(causal if seen is None else {"attn_mask": seen}))
        out.append(attended.permute(2, 0, 1, 3))
    return torch.cat(out)


def explicit_attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float | None, softcap: float | None,
                       sinks: Tensor | None) -> Tensor:
    """query [b, heads, n, dim], key and value [b, kv_heads, m, dim] -> [b, heads, n, dim], with all n * m scores in memory.
    seen [.., n, m] bool: which key each query sees. softcap c: a score s becomes c * tanh(s / c). sinks [heads]: the score of one
    more key, which every query sees and whose value is 0."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2)).float() * (scale or query.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., :key.shape[2]].to(value.dtype) @ value
