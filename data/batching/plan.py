"""Which ranks work on each sequence of a batch, and in which micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# For each pass of a rank: the number of ranks in its group, and the sequences of the group's
# micro-batch, as indices into the rank's share.
MicroBatches = list[tuple[int, list[int]]]


@dataclass
class Group:
    """The ranks first : first + size, and the sequences of their micro-batch in one pass."""

    first: int
    size: int
    sequences: list[int]

    def has(self, rank: int) -> bool:
        return self.first <= rank < self.first + self.size


# The groups of every pass over a batch. In each pass every rank is in one group.
Passes = list[list[Group]]


@dataclass
class Plan:
    """What one data-parallel rank does of a batch of n sequences.

    Attributes:
        sequences: the sequences that it works on, in order: its share.
        micro_batches: of the share; as many as on all other ranks.
        first, count: [n] int64; the data-parallel ranks of each sequence are first : first + count.
        metrics: to be logged.
    """

    sequences: list[int]
    micro_batches: MicroBatches
    first: Tensor
    count: Tensor
    metrics: dict[str, float] = field(default_factory=dict)

    def speaks(self, rank: int) -> Tensor:
        """Return for which sequences of its share a rank counts when ranks add up their results.

        A sequence that several ranks share counts on the first one only.

        Returns:
            [len(sequences)] bool.
        """
        return self.first[self.sequences] == rank

    @staticmethod
    def of(passes: Passes, rank: int, lengths: Sequence[int], costs: Sequence[float]) -> "Plan":
        """Return the plan of one rank.

        Its metrics are perf/cp_{size}, the tokens of the batch in groups of that size, and
        perf/plan_efficiency, the share of the ranks' time that is used, as far as costs tell.
        """
        num_ranks = sum(group.size for group in passes[0])
        groups = [group for pass_groups in passes for group in pass_groups]
        first = torch.zeros(len(lengths), dtype=torch.int64)
        count = torch.zeros(len(lengths), dtype=torch.int64)
        for group in groups:
            first[group.sequences] = group.first
            count[group.sequences] = group.size
        own_groups = [group for group in groups if group.has(rank)]
        sequences = sorted(i for group in own_groups for i in group.sequences)
        index_in_share = {sequence: index for index, sequence in enumerate(sequences)}
        micro_batches = []
        for group in own_groups:
            indices = sorted(index_in_share[i] for i in group.sequences)
            micro_batches.append((group.size, indices))
        metrics = tokens_by_group_size(groups, num_ranks, lengths)
        metrics["perf/plan_efficiency"] = sum(costs) / num_ranks / duration(passes, costs)
        return Plan(sequences, micro_batches, first, count, metrics)


def tokens_by_group_size(
    groups: Sequence[Group], num_ranks: int, lengths: Sequence[int]
) -> dict[str, float]:
    """Return perf/cp_{size} for every size of a group, 0 where there is none."""
    metrics = {f"perf/cp_{1 << level}": 0.0 for level in range(num_ranks.bit_length())}
    for group in groups:
        num_tokens = sum(lengths[i] for i in group.sequences)
        metrics[f"perf/cp_{group.size}"] += float(num_tokens)
    return metrics


def duration(passes: Passes, costs: Sequence[float], sharing: float = 0.0) -> float:
    """Return how long the ranks take for all passes, in the unit of costs.

    A pass takes as long as its busiest group.

    Args:
        sharing: the share of its time that a group of several ranks loses by sharing a micro-batch.
    """
    longest = []
    for groups in passes:
        longest.append(max(seconds_of(group, costs, sharing) for group in groups))
    return sum(longest)


def seconds_of(group: Group, costs: Sequence[float], sharing: float) -> float:
    cost = sum(costs[i] for i in group.sequences)
    return cost * (1 + sharing * (group.size > 1)) / group.size
