"""How a batch is divided over ranks: which of them work on each sequence, and in how many passes.

Context parallelism that follows the batch: in each pass several groups of ranks have a micro-batch each. Short sequences are on one
rank, and long ones, at the same time, on as many as it takes (a power of two).
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from torch import Tensor

from config import InputError

PER_PASS = 0.01  # what a pass must save of the time, since each gathers the weights once more
TRIES = 2  # numbers of passes that are compared
SHARING = 0.1  # what it costs ranks to share a micro-batch, of the time that they compute
LATE = (
    math.inf,
    2,
    1,
)  # sequences that take so many times their part of the time get larger groups than they need,
LEAST = 1 / 8  # in which each rank has at least this part of max_tokens

# For each pass of a rank: (ranks in its group, the sequences of the group's micro-batch, by their places in the rank's share).
MicroBatches = list[tuple[int, list[int]]]


@dataclass
class Group:
    """The ranks first : first + size, and the sequences of their micro-batch in one pass."""

    first: int
    size: int
    sequences: list[int]


@dataclass
class Plan:
    """What one data-parallel rank does of a batch of n sequences.

    sequences      those of the n that it works on, in their order: its share
    micro_batches  of the share; as many as on all other ranks
    first, count   [n] int64: each sequence's data-parallel ranks are first : first + count
    metrics        for people
    """

    sequences: list[int]
    micro_batches: MicroBatches
    first: Tensor
    count: Tensor
    metrics: dict[str, float] = field(default_factory=dict)

    def speaks(self, rank: int) -> Tensor:
        """[len(sequences)] bool: whether a rank counts for a sequence of its share where ranks add up what they found."""
        return self.first[self.sequences] == rank

    @staticmethod
    def of(
        passes: list[list[Group]], rank: int, lengths: Sequence[int], costs: Sequence[float]
    ) -> "Plan":
        """metrics: perf/cp_{size}, tokens of the batch that groups of a size work on; perf/plan_efficiency, the share of the ranks'
        time that is used, as far as costs tell."""
        first, count = torch.zeros(2, len(lengths), dtype=torch.int64)
        num_ranks = sum(group.size for group in passes[0])
        metrics = {f"perf/cp_{1 << level}": 0.0 for level in range(num_ranks.bit_length())}
        for group in (group for groups in passes for group in groups):
            first[group.sequences], count[group.sequences] = group.first, group.size
            metrics[f"perf/cp_{group.size}"] += float(sum(lengths[i] for i in group.sequences))
        mine = [
            group
            for groups in passes
            for group in groups
            if group.first <= rank < group.first + group.size
        ]
        sequences = sorted(i for group in mine for i in group.sequences)
        place = {i: k for k, i in enumerate(sequences)}
        return Plan(
            sequences,
            [(group.size, sorted(place[i] for i in group.sequences)) for group in mine],
            first,
            count,
            metrics | {"perf/plan_efficiency": sum(costs) / num_ranks / duration(passes, costs)},
        )


def schedule(
    lengths: Sequence[int],
    costs: Sequence[float],
    num_ranks: int,
    max_tokens: int,
    multiple: Callable[[int], int],
    padded: bool = False,
    passes_multiple: int = 1,
) -> list[list[Group]]:
    """The passes over a batch. In each of them every rank is in one group, which begins at a multiple of its size, a power of two.

    A group of s ranks takes at most s * max_tokens tokens, with each sequence padded to multiple(s), or if `padded` to the longest.
    A sequence gets the smallest group that may hold it, or a larger one where others would wait for it. Sequences go, the longest
    first, to the group whose ranks have least to do. costs: the time of each on one rank, in any unit. Of several numbers of passes
    (multiples of passes_multiple) the one is taken that needs least time, if a pass takes as long as its busiest rank. All who ask
    get the same. Raises InputError for a sequence that no group can hold.
    """
    packer = Packer(lengths, costs, num_ranks, max_tokens, multiple, padded)

    @cache
    def plans(number: int) -> list[list[list[Group]]]:
        return [plan for late in LATE if (plan := packer.pack(number * passes_multiple, late))]

    start = least = most = max(1, -(-sum(lengths) // (num_ranks * max_tokens * passes_multiple)))
    while not plans(most):
        least, most = most + 1, 2 * most - start + 1
    least += bisect_left(range(least, most), True, key=lambda number: bool(plans(number)))
    found = [plan for number in range(least, least + TRIES) for plan in plans(number)]
    return min(
        found, key=lambda passes: duration(passes, costs, SHARING) * (1 + PER_PASS * len(passes))
    )


def duration(passes: list[list[Group]], costs: Sequence[float], sharing: float = 0.0) -> float:
    """How long ranks take for all passes, each as long as its busiest group, in the unit of costs."""
    return sum(
        max(
            sum(costs[i] for i in group.sequences) * (1 + sharing * (group.size > 1)) / group.size
            for group in groups
        )
        for groups in passes
    )


class Packer:
    """Puts sequences into the groups of a given number of passes."""

    def __init__(
        self,
        lengths: Sequence[int],
        costs: Sequence[float],
        num_ranks: int,
        max_tokens: int,
        multiple: Callable[[int], int],
        padded: bool,
    ):
        self.num_ranks, self.max_tokens, self.padded, self.costs = (
            num_ranks,
            max_tokens,
            padded,
            np.asarray(costs, float),
        )
        self.sizes, self.total = (
            [1 << level for level in range(num_ranks.bit_length())],
            math.fsum(costs),
        )  # equal on all hosts
        # For each size [n]: the tokens that the sequences take in such a group.
        self.tokens = {
            size: -(-np.asarray(lengths, np.int64) // multiple(size)) * multiple(size)
            for size in self.sizes
        }
        fits = np.array([tokens <= max_tokens * size for size, tokens in self.tokens.items()])
        if not fits[-1].all():
            raise InputError(
                f"a sequence of {max(lengths)} tokens is longer than data.max_tokens_per_micro_batch={max_tokens} for "
                f"each of {self.sizes[-1]} ranks: raise it, or have shorter sequences"
            )
        self.smallest = 1 << fits.argmax(0)  # [n]: the group that holds each

    def pack(self, num_passes: int, late: float) -> list[list[Group]] | None:
        """None: they do not fit. late: see LATE."""
        free = num_passes * self.num_ranks  # ranks without a group, counted for each pass
        even, wanted = self.total / free, self.smallest.copy()
        most = np.minimum(self.sizes[-1], self.tokens[1] / (LEAST * self.max_tokens))
        while (wider := (2 * wanted <= most) & (self.costs / wanted > late * even)).any():
            wanted[wider] *= 2
        groups = Filling(self)
        # The largest groups first: none that has begun is too small for the sequences that follow.
        for i, size in ((i, int(wanted[i])) for i in np.lexsort((-self.costs, -wanted)).tolist()):
            while size == 1 and free:  # no larger group will begin
                groups.begin(1)
                free -= 1
            group = groups.least_busy(i)
            if free >= size and (
                group is None
                or groups.busy[group] + self.costs[i] / groups.groups[group].size > even
            ):
                group, free = groups.begin(size), free - size
            if group is None:
                return None
            groups.add(group, i)
        while free:
            groups.begin(1)
            free -= 1
        return self.arrange(groups, num_passes)

    def arrange(self, groups: "Filling", num_passes: int) -> list[list[Group]] | None:
        """Groups that take equally long in the same pass, since others wait for the longest."""
        passes, room = [[] for _ in range(num_passes)], [self.num_ranks] * num_passes
        for _, group in sorted(
            zip(groups.busy, groups.groups), key=lambda pair: (-pair[0], -pair[1].size)
        ):
            place = next((p for p in range(num_passes) if room[p] >= group.size), None)
            if place is None:
                return None
            passes[place].append(group)
            room[place] -= group.size
        for together in passes:
            together.sort(key=lambda group: -group.size)  # so each begins at a multiple of its size
            for before, group in zip(together, together[1:]):
                group.first = before.first + before.size
        return passes


class Filling:
    """Groups to which sequences are added, with what each has: the time that its ranks take, tokens, the longest sequence."""

    def __init__(self, packer: Packer):
        self.packer, self.groups = packer, []
        self.busy, self.tokens, self.longest = [], [], []
        self.open: list[tuple[float, int]] = []  # heaps: (time, group), and
        self.closed: list[
            tuple[int, int]
        ] = []  # (-room, group) of those that had none for some sequence

    def begin(self, size: int) -> int:
        self.groups.append(Group(0, size, []))
        for amounts in (self.busy, self.tokens, self.longest):
            amounts.append(0)
        heapq.heappush(self.open, (0.0, len(self.groups) - 1))
        return len(self.groups) - 1

    def least_busy(self, i: int) -> int | None:
        """Of the groups with room for a sequence, the one whose ranks take the shortest time."""
        while self.closed and -self.closed[0][0] >= self.packer.tokens[1][i]:
            group = heapq.heappop(self.closed)[1]
            heapq.heappush(self.open, (self.busy[group], group))
        while self.open:
            busy, group = self.open[0]
            if busy != self.busy[group]:  # of the past: it is in the heap once more
                heapq.heappop(self.open)
            elif (room := self.room(group)) < self.packer.tokens[self.groups[group].size][i]:
                heapq.heappop(self.open)
                heapq.heappush(self.closed, (-room, group))
            else:
                return group

    def room(self, group: int) -> int:
        """How long another sequence may be."""
        most, number = (
            self.packer.max_tokens * self.groups[group].size,
            len(self.groups[group].sequences),
        )
        if not self.packer.padded:
            return most - self.tokens[group]
        return most // (number + 1) if self.longest[group] <= most // (number + 1) else 0

    def add(self, group: int, i: int) -> None:
        size = self.groups[group].size
        tokens = int(self.packer.tokens[size][i])
        self.groups[group].sequences.append(i)
        self.tokens[group] += tokens
        self.longest[group] = max(self.longest[group], tokens)
        self.busy[group] += float(self.packer.costs[i]) / size
        heapq.heappush(self.open, (self.busy[group], group))
