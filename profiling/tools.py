"""Tools that record a stage: torch (traces), nvtx and mstx (ranges), memory (snapshots).

msprobe has its own file. To add a tool, write a class with the five methods of Tool and add
it to `build()`.
"""

import importlib.util
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from profiling.msprobe import Msprobe
from profiling.tool import Stage, Tool

# Colours of ranges in a timeline; other stages are grey.
COLOURS = {
    "data": "orange",
    "rollout_generate": "green",
    "reward": "yellow",
    "actor_compute_log_prob": "cyan",
    "ref_compute_log_prob": "blue",
    "teacher_compute": "blue",
    "compute_values": "purple",
    "advantages": "orange",
    "train_batch": "red",
    "critic_update": "pink",
    "actor_update": "red",
    "update_weights": "brown",
    "validate": "lime",
    "save": "black",
}


def build(
    names: list[str], settings, directory: Path, rank: int, model_stages: Sequence[str]
) -> list[Tool]:
    """Return the tools with these names.

    Raises:
        ValueError: a tool does not exist, cannot work on this machine, or cannot be combined with
            another tool.
    """
    kinds = {"nvtx": Nvtx, "mstx": Mstx, "torch": Torch, "memory": Memory, "msprobe": Msprobe}
    for name in names:
        if name not in kinds:
            raise ValueError(f"profiler.tool={name} must be one of {', '.join(kinds)}")
    traces_cpu_only = list(settings.torch.activities or []) == ["cpu"]
    if {"torch", "nvtx"} <= set(names) and not traces_cpu_only:
        raise ValueError(
            "profiler.tool: torch and nvtx cannot share CUPTI: name one of them, or set "
            "profiler.torch.activities=[cpu]"
        )
    # The order of `kinds` makes ranges enclose traces, and traces enclose dumps.
    selected = [kind for name, kind in kinds.items() if name in names]
    return [kind(settings, directory, rank, model_stages) for kind in selected]


def device_type() -> str:
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator().type
    return "cpu"


class Torch(Tool):
    """torch.profiler: a Chrome trace of each stage, or one of the whole interval.

    Open traces in chrome://tracing or ui.perfetto.dev.
    """

    def __init__(self, settings, directory: Path, rank: int, model_stages: Sequence[str]):
        self.options = settings.torch
        self.directory = directory
        self.rank = rank
        self.traces_each_stage = settings.torch.trace == "stage"
        self.profile = None
        available = ["cpu"] if device_type() == "cpu" else ["cpu", device_type()]
        self.activities = list(settings.torch.activities or available)
        for name in self.activities:
            if name not in available:
                raise ValueError(
                    f"profiler.torch.activities: {name} is not available on this machine, which "
                    f"has {', '.join(available)}"
                )

    def open(self, step: int) -> None:
        self.first_step = step
        self.last_step = step
        if not self.traces_each_stage:
            self._start()

    def _start(self) -> None:
        api = torch.profiler
        if "npu" in self.activities:
            import torch_npu

            api = torch_npu.profiler
        names = {"cpu": "CPU", "cuda": "CUDA", "npu": "NPU"}
        self.profile = api.profile(
            activities=[getattr(api.ProfilerActivity, names[a]) for a in self.activities],
            record_shapes=self.options.record_shapes,
            with_stack=self.options.with_stack,
            profile_memory=self.options.profile_memory,
        )
        self.profile.start()

    def _write(self, path: Path) -> None:
        profile = self.profile
        self.profile = None
        profile.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path))

    @contextmanager
    def stage(self, stage: Stage):
        self.last_step = stage.step
        has_own_trace = self.traces_each_stage and not stage.is_nested
        if has_own_trace:
            self._start()
        try:
            with torch.profiler.record_function(stage.name):
                yield
        finally:
            if has_own_trace:
                self._write(stage.directory / f"torch_step{stage.step}_rank{self.rank}.json")

    def close(self) -> None:
        if self.profile is not None:
            folder = self.directory / f"step_{self.first_step}" / "interval"
            steps = f"{self.first_step}-{self.last_step}"
            self._write(folder / f"torch_step{steps}_rank{self.rank}.json")


class Nvtx(Tool):
    """Ranges for Nsight Systems: nsys profile --capture-range=cudaProfilerApi ..."""

    def __init__(self, settings, directory: Path, rank: int, model_stages: Sequence[str]):
        if device_type() != "cuda":
            raise ValueError("profiler.tool=nvtx needs CUDA: on a CPU use torch, on Ascend mstx")
        if importlib.util.find_spec("nvtx") is None:
            raise ValueError("profiler.tool=nvtx needs the package nvtx: pip install nvtx")

    def open(self, step: int) -> None:
        torch.cuda.profiler.start()

    def stage(self, stage: Stage):
        import nvtx

        return nvtx.annotate(stage.name, color=COLOURS.get(stage.name, "grey"))

    def close(self) -> None:
        torch.cuda.synchronize()  # queued kernels belong to the capture
        torch.cuda.profiler.stop()


class Mstx(Tool):
    """Ranges for Ascend's msprof (msprof --mstx=on ...).

    It follows the documentation of torch_npu, but has not been tested on an NPU.
    """

    def __init__(self, settings, directory: Path, rank: int, model_stages: Sequence[str]):
        if device_type() != "npu":
            raise ValueError(
                "profiler.tool=mstx needs an Ascend NPU: on CUDA use nvtx, on a CPU torch"
            )

    @contextmanager
    def stage(self, stage: Stage):
        import torch_npu

        number = torch_npu.npu.mstx.range_start(stage.name)
        try:
            yield
        finally:
            torch_npu.npu.mstx.range_end(number)


class Memory(Tool):
    """A snapshot of the accelerator's memory, with the latest allocations, after each stage.

    A stage that runs out of memory leaves a snapshot too, named out_of_memory_*. View snapshots at
    pytorch.org/memory_viz.
    """

    def __init__(self, settings, directory: Path, rank: int, model_stages: Sequence[str]):
        self.rank = rank
        self.max_entries = settings.memory.max_entries
        if device_type() == "cpu":
            raise ValueError(
                "profiler.tool=memory needs an accelerator: on a CPU use torch with "
                "profiler.torch.profile_memory=true"
            )

    def open(self, step: int) -> None:
        self.memory = torch.get_device_module().memory
        self.memory._record_memory_history(max_entries=self.max_entries)

    @contextmanager
    def stage(self, stage: Stage):
        file = f"memory_step{stage.step}_rank{self.rank}.pickle"
        try:
            yield
        except torch.OutOfMemoryError:
            file = f"out_of_{file}"
            raise
        finally:
            if not stage.is_nested:
                stage.directory.mkdir(parents=True, exist_ok=True)
                self.memory._dump_snapshot(str(stage.directory / file))

    def close(self) -> None:
        self.memory._record_memory_history(enabled=None)
