"""Wall time per stage, always; traces, snapshots and dumps in the selected steps and ranks.

    profiler.begin_step(step)                           counted from 1
    with profiler.stage("actor_update", actor):         the engine whose modules msprobe dumps
    metrics |= profiler.end_step()                      {timing/actor_update: seconds}
    profiler.close()                                    after the last step

Files are written to {directory}/step_{N}/{stage}/. When a stage runs again in the same step, they
go to {stage}.2/ and so on.

This package imports nothing else from the repository. tools.py, msprobe.py and
outputs.py record; compare.py, dumps.py, layouts.py and report.py read.
"""

import atexit
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from profiling.tool import Stage, Tool
from profiling.tools import build

OFF = (-1, -1)


class Profiler:
    """Times every stage, and lets tools record the stages of selected steps.

    Without arguments it only times. Nothing starts before the first step of the interval.

    Args:
        settings: the group `profiler` of configs/*.yaml.
        interval: first and last step to record; [-1, -1] for none.
        directory: for the tools' files.
        total_steps: number of steps in the run.
        model_stages: the stages of this run in which a model computes.

    Attributes:
        on_stage: called with (stage name, step) when a stage begins.

    Raises:
        ValueError: something cannot be recorded; the message tells what to change.
    """

    def __init__(
        self,
        settings=None,
        interval: Sequence[int] = OFF,
        directory: Path | None = None,
        total_steps: int | None = None,
        model_stages: Sequence[str] = (),
    ):
        self.seconds: dict[str, float] = {}
        self.interval = tuple(interval)
        self.directory = directory
        self.step: int | None = None
        self.on_stage: Callable[[str, int | None], None] = lambda name, step: None
        self.tools: list[Tool] = []
        self.recording = False
        self.synchronize = False
        self._num_open_stages = 0
        self._runs_of_stage: Counter = Counter()  # by (step, stage)
        self._counts_failed_dumps = False  # over all ranks, in this step
        names = tool_names(settings)
        self._dumps = "msprobe" in names
        check_interval(self.interval, names, total_steps)
        if settings is not None:
            self.synchronize = settings.synchronize and torch.accelerator.is_available()
        if names:
            self.tools = self._build_tools(names, settings, model_stages)

    def _build_tools(self, names: list[str], settings, model_stages: Sequence[str]) -> list[Tool]:
        """Check the tools on every rank, and return those that record on this one."""
        rank = 0
        num_ranks = 1
        if dist.is_initialized():
            rank = dist.get_rank()
            num_ranks = dist.get_world_size()
        tools = build(names, settings, self.directory, rank, model_stages)
        if self.interval == OFF or not is_selected(settings.ranks, rank, num_ranks):
            return []
        return tools

    def begin_step(self, step: int) -> None:
        """Start recording in the interval, and stop after it.

        A resumed run may begin in the middle of the interval. Recording stops here and not in
        `end_step()`, because a checkpoint may be saved after `end_step()`.

        Args:
            step: counted from 1.
        """
        self.step = step
        first, last = self.interval
        if step > last:
            self.close()
        is_inside = first <= step <= last
        self._counts_failed_dumps = is_inside and self._dumps
        if self.tools and not self.recording and is_inside:
            self.recording = True
            # If the run ends with an exception, the records up to that point help to explain it.
            atexit.register(self.close)
            for tool in self.tools:
                tool.open(step)

    @contextmanager
    def stage(self, name: str, engine=None):
        """Time the block, and record it if this step is recorded.

        If a stage runs several times in a step, the times add up. Stages may nest. Exceptions pass
        through.

        Args:
            name: the stage's name, such as actor_update.
            engine: the engine whose `modules()` compute in the block.
        """
        if self.synchronize:
            torch.accelerator.synchronize()
        self.on_stage(name, self.step)
        start = time.perf_counter()
        try:
            with self._record(name, engine) if self.recording else ExitStack():
                yield
                if self.synchronize:
                    torch.accelerator.synchronize()
        finally:
            seconds = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @contextmanager
    def _record(self, name: str, engine):
        self._runs_of_stage[self.step, name] += 1
        run = self._runs_of_stage[self.step, name]
        folder = name if run == 1 else f"{name}.{run}"
        directory = self.directory / f"step_{self.step}" / folder
        stage = Stage(name, self.step, directory, engine, is_nested=self._num_open_stages > 0)
        self._num_open_stages += 1
        try:
            with ExitStack() as stack:
                for tool in self.tools:
                    stack.enter_context(tool.stage(stage))
                yield
        finally:
            self._num_open_stages -= 1

    def end_step(self) -> dict[str, float]:
        """Return {timing/<stage>: seconds} since the last call, and the tools' metrics.

        In steps that msprobe dumps, all ranks must call it together.
        """
        seconds = self.seconds
        self.seconds = {}
        metrics = {f"timing/{name}": value for name, value in seconds.items()}
        for tool in self.tools:
            metrics |= tool.end_step(seconds)
        if self._counts_failed_dumps:
            failed_here = metrics.get("profiler/failed_dumps", 0)
            metrics["profiler/failed_dumps"] = sum_over_ranks(failed_here)
        return metrics

    def close(self) -> None:
        """Write everything that is not written yet. May be called twice."""
        self._counts_failed_dumps = False
        if self.recording:
            self.recording = False
            atexit.unregister(self.close)
            for tool in reversed(self.tools):
                tool.close()


def tool_names(settings) -> list[str]:
    """Return the names in profiler.tool, which is null, a name, or a list of names."""
    if settings is None or settings.tool is None:
        return []
    if isinstance(settings.tool, str):
        return [settings.tool]
    return list(settings.tool)


def check_interval(interval: tuple[int, int], names: list[str], total_steps: int | None) -> None:
    """Raise ValueError if the interval has no tool, or begins after the last step."""
    if interval != OFF and not names:
        raise ValueError("trainer.profile_interval is set but profiler.tool is null: name a tool")
    if total_steps is not None and interval[0] > total_steps:
        raise ValueError(
            f"trainer.profile_interval={list(interval)} begins after the last step, {total_steps}"
        )


def is_selected(ranks, rank: int, num_ranks: int) -> bool:
    """Return whether profiler.ranks names this rank; null means local rank 0 of every node.

    Raises:
        ValueError: profiler.ranks names a rank that does not exist.
    """
    if ranks is None:
        return int(os.environ.get("LOCAL_RANK", 0)) == 0
    if ranks == "all":
        return True
    if max(ranks) >= num_ranks:
        raise ValueError(
            f"profiler.ranks={list(ranks)} names a rank that does not exist: ranks are 0 to "
            f"{num_ranks - 1}"
        )
    return rank in ranks


def sum_over_ranks(count: int) -> int:
    if not dist.is_initialized():
        return count
    counts = [count] * dist.get_world_size()
    dist.all_gather_object(counts, count)
    return sum(counts)
