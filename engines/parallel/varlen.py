"""Attention over sequences laid end to end.

In half precision on a CUDA device, one kernel computes all sequences; otherwise they are computed
one after another. Zigzag divides sequences over ranks, which gather each other's keys and values.
"""

import inspect
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

from engines.parallel.collectives import AllGatherSumGrad

# torch 2.13 needs an argument for grouped heads. torch 2.11 lacks it and recognizes them itself.
HAS_GQA_ARGUMENT = "enable_gqa" in inspect.signature(varlen_attn).parameters
GROUPED_HEADS = {"enable_gqa": True} if HAS_GQA_ARGUMENT else {}


class Scoring(NamedTuple):
    """How scores are computed from queries and keys.

    scaling    factor of the scores; None: 1 / sqrt(dim)
    window     number of keys that a query sees, including its own; 0: all keys up to its own
    softcap    a score s becomes softcap * tanh(s / softcap); None: no cap
    sinks      [heads] score of an additional key with value 0, which every query sees; or None
    is_causal  False: a query sees all keys of its segment
    """

    scaling: float | None
    window: int = 0
    softcap: float | None = None
    sinks: Tensor | None = None
    is_causal: bool = True


def needs_all_scores(scoring: Scoring) -> bool:
    """Return whether no kernel supports this scoring; all scores must then be in memory."""
    return bool(scoring.softcap) or scoring.sinks is not None


class Segment(NamedTuple):
    """Queries first_query to end_query - 1, which may see keys first_key to end_key - 1.

    The last query sees the last key.
    """

    first_query: int
    end_query: int
    first_key: int
    end_key: int


class KernelSegments(NamedTuple):
    """Segments in the kernel's form. Each segment's last query sees its last key.

    cu_queries, cu_keys      [n+1] int32: the first query or key of each segment, and the total
    max_queries, max_keys    the number in the longest segment, or an upper bound
    """

    cu_queries: Tensor
    cu_keys: Tensor
    max_queries: int
    max_keys: int


def attend_with_kernel(
    query: Tensor, key: Tensor, value: Tensor, segments: KernelSegments, scoring: Scoring
) -> Tensor:
    """Attend in all segments with one kernel, in a half-precision dtype.

    query: [T, heads, dim]; key and value: [T', kv_heads, dim]. Returns [T, heads, dim].
    Soft caps and sinks are not supported.
    """
    value_width = value.shape[-1]
    if value_width != query.shape[-1]:
        # The kernel needs keys and values of the same size.
        value = F.pad(value, (0, query.shape[-1] - value_width))
    attended = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        segments.cu_queries,
        segments.cu_keys,
        segments.max_queries,
        segments.max_keys,
        scale=scoring.scaling,
        window_size=(scoring.window - 1, 0) if scoring.is_causal else (-1, -1),
        **GROUPED_HEADS,
    )
    return attended[..., :value_width]


def attend_by_segment(
    query: Tensor, key: Tensor, value: Tensor, segments: Iterable[Segment], scoring: Scoring
) -> Tensor:
    """Attend in one segment after another, in any dtype.

    query: [T, b, heads, dim]; key and value: [T', b, kv_heads, dim]. Returns [T, b, heads, dim].
    segments: Segments, or tuples of their fields.
    """
    attended = []
    for first_query, end_query, first_key, end_key in segments:
        q = query[first_query:end_query].permute(1, 2, 0, 3)
        k = key[first_key:end_key].permute(1, 2, 0, 3)
        v = value[first_key:end_key].permute(1, 2, 0, 3)
        attended.append(attend_in_segment(q, k, v, scoring).permute(2, 0, 1, 3))
    return torch.cat(attended)


