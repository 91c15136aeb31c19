"""An engine of one data-parallel rank, for tests of what is done with a plan and its results."""

import torch
from torch import Tensor

from data.batching.plan import Plan


class PlannedEngine:
    """Works on all sequences of a batch, in one micro-batch.

    others: the sequences whose numbers another rank reports
    calls: the sizes of groups that it has planned for, and what subclasses add
    """

    dp_rank = 0
    others: tuple[int, ...] = ()

    def __init__(self):
        self.calls: list = []

    def plan(self, lengths: list[int], group_size: int = 1) -> Plan:
        self.calls.append(group_size)
        everything = list(range(len(lengths)))
        first = torch.zeros(len(lengths), dtype=torch.int64)
        first[list(self.others)] = 1
        metrics = {"perf/plan_efficiency": 0.75}
        return Plan(everything, [(1, everything)], first, torch.ones_like(first), metrics)

    def sum_over_dp(self, amounts: Tensor) -> Tensor:
        return amounts
