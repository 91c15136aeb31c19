"""Wall time per stage, always; traces, snapshots and dumps of each stage, in the steps and on the ranks that are selected.

    profiler.begin_step(step)                           counted from 1
    with profiler.stage("actor_update", actor):         the engine, where a model runs: msprobe dumps its modules
    metrics |= profiler.end_step()                      {timing/actor_update: seconds}
    profiler.close()                                    after the last step, however many there were

Files: {directory}/step_{N}/{stage}/; when a stage runs a second time in a step, {stage}.2/ and so on.
"""

import atexit
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from profiling.tools import build

OFF = (-1, -1)


class Profiler:
    def __init__(
        self,
        settings=None,
        interval: Sequence[int] = OFF,
        directory: Path | None = None,
        total_steps: int | None = None,
        model_stages: Sequence[str] = (),
    ):
        """Without arguments: only timers.

        settings: the group `profiler` of configs/*.yaml. interval: first and last step to record, [-1, -1] for none.
        model_stages: the stages of this run in which a model runs. Raises ValueError, in one line that says what to
        change, for what cannot be recorded. Nothing starts before the first step of the interval.
        """
        self.seconds: dict[str, float] = {}
        self.interval, self.directory, self.step = tuple(interval), directory, None
        self.synchronize = bool(
            settings and settings.synchronize and torch.accelerator.is_available()
        )
        self.tools, self.recording, self.depth, self.turns = [], False, 0, Counter()
        self.counting = False  # failed dumps, on all ranks
        self.on_stage = lambda name, step: None  # called where a stage begins
        names = (
            []
            if settings is None or settings.tool is None
            else [settings.tool]
            if isinstance(settings.tool, str)
            else list(settings.tool)
        )
        if self.interval != OFF and not names:
            raise ValueError(
                "trainer.profile_interval is set but profiler.tool is null: name a tool"
            )
        if total_steps is not None and self.interval[0] > total_steps:
            raise ValueError(
                f"trainer.profile_interval={list(self.interval)} begins after the last step, "
                f"{total_steps}"
            )
        if names:
            rank, num_ranks = (
                (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
            )
            tools = build(
                names, settings, directory, rank, model_stages
            )  # every rank checks its settings
            self.tools = (
                tools
                if self.interval != OFF and is_selected(settings.ranks, rank, num_ranks)
                else []
            )
        self.dumps = "msprobe" in names

    def begin_step(self, step: int) -> None:
        """Start recording when `step` (from 1) lies in the interval, even if a resumed run begins in its middle; stop after
        the interval. (Not in end_step(): a checkpoint may be saved after that.)"""
        self.step = step
        if step > self.interval[1]:
            self.close()
        inside = self.interval[0] <= step <= self.interval[1]
        self.counting = inside and self.dumps
        if self.tools and not self.recording and inside:
            self.recording = True
            # For a run that ends with an exception: what was recorded until then explains it.
            atexit.register(self.close)
            for tool in self.tools:
                tool.open(step)

    @contextmanager
    def stage(self, name: str, engine=None):
        """Add the wall time [s] of the block to the stage `name`, and record the block if this step is recorded. Stages may
        nest; exceptions pass through. engine: its modules() run in the block."""
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
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def _record(self, name: str, engine):
        self.turns[self.step, name] += 1
        turn = self.turns[self.step, name]
        where = self.directory / f"step_{self.step}" / (name if turn == 1 else f"{name}.{turn}")
        self.depth += 1
        try:
            with ExitStack() as stack:
                for tool in self.tools:
                    stack.enter_context(tool.stage(name, self.step, where, engine, self.depth > 1))
                yield
        finally:
            self.depth -= 1

    def end_step(self) -> dict[str, float]:
        """{timing/<stage>: seconds} since the last call, and what tools count. All ranks must call it while msprobe dumps."""
        seconds, self.seconds = self.seconds, {}
        metrics = {f"timing/{name}": value for name, value in seconds.items()}
        for tool in self.tools:
            metrics |= tool.end_step(seconds)
        if self.counting:
            metrics["profiler/failed_dumps"] = sum_over_ranks(
                metrics.get("profiler/failed_dumps", 0)
            )
        return metrics

    def close(self) -> None:
        """Write what is not yet written. May be called twice."""
        self.counting = False
        if self.recording:
            self.recording = False
            atexit.unregister(self.close)
            for tool in reversed(self.tools):
                tool.close()


def is_selected(ranks, rank: int, num_ranks: int) -> bool:
    """Whether profiler.ranks (null: local rank 0 of every node) names this rank. Raises ValueError for a rank that does not
    exist."""
    if ranks is None:
        return int(os.environ.get("LOCAL_RANK", 0)) == 0
    if ranks == "all":
        return True
    if max(ranks) >= num_ranks:
        raise ValueError(
            f"profiler.ranks={list(ranks)} names a rank that does not exist: ranks are 0 to {num_ranks - 1}"
        )
    return rank in ranks


def sum_over_ranks(count: int) -> int:
    if not dist.is_initialized():
        return count
    counts = [count] * dist.get_world_size()
    dist.all_gather_object(counts, count)
    return sum(counts)
