"""Attention over sequences laid end to end: in one kernel of an accelerator, or one after another; on one rank, or divided
over ranks that gather each other's keys and values."""

import inspect
from collections.abc import Iterable
from functools import cached_property

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

from engines.parallel.collectives import GatherAll

# torch 2.13 has to be told that heads are grouped; 2.11 has no such argument and sees it.
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float | None,
    window: int = 0,
    causal: bool = True,
) -> Tensor:
    """query [T, heads, dim], key and value [T', kv_heads, dim], of a half-precision dtype -> [T, heads, dim].

    cu_q, cu_k [n+1] int32: where the segments of queries and keys begin; each segment's last query sees its last key.
    longest_*: the longest segment, or more. window: how many keys a query sees, itself included; 0: all before it. If not causal,
    a query sees all of its segment.
    """
    width = value.shape[-1]
    if width != query.shape[-1]:
        value = F.pad(
            value, (0, query.shape[-1] - width)
        )  # the kernel has one size for keys and values
    return varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        cu_q,
        cu_k,
        longest_q,
        longest_k,
        scale=scale,
        window_size=(window - 1, 0) if causal else (-1, -1),
        **GROUPED,
    )[..., :width]


def by_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Iterable[tuple[int, int, int, int]],
    scale: float | None,
    window: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """query [T, b, heads, dim], key and value [T', b, kv_heads, dim] of any dtype -> [T, b, heads, dim]. segments: (first and
    last query, first and last key) of each, whose last query sees its last key; window, causal: as above; softcap, sinks: below."""
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
            mask = (
                {"attn_mask": seen}
                if seen is not None
                else {"is_causal": causal}
                if num_q == num_k or not causal
                else {"attn_mask": causal_lower_right(num_q, num_k)}
            )
            attended = F.scaled_dot_product_attention(
                q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **mask
            )
        out.append(attended.permute(2, 0, 1, 3))
    return torch.cat(out)


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
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
    return scores.softmax(-1)[..., : key.shape[2]].to(value.dtype) @ value


class Zigzag:
    """How the ranks of a group divide sequences: each into 2 * ranks chunks, of which rank r has the r-th from either end. So all
    have equal work (Dubey et al. 2024, section 3.3.2).

    bounds  [n+1]: over all tokens, sequence i is bounds[i]:bounds[i+1]; a multiple of 2 * ranks long, if there are several
    """

    def __init__(self, bounds: list[int], group: dist.ProcessGroup, device: torch.device):
        self.bounds, self.group, self.device, self.size, self.rank = (
            bounds,
            group,
            device,
            group.size(),
            group.rank(),
        )

    @cached_property
    def segments(self) -> list[tuple[int, int, int, int]]:
        """(first and last query on this rank, first and last key) of every causal block; the last query sees the last key."""
        if self.size == 1:
            return [(start, end, start, end) for start, end in zip(self.bounds, self.bounds[1:])]
        blocks = []
        for start, end in zip(self.bounds, self.bounds[1:]):
            chunk, mine = (end - start) // (2 * self.size), start // self.size
            blocks += [
                (mine, mine + chunk, start, start + (self.rank + 1) * chunk),
                (
                    mine + chunk,
                    mine + 2 * chunk,
                    start,
                    start + (2 * self.size - self.rank) * chunk,
                ),
            ]
        return blocks

    @property
    def positions(self) -> Tensor:
        """[tokens of this rank] int64: the place of each in its sequence."""
        return torch.cat(
            [torch.arange(k1 - k0 - (q1 - q0), k1 - k0) for q0, q1, k0, k1 in self.segments]
        )

    @cached_property
    def _of_kernel(self) -> tuple:
        """On the device: (cu_seqlens of queries, of keys, most queries, most keys, index of the keys that segments see or None)"""
        queries, keys = ([s[i + 1] - s[i] for s in self.segments] for i in (0, 2))
        cu_q, cu_k = (
            torch.tensor([0, *n]).cumsum(0, dtype=torch.int32).to(self.device)
            for n in (queries, keys)
        )
        seen = None
        if self.size > 1:  # earlier and later queries see some of the same keys
            seen = torch.cat([torch.arange(k0, k1) for _, _, k0, k1 in self.segments]).to(
                self.device
            )
        return cu_q, cu_k, max(queries), max(keys), seen

    # Not compiled: it would be compiled again for every new set of lengths, without any gain for collectives.
    @torch.compiler.disable
    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int = 0,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [s, b, heads, dim], key and value [s, b, kv_heads, dim] -> [s, b, heads, dim], s tokens of this rank. b = 1, or as
        many rows of one sequence each."""
        if self.size > 1:
            key, value = (self._in_order(GatherAll.apply(x, self.group)) for x in (key, value))
        if (
            query.is_cuda
            and query.dtype != torch.float32
            and query.shape[1] == 1
            and not softcap
            and sinks is None
        ):
            cu_q, cu_k, longest_q, longest_k, seen = self._of_kernel
            k, v = (
                x[:, 0] if seen is None else x[:, 0].index_select(0, seen) for x in (key, value)
            )
            return by_kernel(query[:, 0], k, v, cu_q, cu_k, longest_q, longest_k, scale, window)[
                :, None
            ]
        return by_segment(query, key, value, self.segments, scale, window, softcap, sinks)

    def _in_order(self, x: Tensor) -> Tensor:
        """[all tokens, ...] in the order of ranks -> in the order of the sequences."""
        local, parts = x.shape[0] // self.size, []
        for start, end in zip(self.bounds, self.bounds[1:]):
            chunk = (end - start) // (2 * self.size)
            for j in range(2 * self.size):
                rank, second = (j, 0) if j < self.size else (2 * self.size - 1 - j, chunk)
                first = rank * local + start // self.size + second
                parts.append(x[first : first + chunk])
        return torch.cat(parts)
