"""Divide a step over the ranks: send tokens to the ranks that train on them, and exchange numbers.

Tokens are sent once, from the rank that drew a response to the ranks that train on it. Apart from
that, ranks exchange only a few numbers per response, so the host memory that a rank needs hardly
grows with the number of ranks. These numbers are always summed in the order of the responses, so
the sums are bit-identical however the responses are divided.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from data.batching.batch import Batch, make_cu_seqlens
from data.batching.plan import Plan
from engines.base import Engine
from engines.model.routes import FIELD as ROUTES
from rollout.exchange import sum_over_ranks
from rollout.samples import Samples


@dataclass
class Share:
    """The m responses that this rank trains on, out of the n responses of a step.

    batch         their tokens, one mini-batch after another
    indices       [m] int64: their indices among the n responses
    mini_batches  [n] int64: the mini-batch of each response
    plans         the division of each mini-batch. It is the same in all passes over a mini-batch,
                  so the probability ratio is exactly 1 before the first update
    is_reporter   [m] bool: whether this rank reports the numbers of a response to the other ranks:
                  it does if it is the first rank that trains on the response
    group         the group of all ranks for tensors in host memory; None: the default group
    teacher_batch  the same responses after the prompts that a teacher sees; None: the same prompts
    """

    batch: Batch
    indices: Tensor
    mini_batches: Tensor
    plans: list[Plan]
    is_reporter: Tensor
    group: dist.ProcessGroup | None = None
    teacher_batch: Batch | None = None

    @property
    def num_mini_batches(self) -> int:
        return int(self.mini_batches.max()) + 1

    @property
    def parts(self) -> list[tuple[Batch, Plan]]:
        """This rank's share of each mini-batch, as views of the batch, with its plan."""
        batches = self.batch.split([len(plan.sequences) for plan in self.plans])
        return list(zip(batches, self.plans))

    @property
    def without_routes(self) -> Share:
        """This share for models with routing of their own, with the same tensors otherwise."""
        fields = {name: x for name, x in self.batch.fields.items() if name != ROUTES}
        return replace(self, batch=replace(self.batch, fields=fields))

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the plans: perf/cp_* are summed, and the mean of all others is taken.

        perf/cp_{size} is the number of tokens that groups of that size have worked on.
        """
        metrics = {}
        for name in self.plans[0].metrics:
            total = sum(plan.metrics[name] for plan in self.plans)
            is_sum = name.startswith("perf/cp_")
            metrics[name] = total / (1 if is_sum else self.num_mini_batches)
        return metrics

    def repeat_on_tokens(self, x: Tensor) -> Tensor:
        """Repeat the number of each response, x [n], for each of its tokens in this share: [T]."""
        return torch.repeat_interleave(x[self.indices], self.batch.cu_seqlens.diff())

    def gather_responses(self, x: Tensor) -> Tensor:
        """Exchange the numbers of this share's responses, x [m, ...].

        Returns the numbers of all responses, [n, ...], on every rank.
        """
        gathered = x.new_zeros(len(self.mini_batches), *x.shape[1:])
        gathered[self.indices[self.is_reporter]] = x[self.is_reporter]
        return sum_over_ranks(gathered, self.group)


@dataclass(frozen=True)
class Routes:
    """The data-parallel ranks that train on each response.

    plans         the plans of the mini-batches
    first, count  [n] int64: data-parallel ranks first : first + count train on a response
    """

    plans: list[Plan]
    first: Tensor
    count: Tensor

    def reach(self, dp_rank: int) -> Tensor:
        """Return whether a data-parallel rank trains on each response: [n] bool."""
        return (self.first <= dp_rank) & (dp_rank < self.first + self.count)


def divide(
    samples: Samples,
    mini_batches: Tensor,
    engine: Engine,
    group: dist.ProcessGroup | None = None,
    seen_by_teacher: Samples | None = None,
) -> Share:
    """Send the tokens of a step to the ranks that train on them. Called by all ranks.

    mini_batches: [n] int64, the mini-batch of each response. seen_by_teacher: the same responses
    after other prompts, which become Share.teacher_batch.
    """
    dp_rank_of_rank = gather_dp_ranks(engine, group)
    routes = plan_mini_batches(samples, mini_batches, engine, group)
    arriving = routes.reach(engine.dp_rank).nonzero()[:, 0]
    # Sort by sending rank: this is the order in which responses arrive.
    arriving = arriving[samples.owner[arriving].argsort(stable=True)]
    batch = exchange_tokens(samples, routes, dp_rank_of_rank, arriving, group)
    order = (mini_batches[arriving] * len(samples) + arriving).argsort()
    indices = arriving[order]
    # Ranks with the same dp_rank have the same responses; only the first of these ranks reports.
    is_first_of_dp_rank = dp_rank_of_rank.index(engine.dp_rank) == dist.get_rank()
    is_reporter = (routes.first[indices] == engine.dp_rank) & is_first_of_dp_rank
    share = Share(batch.select(order), indices, mini_batches, routes.plans, is_reporter, group)
    if seen_by_teacher:
        batch = exchange_tokens(seen_by_teacher, routes, dp_rank_of_rank, arriving, group)
        share.teacher_batch = batch.select(order)
    return share


def gather_dp_ranks(engine: Engine, group: dist.ProcessGroup | None) -> list[int]:
    """Return the data-parallel rank of every rank."""
    rank = torch.tensor(dist.get_rank())
    dp_ranks = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    dp_ranks = dp_ranks.index_fill(0, rank, engine.dp_rank)
    return sum_over_ranks(dp_ranks, group).tolist()


def plan_mini_batches(
    samples: Samples, mini_batches: Tensor, engine: Engine, group: dist.ProcessGroup | None
) -> Routes:
    """Divide each mini-batch over the data-parallel ranks so that all have about equal work."""
    image_flops = torch.zeros(len(samples), dtype=torch.float64)
    if samples.batch.image_store:
        own_flops = engine.image_flops(samples.batch)
        image_flops[samples.held] = torch.tensor(own_flops, dtype=torch.float64)
        image_flops = sum_over_ranks(image_flops, group)
    plans = []
    first = torch.empty(len(samples), dtype=torch.int64)
    count = torch.empty(len(samples), dtype=torch.int64)
    for mini_batch in range(int(mini_batches.max()) + 1):
        inside = (mini_batches == mini_batch).nonzero()[:, 0]
        plan = engine.plan(samples.lengths[inside].tolist(), image_flops[inside].tolist())
        first[inside] = plan.first
        count[inside] = plan.count
        plans.append(plan)
    return Routes(plans, first, count)


def exchange_tokens(
    samples: Samples,
    routes: Routes,
    dp_rank_of_rank: list[int],
    arriving: Tensor,
    group: dist.ProcessGroup | None,
) -> Batch:
    """Send the responses that this rank holds, and return those that it trains on.

    arriving: the indices of the responses that this rank receives, in the order of their arrival.
    """
    held = samples.held
    leaving = [routes.reach(dp_rank)[held].nonzero()[:, 0] for dp_rank in dp_rank_of_rank]
    tokens_sent = [int(samples.lengths[held[part]].sum()) for part in leaving]
    lengths = samples.lengths[arriving]
    tokens_received = torch.zeros(len(dp_rank_of_rank), dtype=torch.int64)
    tokens_received = tokens_received.index_add(0, samples.owner[arriving], lengths).tolist()

    def exchange(x: Tensor) -> Tensor:
        if x.dtype == torch.int16:  # gloo has no such type
            return exchange(x.view(torch.uint8)).view(torch.int16)
        received = x.new_empty(sum(tokens_received), *x.shape[1:])
        dist.all_to_all_single(received, x, tokens_received, tokens_sent, group=group)
        return received

    sent = samples.batch.select(torch.cat(leaving))
    has_images = sent.image_store is not None
    return Batch(
        exchange(sent.input_ids),
        make_cu_seqlens(lengths),
        {name: exchange(x) for name, x in sent.fields.items()},
        samples.rows[arriving] if has_images else None,
        sent.image_store,
    )
