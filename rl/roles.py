"""The engines, vLLM and the grader, which all take part in a step of PPO in this process.

Most methods are stages of a step, in the order in which train_ppo.py calls them. To change a stage,
change its method, or override it in a subclass.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from data.batching.order import RowsOfBatch
from engines.base import Engine, LossFn
from engines.build import engine_class
from engines.checkpoint.checkpointer import Checkpointer, read_files
from engines.checkpoint.export import export_hf
from engines.heads import Head
from engines.parallel import device
from engines.teacher_settings import teacher_roles, uses_teacher
from engines.teaching import Teachers
from profiling import Profiler
from rl import collecting, estimation, reward_model, scoring, teacher, updates
from rl.collecting import BatchSource, PartialSource
from rl.losses import ActorLoss, critic_loss
from rl.models import mini_batch_prompts, needs_old_log_probs, role_configs, uses_reference
from rl.scoring import RewardModel
from rollout.drawing import Request, Sampler
from rollout.episodes.drawing import EpisodeSampler
from rollout.episodes.runner import EpisodeRunner
from rollout.grading.grader import Grader, check_failures
from rollout.partial.drawing import PartialSampler
from rollout.partial.episodes import PartialEpisodes
from rollout.partial.groups import OpenGroups
from rollout.partial.ledger import Ledger
from rollout.partial.responses import PartialResponses
from rollout.records import append_failures
from rollout.samples import Samples
from rollout.sharing import Share, divide
from rollout.vllm import adapters, probe
from rollout.vllm.continuing import ContinuingRollout
from rollout.vllm.device_memory import used_gib
from rollout.vllm.engine import Rollout
from rollout.vllm.sampling import validation_sampling

VALIDATION_SEED = -1  # in place of the number of a prompt batch


class Roles:
    """The engines, vLLM and the grader, which share one device.

    wake() hands the device to vLLM, and sleep() takes it back. An engine whose tensors are in host
    memory moves them to the device by itself when it is used.

    actor      the engine that is trained and exported; vLLM generates with its weights
    critic     an engine with a value head, or None if nothing reads values
    reference  an engine, or None if nothing reads its log-probabilities, or if the actor without
               its adapters is the reference
    teachers   the models whose distributions the actor learns, or None
    reward_model  a frozen model that scores responses, or None
    rollout    vLLM, which holds the actor's weights while it is awake
    grader     the processes that call the reward function, or play episodes
    """

    def __init__(
        self,
        config: DictConfig,
        this_device: torch.device,
        tokenizer,
        grader: Grader | EpisodeRunner,
        profiler: Profiler,
        total_steps: int,
    ):
        """Build the engines, one after another.

        Load a checkpoint, if any, and then call start_rollout(), which builds vLLM. If vLLM and the
        actor share their frozen weights, vLLM is built here, before the engines.
        """
        self.config = config
        self.device = this_device
        self.tokenizer = tokenizer
        self.grader = grader
        self.profiler = profiler
        self.total_steps = total_steps
        self.host_group = dist.new_group(backend="gloo")
        self._choose_offloads()
        self.rollout = None
        self.sampler = None
        self.partial: PartialSampler | None = None
        self.carried_files: list[bytes] = []
        if adapters.shares_base(config, dist.get_world_size()):
            self.rollout = Rollout(config, this_device)
        self.probe = probe.Probe(config) if config.model.lora.rank else None
        # The KV cache is checked in the first step after each start.
        self.must_check_kv_cache = config.rollout.kv_cache_dtype == "fp8"
        role_config = role_configs(config)
        # The schedule of the actor begins when the critic has warmed up.
        actor_steps = total_steps - config.critic.warmup_steps
        self.actor = self._build_actor(role_config["actor"], actor_steps)
        self.critic = None
        if "critic" in role_config:
            self.critic = self._build_critic(role_config["critic"], total_steps)
        self.reference = None
        if "reference" in role_config:
            self.reference = self._build_frozen(role_config["reference"], total_steps)
        self.teachers = None
        if uses_teacher(config):
            teachers = [role_config[role] for role in teacher_roles(config)]
            self.teachers = self._build_teachers(teachers, total_steps)
        self.reward_model = None
        if reward_model.ROLE in role_config:
            self.reward_model = self._build_reward_model(
                role_config[reward_model.ROLE], total_steps
            )

    def _choose_offloads(self) -> None:
        """Choose the tensors that are moved to host memory while their engine does not need them.

        On a CPU, nothing is moved.
        """
        offload = self.config.offload
        moves = self.device.type != "cpu"
        trained_parts = ("parameters", "optimizer")
        self.offloaded = [part for part in trained_parts if moves and offload[part]]
        self.reference_offloaded = ["parameters"] if moves and offload["reference"] else []

    def _build_actor(self, config: DictConfig, num_steps: int) -> Engine:
        return self._build(
            config,
            num_steps,
            self.offloaded,
            optimize=True,
            head=Head.LOG_PROBS,
            shared_weights=self.rollout.shared_weights if self.rollout else None,
        )

    def _build_critic(self, config: DictConfig, num_steps: int) -> Engine:
        return self._build(config, num_steps, self.offloaded, optimize=True, head=Head.VALUES)

    def _build_frozen(self, config: DictConfig, num_steps: int) -> Engine:
        offloaded = self.reference_offloaded
        return self._build(config, num_steps, offloaded, optimize=False, head=Head.LOG_PROBS)

    def _build_teachers(self, configs: Sequence[DictConfig], num_steps: int) -> Teachers:
        engines = [self._build_frozen(config, num_steps) for config in configs]
        return Teachers(self.config, engines, self.actor, self.reference_offloaded)

    def _build_reward_model(self, config: DictConfig, num_steps: int) -> RewardModel:
        offloaded = self.reference_offloaded
        engine = self._build(config, num_steps, offloaded, optimize=False, head=Head.VALUES)
        return RewardModel(self.config, engine, offloaded)

    def _build(
        self, config: DictConfig, num_steps: int, offloaded: Sequence[str], **options
    ) -> Engine:
        """Build an engine and offload it, to free the device for the next one."""
        build = engine_class(config.model_engine)
        temperature = self.config.rollout.temperature
        engine = build(config, self.device, num_steps, temperature=temperature, **options)
        engine.offload(*offloaded)
        return engine

    def start_rollout(self) -> None:
        """Offload the trained engines, in case a checkpoint was loaded, and start vLLM."""
        self._offload_trained()
        if self.rollout is None:
            self.rollout = Rollout(self.config, self.device)
        self.sampler = self._start_sampler()

    def _start_sampler(self) -> Sampler | EpisodeSampler:
        """Return the sampler of responses, or of episodes of several turns."""
        config = self.config
        if config.rollout.episode:
            return EpisodeSampler.start(
                config, self.rollout, self.grader, self.tokenizer, self.host_group
            )
        return Sampler(
            self.rollout,
            self.grader,
            self.tokenizer,
            self.host_group,
            config.reward.max_failure_rate,
            config.reward.skip_special_tokens,
        )

    def _trained_with_actor(self) -> dict[str, Engine]:
        """Return the engines that are trained besides the actor, by role."""
        return {"critic": self.critic} if self.critic else {}

    def _offload_trained(self) -> None:
        for engine in (self.actor, *self._trained_with_actor().values()):
            engine.offload(*self.offloaded)

    # -- generating --------------------------------------------------------------------------------

    def wake(self) -> None:
        """Send the actor's weights, or its adapter, to vLLM and make it ready to generate.

        Does nothing if vLLM is still awake after a validation. With an adapter, raises RuntimeError
        if vLLM's log-probabilities then differ from the actor's.
        """
        if self.rollout.is_current:
            return
        with self.profiler.stage("offload"):
            self.actor.offload(*(part for part in self.offloaded if part == "optimizer"))
            for engine in self._trained_with_actor().values():
                engine.offload(*self.offloaded)
        with self.profiler.stage("wake"):
            self.rollout.wake("weights")
        with self.profiler.stage("update_weights"):
            self._send_weights()
        if self.probe:
            with self.profiler.stage("probe"):
                self.probe.record_trainer(self.actor)
        with self.profiler.stage("offload"):
            self.actor.offload(*self.offloaded)
        with self.profiler.stage("wake"):
            self.rollout.wake("kv_cache")
        if self.probe:
            with self.profiler.stage("probe"):
                self.probe.check_vllm(self.rollout)

    def _send_weights(self) -> None:
        if not self.rollout.has_base:
            without_adapters = (
                self.actor.without_adapters() if self.rollout.adapter else nullcontext()
            )
            # If the actor lacks an MTP drafter's layers, they are read from the model's files.
            # Without a drafter, vLLM needs only the actor's weights.
            include_unused = self.rollout.drafter == "mtp"
            with without_adapters:
                weights = self.actor.export_weights(include_unused=include_unused)
                self.rollout.update_weights(weights)
        if self.rollout.adapter:
            self.rollout.update_adapter(self.actor.export_adapter())

    def respond(self, step: int, request: Request, profiler: Profiler | None = None) -> Samples:
        """Return graded responses to a request. step: the step that failures.jsonl reports.

        Raises InputError if too many responses could not be graded.
        """
        samples = self.sampler.draw(request, profiler or self.profiler)
        self._report_failures(step, samples)
        return samples

    def _report_failures(
        self, step: int, samples: Samples, num_drawn: int | None = None, num_earlier: int = 0
    ) -> None:
        """Append the responses of a draw that could not be graded to failures.jsonl.

        num_drawn: the responses of the step so far; None: only of this draw. num_earlier: the
        failures of the step's earlier draws.

        Raises InputError if there are too many of them.
        """
        if dist.get_rank() == 0:
            append_failures(samples, Path(self.config.output_dir) / "failures.jsonl", step)
        max_failure_rate = self.config.reward.max_failure_rate
        num_drawn = samples.num_drawn if num_drawn is None else num_drawn
        check_failures(samples.failures, num_drawn, max_failure_rate, num_earlier)

    def collect(
        self, dataset, rows_of_batch: RowsOfBatch, batch_index: int, step: int
    ) -> tuple[Samples, int]:
        """Return the samples of a step, and the number of the next step's first prompt batch.

        step: from 1.
        """
        respond = partial(self.respond, step)
        if self.config.rollout.partial.enable:
            if self.partial is None:
                self.partial = self.start_partial(dataset, rows_of_batch, step)
            source = PartialSource(
                self.config,
                self.partial,
                respond,
                partial(self._report_failures, step),
                version=step - 1,
                profiler=self.profiler,
            )
        else:
            source = BatchSource(self.config, respond, dataset, rows_of_batch, batch_index)
        samples = collecting.collect(self.config, source, self.host_group)
        return samples, source.batch_index

    def start_partial(self, dataset, rows_of_batch: RowsOfBatch, step: int) -> PartialSampler:
        """Return the sampler that carries responses from step to step, restored from a checkpoint.

        step: the next step, from 1.
        """
        config = self.config
        settings = config.rollout.partial
        ledger = Ledger(
            num_replicas=self.rollout.num_replicas,
            oversample=settings.oversample if settings.max_staleness else 1.0,
            limit=None,
        )
        parts = {
            "sampler": self.sampler,
            "ledger": ledger,
            "dataset": dataset,
            "rows_of_batch": rows_of_batch,
            "config": config,
            "open": OpenGroups(settings.max_staleness, settings.on_stale == "finish"),
        }
        if config.rollout.episode:
            sampler = PartialEpisodes(**parts)
        else:
            sampler = PartialResponses(**parts, continuing=ContinuingRollout(self.rollout))
        if self.carried_files:
            sampler.load_state(self.carried_files)
        # With filter_groups, a run may need any number of groups.
        if not config.algorithm.filter_groups.enable:
            num_steps = self.total_steps - step + 1
            ledger.limit_to(num_steps * config.data.train_batch_size)
        return sampler

    def validate(self, dataset, step: int) -> Samples:
        """Return graded responses to every row, drawn with the settings of `validation`."""
        self.wake()
        request = Request(
            dataset,
            range(len(dataset)),
            validation_sampling(self.config),
            seed=(self.config.trainer.seed, VALIDATION_SEED),
            section="validation",
        )
        # Report only the total time of a validation, as "validate", and not the time of its stages.
        unreported = Profiler()
        with self.profiler.stage("validate"):
            samples = self.respond(step, request, unreported)
        if self.reward_model is None:
            return samples
        self.sleep()
        return self._with_model_scores(samples)

    def sleep(self) -> dict[str, float]:
        """Take the device back from vLLM, and return metrics of its memory."""
        with self.profiler.stage("sleep"):
            return self.rollout.sleep()

    # -- before the update -------------------------------------------------------------------------

    def score(self, samples: Samples) -> Samples:
        """Add the reward model's scores, if there is one, to the reward function's."""
        if self.reward_model is None:
            return samples
        scored = self._with_model_scores(samples)
        return scoring.add_to_scores(self.config, scored, self.host_group)

    def _with_model_scores(self, samples: Samples) -> Samples:
        """Return samples with the reward model's scores as a part. vLLM must be asleep."""
        scoring.check_part_names(self.config, samples.parts)
        with self.profiler.stage("reward_model_compute", self.reward_model.engine):
            return self.reward_model.score(samples, self.host_group)

    def divide(self, samples: Samples) -> Share:
        """Return this rank's share of the samples; ranks exchange the tokens."""
        mini_batches = samples.mini_batches(mini_batch_prompts(self.config))
        with self.profiler.stage("divide"):
            teacher.number_teachers(self.config, samples)
            seen_by_teacher = None
            if self.config.data.teacher_prompt_key:
                seen_by_teacher = teacher.after_teacher_prompts(samples, self.host_group)
            share = divide(samples, mini_batches, self.actor, self.host_group, seen_by_teacher)
        if self.must_check_kv_cache:
            self._check_kv_cache(share)
        return share

    def _check_kv_cache(self, share: Share) -> None:
        with self.profiler.stage("check_kv_cache", self.actor):
            trainer_log_probs = updates.log_probs(self.actor, share)
            updates.check_fp8_kv_cache(share, trainer_log_probs, self.host_group)
        self.must_check_kv_cache = False

    def compute_log_probs(self, share: Share, step: int) -> None:
        """Fill old_log_probs, ref_log_probs and the teacher's fields, if something reads them.

        step: from 0.
        """
        fields = share.batch.fields
        if needs_old_log_probs(self.config, share.num_mini_batches, step):
            with self.profiler.stage("actor_compute_log_prob", self.actor):
                fields["old_log_probs"] = updates.log_probs(self.actor, share)
        if self.reference:
            with self.profiler.stage("ref_compute_log_prob", self.reference):
                fields["ref_log_probs"] = updates.log_probs(self.reference, share.without_routes)
                self.reference.offload(*self.reference_offloaded)
        elif uses_reference(self.config):
            with self.profiler.stage("ref_compute_log_prob", self.actor):
                with self.actor.without_adapters():
                    fields["ref_log_probs"] = updates.log_probs(self.actor, share.without_routes)
        # The actor, and so its teachers, rest until the critic has warmed up.
        if self.teachers and step >= self.config.critic.warmup_steps:
            with self.profiler.stage("teacher_compute", self.teachers.engine):
                teacher.compute(self.teachers, share)

    def compute_values(self, share: Share) -> None:
        """Fill the field values, if there is a critic."""
        if self.critic:
            with self.profiler.stage("compute_values", self.critic):
                values = updates.compute(self.critic.values, share.without_routes)
                share.batch.fields["values"] = values

    def compute_advantages(
        self, samples: Samples, share: Share, kl_coef: float
    ) -> dict[str, float]:
        """Fill the other fields that the losses read, and return metrics of the samples."""
        with self.profiler.stage("advantages"):
            return estimation.set_advantages(self.config, samples, share, kl_coef)

    # -- learning ----------------------------------------------------------------------------------

    def update_critic(self, share: Share, step: int) -> dict[str, float]:
        """Train the critic, if there is one, on this step's samples. step: from 0."""
        if not self.critic:
            return {}
        num_epochs = self.config.algorithm.ppo_epochs
        loss_fn = critic_loss(self.config)
        with self.profiler.stage("critic_update", self.critic):
            parts = share.without_routes.parts
            metrics = updates.update(self.critic, parts, loss_fn, step, num_epochs, "critic")
            self.critic.offload(*self.offloaded)
        return metrics

    def update_actor(self, share: Share, step: int) -> dict[str, float]:
        """Train the actor on this step's samples, after the critic's warm-up. step: from 0."""
        actor_step = step - self.config.critic.warmup_steps
        if actor_step < 0:
            return {}
        num_epochs = self.config.algorithm.ppo_epochs
        loss_fn = ActorLoss(self.config, len(share.batch))
        teaching = self.teachers.teaching(self.actor) if self.teachers else nullcontext()
        with teaching:
            metrics = self.update(share, loss_fn, actor_step, num_epochs)
        return teacher.teacher_metrics(self.config, metrics)

    def update(
        self, share: Share, loss_fn: LossFn, step: int, num_epochs: int = 1
    ) -> dict[str, float]:
        """Train the actor with any loss function, and return metrics. See updates.update().

        step: of its learning rate schedule, from 0.
        """
        with self.profiler.stage("actor_update", self.actor):
            return updates.update(self.actor, share.parts, loss_fn, step, num_epochs, "actor")

    def memory(self) -> dict[str, float]:
        """Return the GiB that all processes use on the device; on a CPU, this process's peak."""
        used = used_gib(self.device)
        if used is None:
            return device.memory()
        return {"perf/memory_training_gib": used}

    # -- saving and closing ------------------------------------------------------------------------

    def load(self, checkpointer: Checkpointer, path: Path) -> dict:
        """Load the trained engines from a checkpoint, and return its progress."""
        self.carried_files = read_files(path)
        return checkpointer.load(path, self.actor, **self._trained_with_actor())

    def save(self, checkpointer: Checkpointer, step: int, progress: dict) -> None:
        """Write a checkpoint of the trained engines.

        vLLM goes to sleep first, since saving moves offloaded tensors back to the device.
        """
        if self.rollout.awake:
            self.rollout.sleep()
        trained = self._trained_with_actor()
        files = self.partial.state() if self.partial else {}
        with self.profiler.stage("save"):
            checkpointer.save(step, self.actor, progress, self.tokenizer, files, **trained)

    def export(self, directory: Path, base_name: str) -> None:
        """Write the actor, or its adapter for the model called `base_name`, as Hugging Face files.

        See export_hf().
        """
        export_hf(self.actor, self.tokenizer, directory, base_name)

    def close(self) -> None:
        """Stop vLLM and the process group. vLLM wakes up to stop, so offload the engines first."""
        if self.sampler:
            self.sampler.close()
        self._offload_trained()
        self.rollout.shutdown()
