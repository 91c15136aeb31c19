"""The part of a step that a rank trains on, and how it learns what must be known of the rest.

Tokens move once, from the rank that drew a response to the ranks that train on it. All else that ranks tell each other are
numbers per response, so that only the work on these, and hardly the memory of a rank's host, grows with the number of ranks. Sums
over the step are sums of such numbers in the order of the responses, and therefore the same, to the last bit, however these are
divided.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from data.batching.packing import Batch, bounds
from data.batching.plan import Plan
from engines.base import Engine
from rollout.samples import Samples, summed


@dataclass
class Share:
    """m of the n responses of a step.

    batch    their tokens, those of one mini-batch behind those of another
    places   [m] int64: which of the n they are
    minis    [n] int64: the mini-batch of each
    plans    how each mini-batch is divided; every pass over it has the same micro-batches, so that the first ratio is 1
    speaks   [m] bool: of the ranks that have a response the first, which tells the others
    group    of all ranks, for tensors on the host; None: the default group, or a process alone
    """

    batch: Batch
    places: Tensor
    minis: Tensor
    plans: list[Plan]
    speaks: Tensor
    group: dist.ProcessGroup | None = None

    @property
    def num_minis(self) -> int:
        return int(self.minis.max()) + 1

    @property
    def parts(self) -> list[tuple[Batch, Plan]]:
        """What the batch holds of each mini-batch: views."""
        return list(zip(self.batch.split([len(plan.sequences) for plan in self.plans]), self.plans))

    @property
    def metrics(self) -> dict[str, float]:
        """How many tokens groups of ranks of each size work on, and the mean of other metrics of the plans."""
        return {
            name: sum(plan.metrics[name] for plan in self.plans)
            / (1 if name.startswith("perf/cp_") else self.num_minis)
            for name in self.plans[0].metrics
        }

    def on_tokens(self, x: Tensor) -> Tensor:
        """Numbers per response of all [n] -> on each token of this share [T]."""
        return torch.repeat_interleave(x[self.places], self.batch.cu_seqlens.diff())

    def of_all(self, x: Tensor) -> Tensor:
        """Numbers per response of this share [m, ...] -> of all [n, ...], on every rank."""
        gathered = x.new_zeros(len(self.minis), *x.shape[1:])
        gathered[self.places[self.speaks]] = x[self.speaks]
        return summed(gathered, self.group)


def divide(
    samples: Samples, minis: Tensor, engine: Engine, group: dist.ProcessGroup | None = None
) -> Share:
    """Move the tokens to where they are trained on. Each mini-batch is divided over data-parallel ranks once."""
    rank, world_size, lengths, owner = (
        dist.get_rank(),
        dist.get_world_size(),
        samples.lengths,
        samples.owner,
    )
    dp_ranks = summed(
        torch.zeros(world_size, dtype=torch.int64).index_fill(
            0, torch.tensor(rank), engine.dp_rank
        ),
        group,
    )
    of_images, held, plans = torch.zeros(len(samples), dtype=torch.float64), samples.here, []
    if samples.batch.pictures:
        of_images[held] = torch.tensor(engine.image_flops(samples.batch), dtype=torch.float64)
        of_images = summed(of_images, group)
    first, count = torch.empty(2, len(samples), dtype=torch.int64)
    for mini in range(int(minis.max()) + 1):
        places = (minis == mini).nonzero()[:, 0]
        plans.append(engine.plan(lengths[places].tolist(), of_images[places].tolist()))
        first[places], count[places] = plans[-1].first, plans[-1].count
    mine = (first <= engine.dp_rank) & (engine.dp_rank < first + count)
    going = [
        ((first[held] <= dp_rank) & (dp_rank < (first + count)[held])).nonzero()[:, 0]
        for dp_rank in dp_ranks
    ]
    coming = mine.nonzero()[:, 0]
    coming = coming[owner[coming].argsort(stable=True)]
    sent = [int(lengths[held[part]].sum()) for part in going]
    received = (
        torch.zeros(world_size, dtype=torch.int64)
        .index_add(0, owner[coming], lengths[coming])
        .tolist()
    )

    def move(x: Tensor) -> Tensor:
        moved = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(moved, x, received, sent, group=group)
        return moved

    batch = samples.batch.select(torch.cat(going))
    batch = Batch(
        move(batch.input_ids),
        bounds(lengths[coming]),
        {name: move(x) for name, x in batch.fields.items()},
        batch.pictures and samples.rows[coming],
        batch.pictures,
    )
    order = (minis[coming] * len(samples) + coming).argsort()
    places = coming[order]
    speaks = (first[places] == engine.dp_rank) & (dp_ranks.tolist().index(engine.dp_rank) == rank)
    return Share(batch.select(order), places, minis, plans, speaks, group)
