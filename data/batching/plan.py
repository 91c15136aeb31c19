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


@dataclass(frozen=True)
class PassCosts:
    """What a pass costs, apart from the work on its sequences.

    However few tokens a pass has, a rank has to start all its kernels and collectives. While the
    work takes less time than that, more tokens cost nothing. Ranks that share a micro-batch start
    more of them, and wait for each other.

    Attributes:
        least_alone: the least time of a pass in which each rank has its own micro-batch, in the
            unit of the sequences' costs.
        least_shared: the least time of a pass in which ranks share a micro-batch.
        slowdown: the fraction by which the work on a micro-batch slows down if two ranks share it.
            Each further doubling of their number is assumed to cost the same again.
    """

    least_alone: float = 0.0
    least_shared: float = 0.0
    slowdown: float = 0.0


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


def total_time(
    passes: Passes, costs: Sequence[float], pass_costs: PassCosts = PassCosts()
) -> float:
    """Return the estimated time of all passes, in the unit of costs."""
    return sum(pass_time(groups, costs, pass_costs) for groups in passes)


def pass_time(groups: Sequence[Group], costs: Sequence[float], pass_costs: PassCosts) -> float:
    """Return the estimated time of a pass, which takes as long as its slowest group."""
    is_shared = any(group.size > 1 for group in groups)
    least = pass_costs.least_shared if is_shared else pass_costs.least_alone
    slowest = max(group_time(group, costs, pass_costs.slowdown) for group in groups)
    return max(least, slowest)


def group_time(group: Group, costs: Sequence[float], slowdown: float) -> float:
    """Return the time that a group works on its micro-batch."""
    cost = sum(costs[i] for i in group.sequences)
    num_doublings = group.size.bit_length() - 1
    return cost * (1 + slowdown * num_doublings) / group.size
