"""Divide items into parts of equal cost, and pack sequences into micro-batches."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from config import InputError

# With more items per part than this, the greedy method balances as well as largest differencing.
MANY_ITEMS_PER_PART = 32


def partition(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Divide items into parts with nearly equal sums of costs.

    Uses largest differencing (Karmarkar and Karp 1982), or for very many items the greedy method,
    which is faster. With the latter, the sums differ by about the cost of the smallest items.

    Returns:
        num_parts sorted lists of indices. Their lengths may differ, and some are empty if there are
        fewer items than parts.
    """
    if len(costs) > MANY_ITEMS_PER_PART * num_parts:
        return partition_greedily(np.asarray(costs), num_parts)
    return partition_by_differencing(costs, num_parts)


def partition_greedily(costs: np.ndarray, num_parts: int) -> list[list[int]]:
    """Assign the items, the largest first, to the parts with the smallest sums.

    Several items are assigned at once, each to a different part. A part with a very large item is
    passed over until the other parts have caught up.
    """
    sums = np.zeros(num_parts)
    part_of_item = np.empty(len(costs), np.int64)
    num_at_once = max(1, num_parts // 2)
    largest_first = np.argsort(-costs, kind="stable")
    for items in np.split(largest_first, range(num_at_once, len(costs), num_at_once)):
        emptiest = sums.argsort(kind="stable")[: len(items)]
        part_of_item[items] = emptiest
        sums[emptiest] += costs[items]
    return [np.flatnonzero(part_of_item == part).tolist() for part in range(num_parts)]


# An unfinished part: the sum of its costs, and its items.
Part = tuple[float, list[int]]


def partition_by_differencing(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Start with one division per item, and merge divisions until one is left.

    Each step merges the two divisions whose parts differ most: the largest part of one is joined
    with the smallest part of the other, and so on.
    """
    heap: list[tuple[float, int, list[Part]]] = []  # (-difference, tie breaker, parts)
    for i, cost in enumerate(costs):
        parts = [(cost, [i])] + [(0.0, [])] * (num_parts - 1)  # the largest sum first
        heap.append((-cost, i, parts))
    heapq.heapify(heap)
    tie_breaker = len(costs)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        merged = merge(a, b)
        difference = merged[0][0] - merged[-1][0]
        heapq.heappush(heap, (-difference, tie_breaker, merged))
        tie_breaker += 1
    if not heap:
        return [[] for _ in range(num_parts)]
    _, _, parts = heap[0]
    return [sorted(items) for _, items in parts]


def merge(a: list[Part], b: list[Part]) -> list[Part]:
    """Join the largest part of `a` with the smallest of `b`, and so on down both lists."""
    merged = []
    for (sum_a, items_a), (sum_b, items_b) in zip(a, reversed(b)):
        merged.append((sum_a + sum_b, items_a + items_b))
    return sorted(merged, key=lambda part: -part[0])


@dataclass
class _MicroBatch:
    """An unfinished micro-batch: its sequences, their longest length, and the free tokens."""

    sequences: list[int]
    longest: int
    room: int


def pack(lengths: Sequence[int], max_tokens: int, padded: bool = False) -> list[list[int]]:
    """Pack sequences into micro-batches of at most max_tokens (first fit, longest first).

    Args:
        padded: pad each sequence to the longest one in its micro-batch.

    Returns:
        The sequences of each micro-batch, as indices.

    Raises:
        InputError: one sequence alone is longer than max_tokens.
    """
    micro_batches: list[_MicroBatch] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[i]
        if length > max_tokens:
            raise InputError(
                f"a sequence of {length} tokens is longer than data.max_tokens_per_micro_batch="
                f"{max_tokens}: raise it, or use shorter sequences"
            )
        for micro_batch in micro_batches:
            num_tokens = micro_batch.longest if padded else length
            if micro_batch.room >= num_tokens:
                micro_batch.sequences.append(i)
                micro_batch.room -= num_tokens
                break
        else:
            micro_batches.append(_MicroBatch([i], length, max_tokens - length))
    return [micro_batch.sequences for micro_batch in micro_batches]


def split_micro_batches(
    micro_batches: list[list[int]], num_micro_batches: int, lengths: Sequence[int]
) -> list[list[int]]:
    """Split micro-batches, the fullest first, until there are num_micro_batches.

    All ranks need the same number of micro-batches, so a rank that has fewer splits some of them.
    If it has too few sequences, the remaining micro-batches stay empty.

    Args:
        num_micro_batches: at least len(micro_batches).
    """

    def num_tokens(sequences: list[int]) -> int:
        return sum(lengths[i] for i in sequences)

    result = [list(sequences) for sequences in micro_batches]
    while len(result) < num_micro_batches:
        fullest = max(result, key=lambda b: (len(b) > 1, num_tokens(b)), default=[])
        if len(fullest) <= 1:
            result.append([])
            continue
        result.remove(fullest)
        for half in partition([lengths[i] for i in fullest], 2):
            result.append([fullest[k] for k in half])
    return sorted(result, key=lambda b: -num_tokens(b))
