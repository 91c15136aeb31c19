"""Packed batches: sequences laid end to end, their order, and their division over ranks and micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from config import InputError

if TYPE_CHECKING:
    from data.images.processor import Pictures


@dataclass
class Batch:
    """n sequences of T tokens in all, end to end, in host memory. Entry t of every field belongs to token t.

    input_ids  [T] int64
    cu_seqlens [n+1] int64: sequence i is cu_seqlens[i]:cu_seqlens[i+1]
    fields     name -> [T], e.g. loss_mask, old_log_probs, advantages; and kept_words [T, K] int32, see below
    rows       [n] int64: of each sequence, the row of `pictures` that has its images
    pictures   where images are, data.images.processor.Pictures, the same for all batches that are joined; None: there are none
    """

    input_ids: Tensor
    cu_seqlens: Tensor
    fields: dict[str, Tensor] = field(default_factory=dict)
    rows: Tensor | None = None
    pictures: Pictures | None = None

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> list[int]:
        return self.cu_seqlens.diff().tolist()

    @property
    def position_ids(self) -> Tensor:
        """[T] int64: the place of every token in its own sequence, from 0."""
        starts = torch.repeat_interleave(self.cu_seqlens[:-1], self.cu_seqlens.diff())
        return torch.arange(len(self.input_ids)) - starts

    @property
    def kept_words(self) -> Tensor:
        """[T, K] int64: the words that each token was drawn from, -1 where there were fewer than K; K = 0: from all."""
        return self.fields.get("kept_words", torch.empty(len(self.input_ids), 0)).long()

    @property
    def images(self) -> list[np.ndarray]:
        """uint8 [height, width, 3] each: those of all sequences, one behind the other."""
        return (
            [image for row in self.rows.tolist() for image in self.pictures.images[row]]
            if self.pictures
            else []
        )

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """The sequences of batches with the same fields, one batch behind the other."""
        return Batch(
            torch.cat([b.input_ids for b in batches]),
            bounds(torch.cat([b.cu_seqlens.diff() for b in batches])),
            {k: torch.cat([b.fields[k] for b in batches]) for k in batches[0].fields},
            batches[0].pictures and torch.cat([b.rows for b in batches]),
            batches[0].pictures,
        )

    def select(self, indices: Sequence[int] | Tensor) -> Batch:
        """The sequences at these indices, in this order."""
        indices = torch.as_tensor(indices, dtype=torch.int64)
        lengths = self.cu_seqlens.diff()[indices]
        cu_seqlens = bounds(lengths)
        take = torch.repeat_interleave(
            self.cu_seqlens[indices] - cu_seqlens[:-1], lengths
        ) + torch.arange(int(cu_seqlens[-1]))
        return Batch(
            self.input_ids[take],
            cu_seqlens,
            {k: v[take] for k, v in self.fields.items()},
            self.pictures and self.rows[indices],
            self.pictures,
        )

    def split(self, counts: list[int]) -> list[Batch]:
        """The first counts[0] sequences, the next counts[1], ...: views, which share their memory with this batch."""
        lengths = self.cu_seqlens.diff().split(counts)
        sizes = [int(part.sum()) for part in lengths]
        columns = zip(*(column.split(sizes) for column in (self.input_ids, *self.fields.values())))
        rows = self.rows.split(counts) if self.pictures else [None] * len(counts)
        return [
            Batch(ids, bounds(part), dict(zip(self.fields, values)), row, self.pictures)
            for part, row, (ids, *values) in zip(lengths, rows, columns)
        ]


def bounds(lengths: Tensor) -> Tensor:
    """[n+1] int64: where each of n sequences begins, and the end."""
    return torch.cat([lengths.new_zeros(1), lengths]).cumsum(0)


MANY = 32  # items per part


@lru_cache(maxsize=2)
def order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """[num_rows] int64: the rows of one epoch in the order in which they are seen, on every rank alike."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_rows, generator=generator).numpy()


def global_batch(num_rows: int, batch_size: int, seed: int, step: int) -> np.ndarray:
    """[batch_size] int64: the rows of optimizer step `step` (from 0), whatever the world size.

    Stateless: permutation(seed, epoch)[k*B:(k+1)*B], so a resume needs the step alone. The num_rows % B rows left at an
    epoch's end are not seen in it.
    """
    epoch, k = divmod(step, num_rows // batch_size)
    return order(num_rows, seed, epoch)[k * batch_size : (k + 1) * batch_size]


def partition(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Divide items into num_parts lists of indices with nearly equal sums (largest differencing, Karmarkar-Karp 1982).

    Parts may hold different numbers of items, none among them when there are fewer items than parts. Very many items go, the
    largest first, to the parts that have least: that takes less time, and leaves differences as small as the smallest items.
    """
    if len(costs) > MANY * num_parts:
        costs, sums, part_of = (
            np.asarray(costs),
            np.zeros(num_parts),
            np.empty(len(costs), np.int64),
        )
        # A part that got an item larger than others' sums is left out until they have caught up.
        at_once, largest_first = max(1, num_parts // 2), np.argsort(-costs, kind="stable")
        for items in np.split(largest_first, range(at_once, len(costs), at_once)):
            least = sums.argsort(kind="stable")[: len(items)]
            part_of[items] = least
            sums[least] += costs[items]
        return [np.flatnonzero(part_of == part).tolist() for part in range(num_parts)]
    heap = []
    for i in sorted(range(len(costs)), key=lambda i: (costs[i], i)):
        parts = [(costs[i], [i])] + [(0.0, [])] * (num_parts - 1)  # sorted by sum, largest first
        heap.append((-costs[i], i, parts))
    heapq.heapify(heap)
    tie = len(costs)
    while len(heap) > 1:
        (_, _, a), (_, _, b) = heapq.heappop(heap), heapq.heappop(heap)
        merged = sorted(
            ((sa + sb, ia + ib) for (sa, ia), (sb, ib) in zip(a, reversed(b))), key=lambda p: -p[0]
        )
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], tie, merged))
        tie += 1
    return [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(num_parts)]


def pack(lengths: Sequence[int], max_tokens: int, padded: bool = False) -> list[list[int]]:
    """Bin-pack sequences into micro-batches of at most max_tokens each (first fit, longest first).

    padded: count what a [n, longest] rectangle takes. Raises InputError when one sequence alone is longer.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[i] > max_tokens:
            raise InputError(
                f"a sequence of {lengths[i]} tokens is longer than data.max_tokens_per_micro_batch="
                f"{max_tokens}: raise it, or have shorter sequences"
            )
        b = next(
            (
                b
                for b in range(len(bins))
                if room[b] >= (lengths[bins[b][0]] if padded else lengths[i])
            ),
            len(bins),
        )
        if b == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[b].append(i)
        room[b] -= lengths[bins[b][0]] if padded else lengths[i]
    return bins


def spread(bins: list[list[int]], num_bins: int, lengths: Sequence[int]) -> list[list[int]]:
    """The same sequences in exactly num_bins micro-batches (never fewer than given), the fullest first.

    Ranks that need fewer micro-batches than others split their fullest; a bin without a sequence stays empty.
    """
    bins = [list(b) for b in bins]
    while len(bins) < num_bins:
        fullest = max(bins, key=lambda b: (len(b) > 1, sum(lengths[i] for i in b)), default=[])
        halves = partition([lengths[i] for i in fullest], 2) if len(fullest) > 1 else None
        if halves is None:
            bins.append([])
            continue
        bins.remove(fullest)
        bins += [[fullest[i] for i in half] for half in halves]
    return sorted(bins, key=lambda b: -sum(lengths[i] for i in b))
