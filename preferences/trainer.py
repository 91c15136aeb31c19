"""The trained engine, its reference and its loss, which compute a step together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor

from data.batching.batch import Batch
from data.batching.plan import Plan
from data.preference_dataset import PreferenceDataset
from engines.base import Engine
from engines.build import create_groups, engine_class
from engines.reference import reference_config
from preferences.cache import cache_reference
from preferences.losses import AnswerCounts, PreferenceLoss
from preferences.mismatched import estimate_kl
from preferences.reference import Reference, has_own_engine

# (name of a stage, the engine that computes in it) -> a context that times it
Stage = Callable[[str, Engine], AbstractContextManager]


def untimed(name: str, engine: Engine) -> AbstractContextManager:
    return nullcontext()


@dataclass
class PreferenceTrainer:
    """Trains and evaluates on batches of preferences. All ranks call its methods together.

    Attributes:
        engine: the engine that is trained.
        loss: the loss.
        reference: None if the loss reads none, or if batches have its log-probabilities.
        max_length: data.max_length, for the answers to other prompts.
        stage: Profiler.stage; by default, stages are not timed.
    """

    engine: Engine
    loss: PreferenceLoss
    reference: Reference | None
    max_length: int
    stage: Stage = untimed

    @classmethod
    def build(
        cls,
        config: DictConfig,
        loss: PreferenceLoss,
        device: torch.device,
        total_steps: int,
        datasets: list[PreferenceDataset],
        cache_dir: Path,
    ) -> PreferenceTrainer:
        """Build the engines. With reference.cache, the data sets get its log-probabilities.

        These are computed first unless they have been cached, so that a frozen reference and the
        trained engine are never both in memory.
        """
        build_engine = engine_class(config.model_engine)
        is_frozen = has_own_engine(config, loss)
        is_cached = loss.needs_reference and config.reference.cache

        def frozen_reference() -> Reference:
            frozen = reference_config(config)
            engine = build_engine(frozen, device, total_steps, optimize=False)
            return Reference(engine, without_adapters=False)

        if is_cached and is_frozen:
            create_groups(config)
            cache_reference(config, datasets, cache_dir, frozen_reference)
        engine = build_engine(config, device, total_steps)
        trainer = cls(engine, loss, None, config.data.max_length)
        if is_frozen and not is_cached:
            trainer.reference = frozen_reference()
        elif loss.needs_reference and not is_frozen:
            base = Reference(engine, without_adapters=True)
            if is_cached:
                cache_reference(config, datasets, cache_dir, lambda: base)
            else:
                trainer.reference = base
        return trainer

    def train_batch(self, batch: Batch, step: int) -> dict[str, float]:
        """Take one optimizer step on the whole batch; see Engine.train_batch()."""
        counts = AnswerCounts.of(batch)
        metrics = {}
        kl = None
        if self.loss.needs_kl:
            with self.stage("compute_kl", self.engine):
                kl, metrics["kl"] = self._estimate_kl(batch)
        plan = self._plan(batch)
        share = batch.select(plan.sequences)
        if self.reference is not None:
            with self.stage("ref_compute_log_prob", self.reference.engine):
                self._add_reference(share, plan)
        with self.stage("train_batch", self.engine):
            loss_fn = self.loss.of_batch(counts, kl)
            results = self.engine.train_batch(share, loss_fn, step, plan.micro_batches)
        return results | metrics | plan.metrics

    def evaluate(self, batch: Batch) -> dict[str, float]:
        """Return the loss and the metrics of the whole batch, without training."""
        counts = AnswerCounts.of(batch)
        kl = None
        if self.loss.needs_kl:
            kl, _ = self._estimate_kl(batch)
            kl = kl.cpu()
        plan = self._plan(batch)
        share = batch.select(plan.sequences)
        if self.reference is not None:
            self._add_reference(share, plan)
        log_probs, _, _ = self.engine.log_probs(share, plan.micro_batches)
        share.fields["log_probs"] = log_probs.cpu()
        # A row that several ranks share counts once.
        reported = share.select(plan.reported_by(self.engine.dp_rank).nonzero()[:, 0])
        log_probs = reported.fields.pop("log_probs")
        loss, amounts = self.loss.of_batch(counts, kl)(log_probs, None, reported.fields)
        sums = {"loss": loss, **amounts}
        totals = self.engine.sum_over_dp(torch.stack(list(sums.values())))
        return dict(zip(sums, totals.tolist()))

    def _estimate_kl(self, batch: Batch) -> tuple[Tensor, float]:
        return estimate_kl(self.engine, self.reference, batch, self.max_length)

    def _plan(self, batch: Batch) -> Plan:
        group_size = 2 if self.loss.takes_pairs else 1
        return self.engine.plan(batch.lengths, group_size=group_size)

    def _add_reference(self, share: Batch, plan: Plan) -> None:
        """Fill the field ref_log_probs of this rank's share."""
        ref_log_probs = self.reference.log_probs(share, plan.micro_batches)
        share.fields["ref_log_probs"] = ref_log_probs
