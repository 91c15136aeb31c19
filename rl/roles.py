"""Who takes part in a step of PPO, all in this process: actor, critic and reference engines, vLLM, and the grader.

The methods are the stages of a step in the order in which train_ppo.py calls them. To change one stage, change its method,
or override it in a subclass.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch.distributed as dist
from omegaconf import DictConfig

from engines.build import engine_class
from engines.checkpoint.checkpointer import Checkpointer
from engines.checkpoint.export import export_hf
from engines.heads import Head
from engines.parallel import device
from profiling import Profiler
from rl import ppo
from rollout.grading.grader import Grader, check_failures
from rollout.samples import Samples, draw_samples
from rollout.sharing import Share, divide
from rollout.vllm import adapters, probe
from rollout.vllm.device_memory import used_gib
from rollout.vllm.engine import Rollout


class Roles:
    """They share one device. wake() hands it to vLLM and sleep() takes it back; an engine whose tensors wait in host memory
    brings them back by itself when it is used.

    actor              the engine that is trained, generates through vLLM, and is exported
    critic, reference  engines, or None where the configuration has none; with adapters the reference is the actor
                       without them
    rollout            vLLM, which holds the actor's weights while it is awake
    grader             processes that call the reward function
    """

    def __init__(
        self,
        config: DictConfig,
        this_device,
        tokenizer,
        grader: Grader,
        profiler: Profiler,
        total_steps: int,
    ):
        """Build the engines, one after another; start_rollout() comes once they hold the weights to begin with. Where vLLM's frozen
        weights are the actor's, too, vLLM is built first."""
        self.config, self.device, self.tokenizer, self.grader, self.profiler = (
            config,
            this_device,
            tokenizer,
            grader,
            profiler,
        )
        self.host_group = dist.new_group(backend="gloo")
        # What waits in host memory while somebody else needs the device; a CPU has no other memory.
        waits = (
            config.offload if this_device.type != "cpu" else dict.fromkeys(config.offload, False)
        )
        self.waiting = [part for part in ("parameters", "optimizer") if waits[part]]
        self.reference_waiting = ["parameters"] * waits["reference"]
        self.rollout = (
            Rollout(config, this_device)
            if adapters.shares_base(config, dist.get_world_size())
            else None
        )
        self.probe = probe.Probe(config) if config.model.lora.rank else None
        engines = {}
        for role, settings in ppo.roles(config).items():
            # The schedule of the actor begins where the critic's head start ends.
            steps = total_steps - config.critic.warmup_steps if role == "actor" else total_steps
            engines[role] = engine_class(config.model_engine)(
                settings,
                this_device,
                steps,
                optimize=role != "reference",
                head=Head.VALUES if role == "critic" else Head.LOG_PROBS,
                temperature=config.rollout.temperature,
                shared_weights=(
                    self.rollout.shared_weights if role == "actor" and self.rollout else None
                ),
            )
            engines[role].offload(
                *(self.reference_waiting if role == "reference" else self.waiting)
            )
        self.actor, self.critic, self.reference = (
            engines.get(role) for role in ("actor", "critic", "reference")
        )

    def start_rollout(self) -> None:
        for engine in (self.actor, *self._others().values()):
            engine.offload(*self.waiting)  # a resume has filled them
        self.rollout = self.rollout or Rollout(self.config, self.device)

    def _others(self) -> dict:
        """The engines that are trained besides the actor."""
        return {"critic": self.critic} if self.critic else {}

    # -- generating ------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Send the actor's weights, or its adapter, to vLLM and make it ready to generate. With an adapter RuntimeError is raised
        when vLLM then does not compute what the actor does."""
        if self.rollout.is_current:  # it has validated since the last update
            return
        with self.profiler.stage("offload"):
            self.actor.offload(*(part for part in self.waiting if part == "optimizer"))
            for engine in self._others().values():
                engine.offload(*self.waiting)
        with self.profiler.stage("wake"):
            self.rollout.wake("weights")
        with self.profiler.stage("update_weights"):
            if not self.rollout.has_base:
                with self.actor.without_adapters() if self.rollout.adapter else nullcontext():
                    # A drafter's layers may be no part of the actor; what else it leaves alone is not vLLM's.
                    self.rollout.update_weights(
                        self.actor.export_weights(whole=self.rollout.drafter == "mtp")
                    )
            if self.rollout.adapter:
                self.rollout.update_adapter(self.actor.export_adapter())
        if self.probe:
            with self.profiler.stage("probe"):
                self.probe.record_trainer(self.actor)
        with self.profiler.stage("offload"):
            self.actor.offload(*self.waiting)
        with self.profiler.stage("wake"):
            self.rollout.wake("kv_cache")
        if self.probe:
            with self.profiler.stage("probe"):
                self.probe.check_vllm(self.rollout)

    def draw(
        self,
        step: int,
        dataset,
        rows: Sequence[int],
        sampling: DictConfig,
        *seed: int,
        first_group: int = 0,
        profiler: Profiler | None = None,
    ) -> Samples:
        """Graded responses to rows of a PromptDataset; seed: what sets this draw apart. Those that could not be graded are
        written down first; then too many of them are an InputError."""
        samples = draw_samples(
            self.rollout,
            self.grader,
            dataset,
            rows,
            sampling,
            (self.config.trainer.seed, *seed),
            self.tokenizer,
            profiler or self.profiler,
            self.host_group,
            self.config.reward.max_failure_rate,
            first_group,
        )
        if dist.get_rank() == 0:
            samples.append_failures(Path(self.config.output_dir) / "failures.jsonl", step)
        check_failures(samples.failures, samples.num_asked, self.config.reward.max_failure_rate)
        return samples

    def collect(self, dataset, batch_index: int, step: int) -> tuple[Samples, int]:
        """The samples of a step, and the number of the prompt batch that the next step begins with."""
        return ppo.collect(self.config, partial(self.draw, step), dataset, batch_index)

    def validate(self, dataset, step: int) -> Samples:
        """Responses to every row, drawn as `validation` says."""
        self.wake()
        with self.profiler.stage("validate"):
            return self.draw(
                step, dataset, range(len(dataset)), self.config.validation, -1, profiler=Profiler()
            )

    def sleep(self) -> dict[str, float]:
        """Take the device back from vLLM; metrics of its memory."""
        with self.profiler.stage("sleep"):
            return self.rollout.sleep()

    # -- asking the engines ----------------------------------------------------------------------------------------------

    def divide(self, samples: Samples) -> Share:
        """What this rank trains on. Its tokens come from the ranks that drew them."""
        with self.profiler.stage("divide"):
            return divide(
                samples, ppo.mini_batches(self.config, samples), self.actor, self.host_group
            )

    def compute_log_probs(self, share: Share, step: int) -> None:
        """Fill old_log_probs (where something before the update reads them) and ref_log_probs."""
        if ppo.needs_old_log_probs(self.config, share.num_minis, step):
            with self.profiler.stage("actor_compute_log_prob", self.actor):
                share.batch.fields["old_log_probs"] = ppo.log_probs(self.actor, share)
        if self.reference:
            with self.profiler.stage("ref_compute_log_prob", self.reference):
                share.batch.fields["ref_log_probs"] = ppo.log_probs(self.reference, share)
                self.reference.offload(*self.reference_waiting)
        elif ppo.uses_reference(self.config):
            with (
                self.profiler.stage("ref_compute_log_prob", self.actor),
                self.actor.without_adapters(),
            ):
                share.batch.fields["ref_log_probs"] = ppo.log_probs(self.actor, share)

    def compute_values(self, share: Share) -> None:
        """Fill values, where there is a critic."""
        if self.critic:
            with self.profiler.stage("compute_values", self.critic):
                share.batch.fields["values"] = ppo.ask(self.critic.values, share)

    def compute_advantages(
        self, samples: Samples, share: Share, kl_coef: float
    ) -> dict[str, float]:
        """Fill what the losses read; metrics of the samples."""
        with self.profiler.stage("advantages"):
            return ppo.set_advantages(self.config, samples, share, kl_coef)

    # -- learning --------------------------------------------------------------------------------------------------------

    def update_critic(self, share: Share, step: int) -> dict[str, float]:
        if not self.critic:
            return {}
        with self.profiler.stage("critic_update", self.critic):
            metrics = ppo.update(
                self.critic,
                share.parts,
                ppo.critic_loss(self.config),
                step,
                self.config.algorithm.ppo_epochs,
                "critic",
            )
            self.critic.offload(*self.waiting)
        return metrics

    def update_actor(self, share: Share, step: int) -> dict[str, float]:
        step -= self.config.critic.warmup_steps
        if step < 0:
            return {}
        with self.profiler.stage("actor_update", self.actor):
            return ppo.update(
                self.actor,
                share.parts,
                ppo.actor_loss(self.config, len(share.batch)),
                step,
                self.config.algorithm.ppo_epochs,
                "actor",
            )

    def memory(self) -> dict[str, float]:
        """GiB in use on the device, of everybody; on a CPU this process's peak."""
        used = used_gib(self.device)
        return device.memory() if used is None else {"perf/memory_training_gib": used}

    # -- keeping ---------------------------------------------------------------------------------------------------------

    def load(self, checkpointer: Checkpointer, path) -> dict:
        """Take over a checkpoint; returns its progress."""
        return checkpointer.load(path, self.actor, **self._others())

    def save(self, checkpointer: Checkpointer, step: int, progress: dict) -> None:
        if self.rollout.awake:  # a checkpoint takes what waits in host memory back to the device
            self.rollout.sleep()
        with self.profiler.stage("save"):
            checkpointer.save(step, self.actor, progress, self.tokenizer, **self._others())

    def export(self, directory) -> None:
        export_hf(self.actor, self.tokenizer, directory)

    def close(self) -> None:
        """End vLLM, which wakes for that, and with it the process group."""
        for engine in (self.actor, *self._others().values()):
            engine.offload(*self.waiting)
        self.rollout.shutdown()
