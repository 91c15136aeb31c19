"""Dynamic context parallelism: for each batch, the groups of ranks that share sequences.

In each pass over a batch, every group of ranks works on one micro-batch. A short sequence runs on
one rank. At the same time, a long one runs on as many ranks as it needs, a power of two.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from config import InputError
from data.batching.plan import Group, PassCosts, Passes, total_time

# An extra pass must save this fraction of the time, since every pass gathers the weights again.
COST_OF_PASS = 0.01
# The number of pass counts to try, starting with the smallest one that fits; the fastest is used.
NUM_PASS_COUNTS = 2
# Two ranks that share a large micro-batch lose this fraction of their time: on two H200, 4 % with a
# 1.5B model and 6 % with a 7B model (docs/benchmarks.md).
SLOWDOWN = 0.05
# A sequence gets a larger group than its length requires if it would otherwise exceed a time limit.
# A limit is a multiple of each rank's time in a perfectly balanced pass. All of these limits are
# tried, and the fastest result is used.
TIME_LIMITS = (math.inf, 2, 1)
# Plans in which every sequence gets a group of at least so many ranks are compared, too.
LEAST_SIZES = (2, 4, 8)
# A group is not enlarged if each of its ranks would hold less than this fraction of max_tokens.
MIN_FILL = 1 / 8


@dataclass(frozen=True)
class PassRules:
    """What holds for all passes of an engine.

    Attributes:
        padded: each sequence is also padded to the longest one in its micro-batch.
        multiple: the number of passes is a multiple of this.
        costs: what a pass costs, apart from the work on its sequences.
    """

    padded: bool = False
    multiple: int = 1
    costs: PassCosts = PassCosts(slowdown=SLOWDOWN)


def schedule(
    lengths: Sequence[int],
    costs: Sequence[float],
    num_ranks: int,
    max_tokens: int,
    multiple: Callable[[int], int],
    rules: PassRules = PassRules(),
) -> Passes:
    """Divide a batch into passes. In each pass, every rank is in one group.

    The size of a group is a power of two, and its first rank is a multiple of its size. A sequence
    gets the smallest group that can hold it, or a larger one if the other ranks would otherwise
    wait for it. Sequences are assigned to the least busy group, the longest sequences first.
    Several schedules with different numbers of passes are compared, and the fastest is returned. A
    pass is assumed to take as long as its busiest rank, and at least as long as rules.costs say.
    The result depends only on the arguments, so all ranks get the same.

    Args:
        lengths: tokens of each sequence.
        costs: the time that each sequence takes on one rank, in any unit.
        num_ranks: the number of ranks that work on the batch.
        max_tokens: a group of s ranks takes at most s * max_tokens tokens.
        multiple: takes a group size; the length of each sequence is rounded up to a multiple of
            the result.

    Raises:
        InputError: a sequence is too long for any group.
    """
    packer = Packer(lengths, costs, num_ranks, max_tokens, multiple, rules.padded)

    @cache
    def candidates(number: int) -> list[Passes]:
        return packer.pack_within_time_limits(number * rules.multiple)

    tokens_per_round = num_ranks * max_tokens * rules.multiple
    start = max(1, -(-sum(lengths) // tokens_per_round))
    # Double the number of passes until the sequences fit, then search for the smallest that works.
    lowest = start
    highest = start
    while not candidates(highest):
        lowest = highest + 1
        highest = 2 * highest - start + 1
    between = range(lowest, highest)
    lowest += bisect_left(between, True, key=lambda number: bool(candidates(number)))

    def estimated_time(passes: Passes) -> float:
        return total_time(passes, costs, rules.costs) * (1 + COST_OF_PASS * len(passes))

    compared = []
    for number in range(lowest, lowest + NUM_PASS_COUNTS):
        compared += candidates(number)
        compared += packer.pack_in_large_groups(number * rules.multiple)
    return min(compared, key=estimated_time)


class Packer:
    """Assigns sequences to groups, for a fixed number of passes. Takes the arguments of schedule().

    Attributes:
        sizes: the sizes that a group may have.
        total_cost: the exact sum of costs, which does not depend on the order of summation.
        tokens: group size -> [n], the tokens that each sequence takes up in a group of this size.
        smallest_size: [n], the size of the smallest group that can hold each sequence.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        costs: Sequence[float],
        num_ranks: int,
        max_tokens: int,
        multiple: Callable[[int], int],
        padded: bool,
    ):
        self.num_ranks = num_ranks
        self.max_tokens = max_tokens
        self.padded = padded
        self.costs = np.asarray(costs, float)
        self.total_cost = math.fsum(costs)
        self.sizes = [1 << level for level in range(num_ranks.bit_length())]
        self.tokens: dict[int, np.ndarray] = {}
        for size in self.sizes:
            num_blocks = -(-np.asarray(lengths, np.int64) // multiple(size))
            self.tokens[size] = num_blocks * multiple(size)
        fits = np.array([tokens <= max_tokens * size for size, tokens in self.tokens.items()])
        if not fits[-1].all():
            raise InputError(
                f"a sequence of {max(lengths)} tokens is longer than "
                f"data.max_tokens_per_micro_batch={max_tokens} on each of {self.sizes[-1]} ranks: "
                "raise it, or use shorter sequences"
            )
        self.smallest_size = 1 << fits.argmax(0)

    def pack_within_time_limits(self, num_passes: int) -> list[Passes]:
        """Return what pack() finds with each of TIME_LIMITS."""
        packed = []
        for time_limit in TIME_LIMITS:
            packed += self.pack(num_passes, time_limit)
        return packed

    def pack_in_large_groups(self, num_passes: int) -> list[Passes]:
        """Return what pack() finds with each of LEAST_SIZES."""
        packed = []
        for least_size in LEAST_SIZES:
            if least_size <= self.num_ranks:
                packed += self.pack(num_passes, math.inf, least_size)
        return packed

    def pack(self, num_passes: int, time_limit: float, least_size: int = 1) -> list[Passes]:
        """Divide the sequences over groups, and return the ways to put the groups into passes.

        Returns no way if the sequences do not fit.

        Args:
            time_limit: one of TIME_LIMITS.
            least_size: the size of the smallest group that a sequence may get.
        """
        num_free = num_passes * self.num_ranks  # ranks without a group, summed over passes
        even_share = self.total_cost / num_free
        sizes = np.maximum(least_size, self._group_sizes(even_share, time_limit))
        groups = UnfinishedGroups(self)
        # Start with the sequences that need the largest groups, so that existing groups are large
        # enough for all later sequences.
        for i in np.lexsort((-self.costs, -sizes)).tolist():
            size = int(sizes[i])
            while size == 1 and num_free:  # all remaining sequences fit on one rank
                groups.begin(1)
                num_free -= 1
            group = groups.least_busy(i)
            if num_free >= size and (group is None or groups.would_be_late(group, i, even_share)):
                group = groups.begin(size)
                num_free -= size
            if group is None:
                return []
            groups.add(group, i)
        for _ in range(num_free):
            groups.begin(1)
        return self._arrangements(groups, num_passes)

    def _group_sizes(self, even_share: float, time_limit: float) -> np.ndarray:
        """Return the size of the group that each sequence should get: [n] int64."""
        sizes = self.smallest_size.copy()
        largest_useful = np.minimum(self.sizes[-1], self.tokens[1] / (MIN_FILL * self.max_tokens))
        while True:
            is_late = self.costs / sizes > time_limit * even_share
            is_too_small = (2 * sizes <= largest_useful) & is_late
            if not is_too_small.any():
                return sizes
            sizes[is_too_small] *= 2

    def _arrangements(self, groups: "UnfinishedGroups", num_passes: int) -> list[Passes]:
        """Put groups that take similar times into the same pass: all wait for the slowest one.

        A second way puts shared groups into as few passes as possible, since each pass with such a
        group takes some time to start.
        """
        timed = [*zip(groups.busy, groups.groups)]
        by_time = sorted(timed, key=lambda pair: (-pair[0], -pair[1].size))
        shared_first = sorted(by_time, key=lambda pair: pair[1].size == 1)
        ways = [by_time] if shared_first == by_time else [by_time, shared_first]
        arranged = []
        for way in ways:
            passes = self._arrange([group for _, group in way], num_passes)
            if passes:
                arranged.append(passes)
        return arranged

    def _arrange(self, groups: Sequence[Group], num_passes: int) -> Passes | None:
        """Put each group into the first pass with room. Returns None if some do not fit."""
        passes: Passes = [[] for _ in range(num_passes)]
        room = [self.num_ranks] * num_passes
        for group in groups:
            index = next((p for p in range(num_passes) if room[p] >= group.size), None)
            if index is None:
                return None
            # A copy, since every way to arrange groups sets the first ranks anew.
            passes[index].append(replace(group))
            room[index] -= group.size
        for pass_groups in passes:
            # In order of decreasing size, the first rank of each group is a multiple of its size.
            pass_groups.sort(key=lambda group: -group.size)
            for previous, group in zip(pass_groups, pass_groups[1:]):
                group.first = previous.first + previous.size
        return passes


class UnfinishedGroups:
    """Groups that are still being filled.

    Attributes:
        busy: the time that each group takes, in the unit of costs.
        tokens: the number of tokens in each group.
        longest: the number of tokens of each group's longest sequence.
    """

    def __init__(self, packer: Packer):
        self.packer = packer
        self.groups: list[Group] = []
        self.busy: list[float] = []
        self.tokens: list[int] = []
        self.longest: list[int] = []
        # Two heaps. _open: (time, group) for groups that may have room. _closed: (-room, group) for
        # groups that were too full for an earlier sequence.
        self._open: list[tuple[float, int]] = []
        self._closed: list[tuple[int, int]] = []

    def begin(self, size: int) -> int:
        """Begin a group of `size` ranks and return its index."""
        index = len(self.groups)
        self.groups.append(Group(0, size, []))
        self.busy.append(0)
        self.tokens.append(0)
        self.longest.append(0)
        heapq.heappush(self._open, (0.0, index))
        return index

    def least_busy(self, i: int) -> int | None:
        """Return the least busy group with room for sequence i, or None."""
        self._reopen(int(self.packer.tokens[1][i]))
        while self._open:
            busy, group = self._open[0]
            if busy != self.busy[group]:  # outdated: the heap has a newer entry for this group
                heapq.heappop(self._open)
                continue
            room = self.room(group)
            if room >= self.packer.tokens[self.groups[group].size][i]:
                return group
            heapq.heappop(self._open)
            heapq.heappush(self._closed, (-room, group))
        return None

    def _reopen(self, num_tokens: int) -> None:
        """Reopen the closed groups that have room for num_tokens tokens."""
        while self._closed and -self._closed[0][0] >= num_tokens:
            _, group = heapq.heappop(self._closed)
            heapq.heappush(self._open, (self.busy[group], group))

    def would_be_late(self, group: int, i: int, even_share: float) -> bool:
        """Return whether a group with sequence i would take longer than an even share."""
        return self.busy[group] + self.packer.costs[i] / self.groups[group].size > even_share

    def room(self, group: int) -> int:
        """Return the number of tokens of the longest sequence that still fits into a group."""
        capacity = self.packer.max_tokens * self.groups[group].size
        if not self.packer.padded:
            return capacity - self.tokens[group]
        num_sequences = len(self.groups[group].sequences) + 1
        per_sequence = capacity // num_sequences
        return per_sequence if self.longest[group] <= per_sequence else 0

    def add(self, group: int, i: int) -> None:
        """Add sequence i to a group."""
        size = self.groups[group].size
        num_tokens = int(self.packer.tokens[size][i])
        self.groups[group].sequences.append(i)
        self.tokens[group] += num_tokens
        self.longest[group] = max(self.longest[group], num_tokens)
        self.busy[group] += float(self.packer.costs[i]) / size
        heapq.heappush(self._open, (self.busy[group], group))
