"""Causal attention over sequences laid end to end, in one kernel of an accelerator."""

import inspect

from torch import Tensor
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
