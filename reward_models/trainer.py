"""The trained engine and its loss, which compute a step together, and validation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from tqdm import tqdm

from data.batching.batch import Batch
from data.batching.plan import Plan
from data.reward_dataset import RewardDataset
from engines.base import Engine
from reward_models.losses import Counts, RewardLoss


@dataclass
class RewardTrainer:
    """Trains and evaluates a reward model. All ranks call its methods together.

    Attributes:
        engine: the engine that is trained; it has a value head.
        loss: the loss.
    """

    engine: Engine
    loss: RewardLoss

    def train_batch(self, batch: Batch, step: int) -> dict[str, float]:
        """Take one optimizer step on the whole batch; see Engine.train_batch()."""
        plan = self._plan(batch)
        share = batch.select(plan.sequences)
        loss_fn = self.loss.of_batch(Counts.of(batch))
        return self.engine.train_batch(share, loss_fn, step, plan.micro_batches) | plan.metrics

    def evaluate(self, batch: Batch) -> dict[str, float]:
        """Return the loss and the metrics of the whole batch, without training."""
        plan = self._plan(batch)
        share = batch.select(plan.sequences)
        share.fields["values"] = self.engine.values(share, plan.micro_batches).cpu()
        # A row that several ranks share counts once.
        reported = share.select(plan.reported_by(self.engine.dp_rank).nonzero()[:, 0])
        values = reported.fields.pop("values")
        loss, amounts = self.loss.of_batch(Counts.of(batch))(values, reported.fields)
        sums = {"loss": loss, **amounts}
        totals = self.engine.sum_over_dp(torch.stack(list(sums.values())))
        return dict(zip(sums, totals.tolist()))

    def validate(self, val: RewardDataset, batch_size: int) -> dict[str, float]:
        """Return the metrics val/... over every row of `val`."""
        totals: dict[str, float] = {}
        starts = range(0, len(val), batch_size)
        # Only rank 0 shows a bar, and only if standard error is a terminal (tqdm's None).
        hides_bar = None if dist.get_rank() == 0 else True
        for start in tqdm(starts, desc="validate", leave=False, disable=hides_bar):
            rows = range(start, min(start + batch_size, len(val)))
            for name, mean in self.evaluate(val.batch(rows)).items():
                totals[name] = totals.get(name, 0.0) + mean * len(rows)
        means = {name: total / len(val) for name, total in totals.items()}
        metrics = {"val/loss": means["loss"], "val/mean_reward": means["mean_reward"]}
        if not self.loss.takes_pairs:
            return metrics | {"val/mean_absolute_error": means["mean_absolute_error"]}
        return metrics | {
            "val/accuracy": means["accuracy"],
            "val/margin": means["margin"],
            "val/rewards/chosen": means["rewards/chosen"],
            "val/rewards/rejected": means["rewards/rejected"],
        }

    def _plan(self, batch: Batch) -> Plan:
        group_size = 2 if self.loss.takes_pairs else 1
        return self.engine.plan(batch.lengths, group_size=group_size)
