"""The loops of fine-tuning, with an engine that computes nothing, and what all of them do."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from config import InputError
from data.batching.batch import Batch, make_cu_seqlens
from data.batching.order import global_batch
from job.run import Run
from profiling import Profiler
from tests.job.test_run import STEPS_PER_EPOCH, make_run

NUM_RANKS = 4
NUM_ROWS = 6
NUM_VAL_ROWS = 3
ROWS_PER_STEP = 2
FLOPS_PER_TOKEN = 1000
PEAK = 100.0  # FLOPs per second of one device
SECONDS_PER_LOOK = 2.0  # by which the clock advances whenever it is read


class Dataset:
    """Rows of two sequences: of 2 and 3 tokens, of 3 and 4 tokens, and so on."""

    def __init__(self, num_rows: int = NUM_ROWS):
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def batch(self, rows) -> Batch:
        lengths = torch.tensor([2 + row + number for row in rows for number in (0, 1)])
        ids = torch.zeros(int(lengths.sum()), dtype=torch.int64)
        cu_seqlens = make_cu_seqlens(lengths)
        mask = torch.ones(len(ids))
        mask[cu_seqlens[:-1]] = 0
        return Batch(ids, cu_seqlens, {"loss_mask": mask})


class Trainer:
    """An engine, and what trains with it.

    skips: the step, from 0 -> whether its gradient is not finite
    validated: the rows and the batch size of each validation
    """

    def __init__(self):
        self.engine = self
        self.skips = lambda step: step == 0
        self.validated = []

    def train_batch(self, batch, step):
        return {"loss": 1.0, "skipped": float(self.skips(step))}

    def validate(self, val, batch_size):
        self.validated.append((val, batch_size))
        return {"val/loss": 2.0}

    def flops(self, lengths, num_predicted):
        return float(FLOPS_PER_TOKEN * sum(lengths) + num_predicted)


class RecordingProfiler(Profiler):
    """Records the engine that computes in each stage."""

    def __init__(self):
        super().__init__()
        self.engines = []

    def stage(self, name: str, engine=None) -> AbstractContextManager:
        self.engines.append((name, engine))
        return super().stage(name, engine)


def rows_of_step(step: int):
    return global_batch(NUM_ROWS, ROWS_PER_STEP, 0, step)


@dataclass
class Loop:
    """A run of three steps of a script's loop.

    lines: the metrics of each step
    saved: what Checkpointer.save() received
    written: the numbers of the steps that are logged or saved, in this order
    """

    script: ModuleType
    run: Run
    trainer: Trainer
    lines: list[dict] = field(default_factory=list)
    saved: list[tuple] = field(default_factory=list)
    written: list[tuple[str, int]] = field(default_factory=list)

    def log(self, step: int, line: dict) -> None:
        self.lines.append({"step": step, **line})
        self.written.append(("log", step))

    def save(self, *values) -> None:
        self.saved.append(values)
        self.written.append(("save", values[0]))

    def train(self) -> None:
        self.script.train(self.run, self.trainer)


def make_loop(
    script: ModuleType,
    defaults: str,
    progress,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Loop:
    """Return a loop before its first step. It saves after the second one.

    Args:
        defaults: the script's file in configs/.
        progress: its empty progress.
    """
    batch_size = f"data.train_batch_size={ROWS_PER_STEP}"
    run = make_run(directory, batch_size, total_steps=3, script=defaults)
    run.world_size = NUM_RANKS
    run.train = Dataset()
    run.val = None
    run.order = SimpleNamespace(rows_of_batch=rows_of_step)
    run.progress = progress
    run.agreement.save_freq = 2
    run.agreement.begin(total_steps=10)
    run.tokenizer = "tokenizer"
    run.profiler = RecordingProfiler()
    run.profiler.on_stage = run.heartbeat.enter
    loop = Loop(script, run, Trainer())
    run.tracker = SimpleNamespace(log=loop.log)
    run.checkpointer = SimpleNamespace(save=loop.save)
    clock = iter(range(1000))
    now = SimpleNamespace(perf_counter=lambda: SECONDS_PER_LOOK * next(clock))
    monkeypatch.setattr(script, "time", now)
    monkeypatch.setattr("engines.parallel.device.peak_flops", lambda device: PEAK)
    # train_rm.py calls the trainer's own validate().
    monkeypatch.setattr("preferences.validation.validate", Trainer.validate)
    return loop


def configure(loop: Loop, **settings) -> None:
    """Change settings in `trainer`."""
    loop.run.config = OmegaConf.merge(loop.run.config, {"trainer": settings})


def check_metrics(loop: Loop, num_predicted_of) -> None:
    """Check that the metrics of each step are those of the whole batch.

    Args:
        num_predicted_of: the number of tokens of a batch -> how many of them the head computes.
    """
    loop.train()
    assert [line["step"] for line in loop.lines] == [1, 2, 3]
    for step, line in enumerate(loop.lines, 1):
        num_tokens = len(Dataset().batch(rows_of_step(step - 1)).input_ids)
        flops = FLOPS_PER_TOKEN * num_tokens + num_predicted_of(num_tokens)
        assert line["train/loss"] == 1
        assert line["train/skipped"] == 1, "one so far"
        assert line["train/epoch"] == step / STEPS_PER_EPOCH
        assert line["perf/tokens_per_second"] == num_tokens / SECONDS_PER_LOOK / NUM_RANKS
        assert line["perf/mfu"] == pytest.approx(flops / SECONDS_PER_LOOK / NUM_RANKS / PEAK)
        assert line["timing/step"] == 2 * SECONDS_PER_LOOK
        assert {"timing/data", "perf/memory_peak_gib"} < line.keys()


def check_stages(loop: Loop, stages: list[str]) -> None:
    """Check the stages that the heartbeat hears of, and the checkpoint that the second step saves.

    Args:
        stages: those of each step, except for "save".
    """
    loop.train()
    expected = [(stage, step) for step in (1, 2, 3) for stage in stages]
    expected.insert(2 * len(stages), ("save", 2))
    assert loop.run.heartbeat.entered == expected
    ((step, engine, progress, tokenizer),) = loop.saved
    assert (step, engine, tokenizer) == (2, loop.trainer.engine, "tokenizer")
    assert progress["step"] == 2
    assert progress["skipped"] == 1


def check_each_stage_has_its_engine(loop: Loop, stages: dict[str, bool]) -> None:
    """Check the engine that each stage passes to the profiler, for tools that hook its modules.

    Args:
        stages: a stage -> whether the engine computes in it.
    """
    loop.run.val = Dataset(NUM_VAL_ROWS)
    loop.train()
    engines = {
        name: loop.trainer.engine if has_engine else None for name, has_engine in stages.items()
    }
    assert set(loop.run.profiler.engines) == set(engines.items())


def check_validations(loop: Loop) -> None:
    """Check that a run validates before it trains, every second step, and after the last one."""
    loop.run.val = Dataset(NUM_VAL_ROWS)
    configure(loop, test_freq=2)
    loop.train()
    assert [line["step"] for line in loop.lines] == [0, 1, 2, 3]
    assert loop.trainer.validated == [(loop.run.val, ROWS_PER_STEP)] * 3
    for line in loop.lines:
        is_validated = line["step"] != 1
        assert ("val/loss" in line) == is_validated
        assert ("timing/validate" in line) == is_validated
    assert loop.lines[0].keys() == {"step", "val/loss", "timing/validate"}


def check_a_new_run_need_not_validate_before_training(loop: Loop) -> None:
    configure(loop, val_before_train=False)
    check_only_the_end_is_validated(loop)


def check_a_resumed_run_does_not_validate_before_training(loop: Loop) -> None:
    loop.run.progress.step = 1
    check_only_the_end_is_validated(loop)


def check_only_the_end_is_validated(loop: Loop) -> None:
    loop.run.val = Dataset(NUM_VAL_ROWS)
    first_step = loop.run.progress.step + 1
    loop.train()
    assert [line["step"] for line in loop.lines] == [*range(first_step, 4)]
    assert len(loop.trainer.validated) == 1, "after the last step"


def check_a_step_is_logged_before_it_is_saved(loop: Loop) -> None:
    """Check that a run that is killed after a checkpoint has the metrics of its steps."""
    loop.train()
    assert loop.written == [("log", 1), ("log", 2), ("save", 2), ("log", 3)]


def check_a_signal_ends_the_loop_with_a_checkpoint(loop: Loop) -> None:
    """Check that a run that receives a signal in its first step saves, and does not validate."""
    loop.run.val = Dataset(NUM_VAL_ROWS)
    configure(loop, val_before_train=False, test_freq=1)
    loop.run.agreement.received_at = 0.0
    loop.train()
    assert loop.written == [("log", 1), ("save", 1)]
    assert not loop.trainer.validated


def check_skipped_steps_end_the_run(loop: Loop) -> None:
    """Check that a loop whose first update is skipped ends if none may be."""
    configure(loop, max_skipped_steps=0)
    with pytest.raises(InputError, match="not finite in 1 of 1 updates"):
        loop.train()
    assert not loop.lines


def check_a_run_that_skips_all_steps_is_an_error(loop: Loop) -> None:
    """Check that a run that has learned nothing does not end as if it had."""
    configure(loop, max_skipped_steps=10)
    loop.trainer.skips = lambda step: True
    with pytest.raises(InputError, match="not finite in 3 of 3 updates"):
        loop.train()


# The checks that are the same for all loops. A test of each loop calls them one by one.
CHECKS = (
    check_validations,
    check_a_new_run_need_not_validate_before_training,
    check_a_resumed_run_does_not_validate_before_training,
    check_a_step_is_logged_before_it_is_saved,
    check_a_signal_ends_the_loop_with_a_checkpoint,
    check_skipped_steps_end_the_run,
    check_a_run_that_skips_all_steps_is_an_error,
)