def attend_in_segment(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Attend with query [b, heads, n, dim], key and value [b, kv_heads, m, dim]."""
    num_queries = query.shape[2]
    num_keys = key.shape[2]
    mask = None
    if 0 < scoring.window < num_keys or needs_all_scores(scoring):
        mask = causal_mask(num_queries, num_keys, scoring.window, query.device)
    if needs_all_scores(scoring):
        return explicit_attention(query, key, value, mask, scoring)
    if mask is not None:
        arguments = {"attn_mask": mask}
    elif num_queries == num_keys or not scoring.is_causal:
        arguments = {"is_causal": scoring.is_causal}
    else:
        arguments = {"attn_mask": causal_lower_right(num_queries, num_keys)}
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        scale=scoring.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        **arguments,
    )


def causal_mask(num_queries: int, num_keys: int, window: int, device: torch.device) -> Tensor:
    """Return a causal mask [queries, keys] bool: True where a query sees a key.

    The last query sees the last key. window: see Scoring.
    """
    num_earlier = num_keys - num_queries
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_earlier)
    if window > 0:
        mask = mask.triu(num_earlier + 1 - window)
    return mask


def explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: Scoring
) -> Tensor:
    """Attend with all n * m scores in memory, which soft caps and sinks need.

    query: [b, heads, n, dim]; key and value: [b, kv_heads, m, dim]. Returns [b, heads, n, dim].
    mask: [.., n, m] bool, True where a query sees a key; window and is_causal are ignored.
    """
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    scaling = scoring.scaling or query.shape[-1] ** -0.5
    scores = (query @ key.transpose(-1, -2)).float() * scaling
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if scoring.sinks is not None:
        sinks = scoring.sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    probabilities = scores.softmax(-1)[..., : key.shape[2]]
    return probabilities.to(value.dtype) @ value


class Zigzag:
    """Divides sequences over the ranks of a group so that all ranks have equal work.

    Each sequence is cut into 2 * ranks chunks. Rank r has the r-th chunk from each end (Dubey et
    al. 2024, section 3.3.2).

    Args:
        offsets: [n+1], sequence i has the tokens offsets[i] to offsets[i + 1] - 1. With several
            ranks, all offsets are multiples of 2 * ranks.
        group: the context-parallel ranks.
        device: where attention is computed.
    """

    def __init__(self, offsets: list[int], group: dist.ProcessGroup, device: torch.device):
        self.offsets = offsets
        self.group = group
        self.device = device
        self.size = group.size()
        self.rank = group.rank()

    @cached_property
    def segments(self) -> list[Segment]:
        """The causal blocks. Queries are numbered on this rank, keys over all ranks' tokens."""
        if self.size == 1:
            return [Segment(start, end, start, end) for start, end in pairwise(self.offsets)]
        segments = []
        for start, end in pairwise(self.offsets):
            chunk = (end - start) // (2 * self.size)
            first_query = start // self.size
            middle_query = first_query + chunk
            end_key = start + (self.rank + 1) * chunk
            segments.append(Segment(first_query, middle_query, start, end_key))
            end_key = start + (2 * self.size - self.rank) * chunk
            segments.append(Segment(middle_query, middle_query + chunk, start, end_key))
        return segments

    @property
    def positions(self) -> Tensor:
        """[tokens of this rank] int64: each token's position in its sequence."""
        positions = []
        for first_query, end_query, first_key, end_key in self.segments:
            end = end_key - first_key
            positions.append(torch.arange(end - (end_query - first_query), end))
        return torch.cat(positions)

    @cached_property
    def _kernel_segments(self) -> KernelSegments:
        """The segments in the kernel's form, on the device."""
        num_queries = [segment.end_query - segment.first_query for segment in self.segments]
        num_keys = [segment.end_key - segment.first_key for segment in self.segments]
        cu_queries = torch.tensor([0, *num_queries]).cumsum(0, dtype=torch.int32)
        cu_keys = torch.tensor([0, *num_keys]).cumsum(0, dtype=torch.int32)
        return KernelSegments(
            cu_queries.to(self.device), cu_keys.to(self.device), max(num_queries), max(num_keys)
        )

    @cached_property
    def _keys_of_segments(self) -> Tensor | None:
        """Indices of the keys of all segments, one segment after another.

        None on a single rank, where they are all keys in order. With several ranks, the earlier and
        the later chunk of a sequence see some of the same keys.
        """
        if self.size == 1:
            return None
        keys = [torch.arange(segment.first_key, segment.end_key) for segment in self.segments]
        return torch.cat(keys).to(self.device)

    # Not compiled: it would be compiled again for every new set of lengths, and collectives would
    # gain nothing.
    @torch.compiler.disable
    def attention(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attend causally within each sequence.

        query: [s, b, heads, dim]; key and value: [s, b, kv_heads, dim], where s is the number of
        this rank's tokens. Either b = 1, or each of the b rows has one sequence. Returns
        [s, b, heads, dim].
        """
        if self.size > 1:
            key = self._in_order(AllGatherSumGrad.apply(key, self.group))
            value = self._in_order(AllGatherSumGrad.apply(value, self.group))
        has_kernel = query.is_cuda and query.dtype != torch.float32 and query.shape[1] == 1
        if not has_kernel or needs_all_scores(scoring):
            return attend_by_segment(query, key, value, self.segments, scoring)
        k = key[:, 0]
        v = value[:, 0]
        if self._keys_of_segments is not None:
            k = k.index_select(0, self._keys_of_segments)
            v = v.index_select(0, self._keys_of_segments)
        return attend_with_kernel(query[:, 0], k, v, self._kernel_segments, scoring)[:, None]

    def _in_order(self, gathered: Tensor) -> Tensor:
        """Reorder [all tokens, ...] from the order of ranks to the order of the sequences."""
        num_own = gathered.shape[0] // self.size
        chunks = []
        for start, end in pairwise(self.offsets):
            length = (end - start) // (2 * self.size)
            for index in range(2 * self.size):
                is_second = index >= self.size
                rank = 2 * self.size - 1 - index if is_second else index
                first = rank * num_own + start // self.size + is_second * length
                chunks.append(gathered[first : first + length])
        return torch.cat(chunks)
