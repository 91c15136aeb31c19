"""Dynamic context parallelism: for each batch, the groups of ranks that share sequences.

In each pass over a batch, every group of ranks works on one micro-batch. A short sequence runs on
one rank. At the same time, a long one runs on as many ranks as it needs, a power of two.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from config import InputError
from data.batching.plan import Group, Passes, duration

# The fraction of time that an extra pass must save, since every pass gathers the weights again.
COST_OF_PASS = 0.01
# How many pass counts are compared.
NUM_TRIES = 2
# The fraction of their time that ranks lose by sharing a micro-batch.
COST_OF_SHARING = 0.1
# Group sizes are chosen once for each of these limits, and the results are compared. A sequence
# that takes longer than this multiple of a rank's even share of a pass gets a larger group than its
# length requires.
MAX_LATENESS = (math.inf, 2, 1)
# No larger group is made if each of its ranks would hold less than this fraction of max_tokens.
MIN_FILL = 1 / 8


def schedule(
    lengths: Sequence[int],
    costs: Sequence[float],
    num_ranks: int,
    max_tokens: int,
    multiple: Callable[[int], int],
    padded: bool = False,
    passes_multiple: int = 1,
) -> Passes:
    """Divide a batch into passes. In each pass, every rank is in one group.

    A group begins at a multiple of its size, which is a power of two. A sequence gets the smallest
    group that can hold it, or a larger one if the other ranks would otherwise wait for it.
    Sequences go, the longest first, to the least busy group. Several pass counts are compared, and
    the fastest is used, assuming that a pass takes as long as its busiest rank. Every rank that
    calls this with the same arguments gets the same result.

    Args:
        lengths: tokens of each sequence.
        costs: the time that each sequence takes on one rank, in any unit.
        num_ranks: the number of ranks that work on the batch.
        max_tokens: a group of s ranks takes at most s * max_tokens tokens.
        multiple: maps a group size to the multiple to which each sequence is padded.
        padded: pad each sequence to the longest one in its micro-batch instead.
        passes_multiple: the number of passes is a multiple of this.

    Raises:
        InputError: a sequence is too long for any group.
    """
    packer = Packer(lengths, costs, num_ranks, max_tokens, multiple, padded)

    @cache
    def candidates(number: int) -> list[Passes]:
        packed = [packer.pack(number * passes_multiple, lateness) for lateness in MAX_LATENESS]
        return [passes for passes in packed if passes]

    tokens_per_round = num_ranks * max_tokens * passes_multiple
    start = max(1, -(-sum(lengths) // tokens_per_round))
    # Double the number of passes until the sequences fit, then search for the smallest that works.
    lowest = start
    highest = start
    while not candidates(highest):
        lowest = highest + 1
        highest = 2 * highest - start + 1
    between = range(lowest, highest)
    lowest += bisect_left(between, True, key=lambda number: bool(candidates(number)))

    def seconds(passes: Passes) -> float:
        return duration(passes, costs, COST_OF_SHARING) * (1 + COST_OF_PASS * len(passes))

    compared = []
    for number in range(lowest, lowest + NUM_TRIES):
        compared += candidates(number)
    return min(compared, key=seconds)


class Packer:
    """Puts sequences into the groups of a given number of passes. Arguments as for `schedule`.

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
                f"data.max_tokens_per_micro_batch={max_tokens} for each of {self.sizes[-1]} ranks: "
                "raise it, or use shorter sequences"
            )
        self.smallest_size = 1 << fits.argmax(0)

    def pack(self, num_passes: int, lateness: float) -> Passes | None:
        """Return the groups of each pass, or None if the sequences do not fit.

        Args:
            lateness: one of MAX_LATENESS.
        """
        num_free = num_passes * self.num_ranks  # ranks without a group, over all passes
        even_share = self.total_cost / num_free
        sizes = self._group_sizes(even_share, lateness)
        groups = GroupsInTheMaking(self)
        # The largest groups first, so that no group is too small for the sequences that follow.
        for i in np.lexsort((-self.costs, -sizes)).tolist():
            size = int(sizes[i])
            while size == 1 and num_free:  # no larger group will be made
                groups.begin(1)
                num_free -= 1
            group = groups.least_busy(i)
            if num_free >= size and (group is None or groups.is_late(group, i, even_share)):
                group = groups.begin(size)
                num_free -= size
            if group is None:
                return None
            groups.add(group, i)
        for _ in range(num_free):
            groups.begin(1)
        return self._arrange(groups, num_passes)

    def _group_sizes(self, even_share: float, lateness: float) -> np.ndarray:
        """Return the size of the group that each sequence should get: [n] int64."""
        sizes = self.smallest_size.copy()
        largest_useful = np.minimum(self.sizes[-1], self.tokens[1] / (MIN_FILL * self.max_tokens))
        while True:
            is_late = self.costs / sizes > lateness * even_share
            is_too_small = (2 * sizes <= largest_useful) & is_late
            if not is_too_small.any():
                return sizes
            sizes[is_too_small] *= 2

    def _arrange(self, groups: "GroupsInTheMaking", num_passes: int) -> Passes | None:
        """Put groups with similar times into the same pass, since all wait for the slowest."""
        passes: Passes = [[] for _ in range(num_passes)]
        room = [self.num_ranks] * num_passes
        by_time = sorted(
            zip(groups.busy, groups.groups), key=lambda pair: (-pair[0], -pair[1].size)
        )
        for _, group in by_time:
            index = next((p for p in range(num_passes) if room[p] >= group.size), None)
            if index is None:
                return None
            passes[index].append(group)
            room[index] -= group.size
        for pass_groups in passes:
            # Placed from largest to smallest, each group begins at a multiple of its size.
            pass_groups.sort(key=lambda group: -group.size)
            for previous, group in zip(pass_groups, pass_groups[1:]):
                group.first = previous.first + previous.size
        return passes


class GroupsInTheMaking:
    """Groups that are still being filled, with their tokens and times.

    Attributes:
        busy: the time that the ranks of each group take.
        tokens: the tokens in each group.
        longest: the longest sequence of each group, in tokens.
    """

    def __init__(self, packer: Packer):
        self.packer = packer
        self.groups: list[Group] = []
        self.busy: list[float] = []
        self.tokens: list[int] = []
        self.longest: list[int] = []
        # Two heaps: (time, group) of the groups that may have room, and (-room, group) of the
        # groups that were too full for some sequence.
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
            if busy != self.busy[group]:  # outdated: the heap has a newer entry of this group
                heapq.heappop(self._open)
                continue
            room = self.room(group)
            if room >= self.packer.tokens[self.groups[group].size][i]:
                return group
            heapq.heappop(self._open)
            heapq.heappush(self._closed, (-room, group))
        return None

    def _reopen(self, num_tokens: int) -> None:
        """Reconsider the groups that were too full for longer sequences."""
        while self._closed and -self._closed[0][0] >= num_tokens:
            _, group = heapq.heappop(self._closed)
            heapq.heappush(self._open, (self.busy[group], group))

    def is_late(self, group: int, i: int, even_share: float) -> bool:
        """Return whether sequence i would make a group take longer than an even share."""
        return self.busy[group] + self.packer.costs[i] / self.groups[group].size > even_share

    def room(self, group: int) -> int:
        """Return the length of the longest sequence that still fits in a group, in tokens."""
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
