"""Which sequences of a batch each data-parallel rank works on, and in which micro-batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch.distributed import ProcessGroup

from data.batching.groups import PassRules, schedule
from data.batching.packing import pack, partition, split_micro_batches
from data.batching.plan import MicroBatches, PassCosts, Plan
from engines.context_parallel import fixed_cp_size, has_dynamic_cp


@dataclass(frozen=True)
class Planner:
    """Divides batches over the data-parallel ranks of one engine.

    config                  the configuration of this engine, see Engine.config
    dp_rank, dp_size        this rank's data-parallel rank, and the number of data-parallel ranks
    dp_group                the group of the data-parallel ranks
    device                  device of the tensors in collectives of dp_group
    padding_multiple        context-parallel group size -> padding multiple: the length of each
                            sequence is padded to a multiple of this number of tokens
    micro_batches_multiple  the number of micro-batches is a multiple of this
    pass_costs              what a pass costs, in FLOPs of matrix products; it matters if group
                            sizes are chosen per batch
    """

    config: DictConfig
    dp_rank: int
    dp_size: int
    dp_group: ProcessGroup
    device: torch.device
    padding_multiple: Callable[[int], int]
    micro_batches_multiple: int
    pass_costs: PassCosts = PassCosts()

    def plan(self, lengths: list[int], costs: Sequence[float]) -> Plan:
        """Return this rank's part of a batch.

        Args:
            lengths: number of tokens in each sequence; the same on all ranks.
            costs: the time of each sequence, see cost_of_length() in engines/model/flops.py.
        """
        if has_dynamic_cp(self.config.engine):
            return self._plan_dynamic(lengths, costs)
        shares = partition(costs, self.dp_size)
        first_rank = torch.empty(len(lengths), dtype=torch.int64)
        for dp_rank, share in enumerate(shares):
            first_rank[share] = dp_rank
        own_share = shares[self.dp_rank]
        micro_batches = self.divide_share([lengths[i] for i in own_share])
        return Plan(own_share, micro_batches, first_rank, torch.ones_like(first_rank))

    def plan_groups(self, lengths: list[int], costs: Sequence[float], group_size: int) -> Plan:
        """Return this rank's part of a batch in which neighbouring sequences stay together.

        Args:
            lengths, costs: as in plan(), for whole groups of sequences.
            group_size: the number of sequences in a group, such as 2 for pairs.
        """
        multiple = self.padding_multiple(self._largest_cp_size())
        lengths_of_groups = []
        costs_of_groups = []
        for start in range(0, len(lengths), group_size):
            members = slice(start, start + group_size)
            padded = [round_up(length, multiple) for length in lengths[members]]
            if not self.config.engine.use_remove_padding:
                padded = [max(padded)] * group_size
            lengths_of_groups.append(sum(padded))
            costs_of_groups.append(sum(costs[members]))
        return self.plan(lengths_of_groups, costs_of_groups).expanded(group_size)

    def _largest_cp_size(self) -> int:
        """Return the largest number of ranks that may share a sequence.

        Sequences that are padded for this number are padded for smaller ones, too.
        """
        if has_dynamic_cp(self.config.engine):
            return 1 << (self.dp_size.bit_length() - 1)
        return fixed_cp_size(self.config.engine)

    def _plan_dynamic(self, lengths: list[int], costs: Sequence[float]) -> Plan:
        """Choose a group of ranks for every sequence."""
        rules = PassRules(
            padded=not self.config.engine.use_remove_padding,
            multiple=self.micro_batches_multiple,
            costs=self.pass_costs,
        )
        passes = schedule(
            lengths,
            costs,
            self.dp_size,
            self.config.data.max_tokens_per_micro_batch,
            self.padding_multiple,
            rules,
        )
        return Plan.of(passes, self.dp_rank, lengths, costs)

    def divide_share(self, lengths: Sequence[int]) -> MicroBatches:
        """Pack this rank's sequences into micro-batches, for groups of the fixed size.

        Every data-parallel rank gets the same number of micro-batches, since each pass has
        collectives. Padding counts toward the token cap. All data-parallel ranks call this
        together.
        """
        group_size = fixed_cp_size(self.config.engine)
        multiple = self.padding_multiple(group_size)
        padded_lengths = [round_up(length, multiple) for length in lengths]
        bins = pack(
            padded_lengths,
            self.config.data.max_tokens_per_micro_batch,
            padded=not self.config.engine.use_remove_padding,
        )
        max_num_bins = torch.tensor(len(bins), device=self.device)
        dist.all_reduce(max_num_bins, op=dist.ReduceOp.MAX, group=self.dp_group)
        num_bins = round_up(int(max_num_bins), self.micro_batches_multiple)
        bins = split_micro_batches(bins, num_bins, padded_lengths)
        return [(group_size, members) for members in bins]


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple that is not less than number."""
    return -(-number // multiple) * multiple
