"""Exchange data between ranks through host memory: sums of tensors, and small Python objects."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from engines.parallel.device import gather_values


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum x over all ranks in place, and return it. Without a process group, x stays the same."""
    if dist.is_initialized():
        dist.all_reduce(x, group=group)
    return x


def gather_on_all_ranks(items: list, group: dist.ProcessGroup | None) -> list:
    """Return the items of all ranks, in the order of the ranks, on every rank.

    Use this only for a few items.
    """
    return sum(gather_values(items, group), [])


def gather_on_first_rank(
    items: list[tuple[int, Any]], group: dist.ProcessGroup | None
) -> list[Any]:
    """Gather the items of all ranks on rank 0, sorted by position. Other ranks get an empty list.

    items: pairs of a position and an item.
    """
    if dist.is_initialized():
        items_of_rank = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(items, items_of_rank, group=group)
        items = sum(items_of_rank or [], [])
    return [item for _, item in sorted(items, key=lambda pair: pair[0])]
