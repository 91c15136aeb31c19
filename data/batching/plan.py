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
    """One data-parallel rank's share of a batch of n sequences.

    Attributes:
        sequences: the indices of the sequences in the share, in order.
        micro_batches: the share divided into micro-batches, the same number on all ranks.
        first, count: [n] int64; ranks first : first + count work on each sequence.
        metrics: the metrics of the division; see of().
    """

    sequences: list[int]
    micro_batches: MicroBatches
    first: Tensor
    count: Tensor
    metrics: dict[str, float] = field(default_factory=dict)

    def reported_by(self, rank: int) -> Tensor:
        """Return which sequences of this share a rank includes when ranks sum their results.

        If several ranks work on the same sequence, only the first of them includes it.

        Returns:
            [len(sequences)] bool.
        """
        return self.first[self.sequences] == rank

    def expanded(self, group_size: int) -> "Plan":
        """Return this plan for single sequences, if its items are groups of neighbouring sequences.

        Group i consists of the sequences group_size * i, group_size * i + 1, ...
        """

        def members(groups: Sequence[int]) -> list[int]:
            return [group_size * group + i for group in groups for i in range(group_size)]

        return Plan(
            members(self.sequences),
            [(size, members(groups)) for size, groups in self.micro_batches],
            self.first.repeat_interleave(group_size),
            self.count.repeat_interleave(group_size),
            self.metrics,
        )

    @staticmethod
    def of(passes: Passes, rank: int, lengths: Sequence[int], costs: Sequence[float]) -> "Plan":
        """Return the plan of one rank.

        It has two kinds of metrics. perf/cp_{size} is the number of tokens on which groups of this
        size work. perf/plan_efficiency is the fraction of time in which ranks do not wait for each
        other, estimated from costs.
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
        metrics["perf/plan_efficiency"] = sum(costs) / num_ranks / total_time(passes, costs)
        return Plan(sequences, micro_batches, first, count, metrics)


def tokens_by_group_size(
    groups: Sequence[Group], num_ranks: int, lengths: Sequence[int]
) -> dict[str, float]:
    """Return perf/cp_{size} for every group size; it is 0 for a size without groups."""
    metrics = {f"perf/cp_{1 << level}": 0.0 for level in range(num_ranks.bit_length())}
    for group in groups:
        num_tokens = sum(lengths[i] for i in group.sequences)
        metrics[f"perf/cp_{group.size}"] += float(num_tokens)
    return metrics


def total_time(passes: Passes, costs: Sequence[float], sharing: float = 0.0) -> float:
    """Return the estimated time of all passes, in the unit of costs.

    A pass takes as long as its slowest group.

    Args:
        sharing: the fraction by which sharing a micro-batch among several ranks slows it down.
    """
    longest = []
    for groups in passes:
        longest.append(max(group_time(group, costs, sharing) for group in groups))
    return sum(longest)


def group_time(group: Group, costs: Sequence[float], sharing: float) -> float:
    """Return the time that a group takes for its micro-batch."""
    cost = sum(costs[i] for i in group.sequences)
    return cost * (1 + sharing * (group.size > 1)) / group.size
