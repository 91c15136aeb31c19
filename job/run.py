"""The parts of a run that surround its training loop."""

import atexit
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from data.chat.tokenizer import ChatTokenizer, load_tokenizer
from data.selection import Selection
from engines.checkpoint.checkpointer import Checkpointer
from engines.parallel import device as devices
from engines.parallel.device import on_rank0
from job import models, setup, tracking
from job.consistency import check_ranks_agree
from job.hardware import Hardware, check_assumptions
from job.heartbeat import Heartbeat
from job.memory_plan import MemoryPlan
from job.order import Order, check_order_settings, make_order
from job.progress import Progress
from job.resume import find_resume
from job.signals import Agreement
from profiling import Profiler


@dataclass
class Run:
    """Everything around the training loop of a script, filled in the order of the methods.

    All ranks call the methods together. The methods load no weights, and raise InputError for
    mistakes of the user: cheap checks come first.

    Attributes, from begin():
        config: the configuration, with a local directory for every model.
        named_config: the configuration as the user wrote it, in which a model may have the name of
            one on the hub. It is the one to print and to save.
        device: the device of this rank.
        hardware: the ranks and their devices; in a dry run perhaps assumed ones.
        rank, world_size: this rank, and the number of ranks.
        output_dir: the run's directory.
        heartbeat: tracks which stage every rank is in; None in a dry run.
        agreement: decides after every step whether to stop and whether to save.
    From load_tokenizer():
        tokenizer: the tokenizer of model.path.
        processor: turns images into tokens and tensors; None if model.images is false.
    From the script:
        train, val: the data sets; val may be None.
    From count_steps():
        steps_per_epoch: steps in one pass over the data.
        total_steps: steps of the whole run, including those before a resume.
    From choose_order():
        order: the rows of every batch.
    From start_profiler():
        profiler: times the stages of every step and records the selected ones.
    From plan_memory():
        memory_plan: the estimated memory of the run's engines.
    From find_checkpoint():
        checkpointer: writes and reads checkpoints.
        progress: counts the steps; starts from 0 unless a checkpoint is loaded.
        resume_from: the checkpoint to continue from, or None.
    From start():
        tracker: writes metrics and the lines of the log.
    """

    config: DictConfig
    named_config: DictConfig
    device: torch.device
    hardware: Hardware
    rank: int
    world_size: int
    output_dir: Path
    heartbeat: Heartbeat | None
    agreement: Agreement
    tokenizer: Any = field(init=False)
    processor: Any = field(init=False)
    train: Any = field(init=False)
    val: Any = field(init=False)
    steps_per_epoch: int = field(init=False)
    total_steps: int = field(init=False)
    order: Order = field(init=False)
    profiler: Profiler = field(init=False)
    memory_plan: MemoryPlan = field(init=False)
    checkpointer: Checkpointer = field(init=False)
    progress: Progress = field(init=False)
    resume_from: Path | None = field(init=False)
    tracker: tracking.Tracker = field(init=False)

    @classmethod
    def begin(cls, config: DictConfig) -> Self:
        """Join the other ranks, claim the output directory and find the models."""
        trainer = config.trainer
        setup.check_validation(config)
        setup.check_names(config)
        check_order_settings(config)
        check_assumptions(config)
        # Only then handle signals: Python would not run a handler while this waits for other ranks.
        device = devices.init(trainer.timeout_minutes)
        agreement = Agreement(trainer.save_freq, trainer.save_minutes)
        check_ranks_agree(config)
        setup.check_directories(config)
        heartbeat = setup.start_heartbeat(config)
        tracking.check_loggers(config)
        setup.bind_cpus(config, device)
        hardware = Hardware.of(config, device)
        return cls(
            config=models.with_local_models(config),
            named_config=config,
            device=device,
            hardware=hardware,
            rank=dist.get_rank(),
            world_size=hardware.world_size,
            output_dir=Path(config.output_dir),
            heartbeat=heartbeat,
            agreement=agreement,
        )

    def load_tokenizer(self) -> None:
        """Load the tokenizer of model.path and, for a vision-language model, its processor."""
        self.tokenizer = load_tokenizer(self.config)
        self.processor = models.load_processor(self.config, self.tokenizer)

    def chat_tokenizer(self) -> ChatTokenizer:
        """Return the tokenizer with its chat template and the end tokens of model.path."""
        return ChatTokenizer.load(self.tokenizer, Path(self.config.model.path), self.processor)

    def tokens_of(
        self,
        tokenize: Callable[..., Path],
        selection: Selection,
        *options,
        data: DictConfig | None = None,
    ) -> Path:
        """Return the cache folder of these rows: rank 0 tokenizes rows that are not in the cache.

        Args:
            tokenize: data.dataset.tokenize or data.prompts.tokenize_prompts.
            options: its last arguments.
            data: the section `data` of a configuration; None: the run's own.
        """
        return on_rank0(
            tokenize,
            selection,
            self.tokenizer,
            data or self.config.data,
            setup.cache_directory(self.config),
            self.config.model.path,
            self.processor,
            *options,
        )

    def datasets(self) -> dict[str, Any]:
        """Return the data sets by the configuration key that chooses their rows."""
        val_key = "data.val_size" if self.config.data.val_files is None else "data.val_files"
        datasets = {"data.train_files": self.train, val_key: self.val}
        return {key: dataset for key, dataset in datasets.items() if dataset}

    def count_steps(self) -> None:
        self.steps_per_epoch, self.total_steps = setup.count_steps(self.config, self.train)

    def choose_order(self) -> None:
        """Choose the rows of every batch, and report the order on rank 0."""
        self.order = make_order(self.config, self.train, self.total_steps)
        if self.rank == 0:
            for notice in self.order.notices:
                print(notice, flush=True)

    def start_profiler(self, model_stages: list[str]) -> None:
        """Start the profiler that the configuration describes.

        Args:
            model_stages: the stages of this run in which a model computes.
        """
        self.profiler = setup.start_profiler(
            self.config, self.device, self.total_steps, model_stages
        )

    def plan_memory(self, roles: dict[str | None, DictConfig]) -> None:
        """Estimate the device memory that the run needs, and warn if the device may lack it.

        Raises InputError if vLLM's share of the device does not hold the model's weights.

        Args:
            roles: the configuration of each engine, by role; the only role of SFT is None.
        """
        self.memory_plan = MemoryPlan(roles, self.hardware)
        if self.heartbeat:
            self.heartbeat.explain_out_of_memory = self.memory_plan.explain
        for warning in on_rank0(self.memory_plan.warnings):
            if self.rank == 0:
                print(warning, flush=True)

    def find_checkpoint(self, progress: Progress) -> None:
        """Find the checkpoint to continue from and check that it fits this run.

        Args:
            progress: the progress of this run before its first step.
        """
        trainer = self.config.trainer
        self.progress = progress
        self.checkpointer = Checkpointer(
            self.output_dir / "checkpoints", trainer.max_checkpoints, trainer.async_save
        )
        latest = self.checkpointer.find(trainer.resume, self.config.dry_run)
        self.resume_from = on_rank0(find_resume, self.config, latest, progress, self.total_steps)

    def start(self, description: str) -> None:
        """Open the logs. From now on, a signal takes effect at the end of the step.

        Call this last before the loop.

        Args:
            description: rows and ranks of this run, for the first line of the log.
        """
        if not self.only_validates:
            on_rank0(setup.write_config, self.named_config)
        step = self.progress.step
        self.tracker = tracking.Tracker(self.named_config, self.rank, step, self.total_steps)
        origin = f"resuming from {self.resume_from}" if self.resume_from else "starting"
        self.tracker.print(
            f"{origin}: step {step} of {self.total_steps} ({self.steps_per_epoch} per epoch), "
            f"{description}"
        )
        self.agreement.begin(self.total_steps)
        if not self.only_validates:
            self.tracker.print(self.agreement.describe())
        self.profiler.on_stage = self.heartbeat.enter
        # Collectives time out a minute after the heartbeat, which names the missing ranks.
        devices.set_timeouts(self.config.trainer.timeout_minutes + 1)
        # All that exists now lives as long as the run. A full garbage collection would visit it
        # again and again, which takes tenths of a second, and vLLM asks for one in every step.
        gc.collect()
        gc.freeze()
        # Otherwise libraries would report all of it as leaks when the process ends.
        atexit.register(gc.unfreeze)

    @property
    def base_name(self) -> str:
        """The name of the model that the run starts from: see models.base_name()."""
        return models.base_name(self.named_config)

    @property
    def only_validates(self) -> bool:
        """Whether the run evaluates a model, and does not train it."""
        return self.config.trainer.get("val_only", False)

    @property
    def is_complete(self) -> bool:
        """Whether the last step is done."""
        return self.progress.step >= self.total_steps

    @property
    def should_continue(self) -> bool:
        """Whether to take another step: steps are left, and no rank has been asked to stop."""
        return not self.is_complete and not self.agreement.stop

    @property
    def is_validation_due(self) -> bool:
        """Whether to validate after this step: every trainer.test_freq steps and after the last.

        A run that stops skips validation: the remaining time is for the checkpoint.
        """
        if not self.val or self.agreement.stop:
            return False
        return self.is_complete or self.is_due(self.config.trainer.test_freq)

    def is_due(self, frequency: int) -> bool:
        """Return whether an action is due that happens every `frequency` steps (-1: never)."""
        return frequency > 0 and self.progress.step % frequency == 0

    def end_loop(self) -> None:
        """Stop the heartbeat and the profiler, and wait until the last checkpoint is written."""
        self.heartbeat.close()
        self.profiler.close()
        self.checkpointer.wait()
        self.tracker.log_rest(self.progress.step, self.profiler.end_step())

    def close(self) -> None:
        """Report how the run ended, and close the logs."""
        if self.only_validates:
            self.tracker.print("validated the model; nothing was trained (trainer.val_only=true)")
        elif self.is_complete:
            kind = "adapter" if self.config.model.lora.rank else "model"
            self.tracker.print(f"{kind}: {self.output_dir / 'hf'}")
        else:
            self.tracker.print(
                f"stopped by a signal after step {self.progress.step}; the same command continues "
                "from there"
            )
        self.tracker.close()
