"""Which groups have begun and are not trained yet. The ledger is the same on every rank.

Groups are numbered from 0 in the order of the data: group g has the responses to prompt g % B of
batch g // B, where B is data.train_batch_size. A group stays on the replica that has begun it,
because its tokens are there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


def divide_evenly(total: int, num_parts: int) -> list[int]:
    """Return num_parts integers that add up to `total`; the first ones may be larger by 1."""
    quotient, remainder = divmod(total, num_parts)
    return [quotient + (i < remainder) for i in range(num_parts)]


@dataclass(frozen=True)
class Quotas:
    """The groups that a draw has to begin, and how many it has to complete.

    Attributes:
        begun: number of a new group -> the replica that begins it.
        num_complete: for every replica, how many of its groups it has to complete.
    """

    begun: dict[int, int]
    num_complete: list[int]


@dataclass
class Ledger:
    """The groups that have begun.

    Attributes:
        num_replicas: the number of vLLM's replicas.
        oversample: a replica begins this many times the groups that it has to complete.
        limit: how many groups are trained in the whole run; None if it may be any number.
        next_group: the number of the group that begins next.
        num_dropped: groups that were given up because they were too old.
        replica_of: number of a group that has begun and is not trained -> its replica.
    """

    num_replicas: int
    oversample: float
    limit: int | None
    next_group: int = 0
    num_dropped: int = 0
    replica_of: dict[int, int] = field(default_factory=dict)

    def begin(self, num_groups: int) -> Quotas:
        """Begin as many groups as a draw of `num_groups` groups needs.

        First, every replica gets the groups that it has to complete, then those that it begins in
        advance. Near the end of the run, fewer groups are left to begin, so that the run uses all
        that have begun.
        """
        quotas = divide_evenly(num_groups, self.num_replicas)
        targets = [math.ceil(self.oversample * quota) for quota in quotas]
        begun = {**self._fill(quotas), **self._fill(targets)}
        num_open = self.count_open()
        num_complete = [min(quota, num_open[i]) for i, quota in enumerate(quotas)]
        return Quotas(begun, num_complete)

    def limit_to(self, num_groups: int) -> None:
        """Limit the rest of the run to this many groups, including those that have begun.

        Groups of earlier steps do not count: with filter_groups, there may have been any number.
        """
        num_ended = self.next_group - self.num_dropped - len(self.replica_of)
        self.limit = num_ended + num_groups

    def count_open(self) -> list[int]:
        """Return the number of groups of each replica that have begun and are not trained."""
        counts = Counter(self.replica_of.values())
        return [counts[replica] for replica in range(self.num_replicas)]

    def _fill(self, targets: list[int]) -> dict[int, int]:
        """Begin groups until every replica has its target, or none is left: group -> replica."""
        begun = {}
        missing = [target - count for target, count in zip(targets, self.count_open())]
        while max(missing) > 0 and self._is_one_left():
            replica = missing.index(max(missing))
            missing[replica] -= 1
            begun[self.next_group] = replica
            self.next_group += 1
        self.replica_of |= begun
        return begun

    def _is_one_left(self) -> bool:
        return self.limit is None or self.next_group < self.limit + self.num_dropped

    def end(self, trained: Iterable[int]) -> None:
        """Forget groups that are trained."""
        for group in trained:
            del self.replica_of[group]

    def drop(self, groups: Iterable[int]) -> None:
        """Give up groups. Others take their places, so that the run trains on as many."""
        for group in groups:
            del self.replica_of[group]
            self.num_dropped += 1
