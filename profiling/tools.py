"""The tools that record a stage: torch (traces), nvtx and mstx (ranges), memory (snapshots). msprobe has its own file.

To add one, write a class with the five methods of Tool and enter it in build().
"""

import importlib.util
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from profiling.msprobe import Msprobe
from profiling.tool import Tool

# Of ranges in a timeline; other stages are grey.
COLOURS = {
    "data": "orange",
    "rollout_generate": "green",
    "reward": "yellow",
    "actor_compute_log_prob": "cyan",
    "ref_compute_log_prob": "blue",
    "compute_values": "purple",
    "advantages": "orange",
    "train_batch": "red",
    "critic_update": "pink",
    "actor_update": "red",
    "update_weights": "brown",
    "validate": "lime",
    "save": "black",
}


def build(names: list[str], settings, directory: Path, rank: int, model_stages) -> list:
    """The tools called `names`. Raises ValueError for one that cannot work here, or not together with another."""
    kinds = {"nvtx": Nvtx, "mstx": Mstx, "torch": Torch, "memory": Memory, "msprobe": Msprobe}
    for name in names:
        if name not in kinds:
            raise ValueError(f"profiler.tool={name} must be one of {', '.join(kinds)}")
    if {"torch", "nvtx"} <= set(names) and list(settings.torch.activities or []) != ["cpu"]:
        raise ValueError(
            "profiler.tool: torch and nvtx cannot share CUPTI: name one of them, or set "
            "profiler.torch.activities=[cpu]"
        )
    # In this order: ranges enclose traces, traces enclose dumps.
    return [
        kind(settings, directory, rank, model_stages)
        for name, kind in kinds.items()
        if name in names
    ]


def device_type() -> str:
    return (
        torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    )


class Torch(Tool):
    """torch.profiler: a Chrome trace (chrome://tracing, ui.perfetto.dev) of each stage, or one of the interval."""

    def __init__(self, settings, directory: Path, rank: int, model_stages: Sequence[str]):
        self.options, self.directory, self.rank = settings.torch, directory, rank
        self.each_stage, self.profile = settings.torch.trace == "stage", None
        present = ["cpu", device_type()] if device_type() != "cpu" else ["cpu"]
        self.activities = list(settings.torch.activities or present)
        for name in self.activities:
            if name not in present:
                raise ValueError(
                    f"profiler.torch.activities: {name} is not on this machine, which has {', '.join(present)}"
                )

    def open(self, step: int) -> None:
        self.first = self.last = step
        if not self.each_stage:
            self._start()

    def _start(self) -> None:
        api, names = torch.profiler, {"cpu": "CPU", "cuda": "CUDA", "npu": "NPU"}
        if "npu" in self.activities:
            import torch_npu

            api = torch_npu.profiler
        self.profile = api.profile(
            activities=[getattr(api.ProfilerActivity, names[a]) for a in self.activities],
            record_shapes=self.options.record_shapes,
            with_stack=self.options.with_stack,
            profile_memory=self.options.profile_memory,
        )
        self.profile.start()

    def _write(self, path: Path) -> None:
        profile, self.profile = self.profile, None
        profile.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path))

    @contextmanager
    def stage(self, name: str, step: int, where: Path, engine, nested: bool):
        self.last, outermost = step, self.each_stage and not nested
        if outermost:
            self._start()
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            if outermost:
                self._write(where / f"torch_step{step}_rank{self.rank}.json")

    def close(self) -> None:
        if self.profile is not None:
            steps = f"{self.first}-{self.last}"
            self._write(
                self.directory
                / f"step_{self.first}"
                / "interval"
                / f"torch_step{steps}_rank{self.rank}.json"
            )


class Nvtx(Tool):
    """Ranges for Nsight Systems: nsys profile --capture-range=cudaProfilerApi ..."""

    def __init__(self, settings, directory: Path, rank: int, model_stages: Sequence[str]):
        if device_type() != "cuda":
            raise ValueError("profiler.tool=nvtx needs CUDA: on a CPU use torch, on Ascend mstx")
        if importlib.util.find_spec("nvtx") is None:
            raise ValueError("profiler.tool=nvtx needs the package nvtx: pip install nvtx")

    def open(self, step: int) -> None:
        torch.cuda.profiler.start()

    def stage(self, name: str, step: int, where: Path, engine, nested: bool):
        import nvtx

        return nvtx.annotate(name, color=COLOURS.get(name, "grey"))

    def close(self) -> None:
        torch.cuda.synchronize()  # queued kernels belong to the capture
        torch.cuda.profiler.stop()


class Mstx(Tool):
    """Ranges for Ascend's msprof (msprof --mstx=on ...). Written from the documentation of torch_npu, not run."""

    def __init__(self, settings, directory: Path, rank: int, model_stages: Sequence[str]):
        if device_type() != "npu":
            raise ValueError(
                "profiler.tool=mstx needs an Ascend NPU: on CUDA use nvtx, on a CPU torch"
            )

    @contextmanager
    def stage(self, name: str, step: int, where: Path, engine, nested: bool):
        import torch_npu

        number = torch_npu.npu.mstx.range_start(name)
        try:
            yield
        finally:
            torch_npu.npu.mstx.range_end(number)


class Memory(Tool):
    """A snapshot of the accelerator's memory and its last allocations after each stage (pytorch.org/memory_viz), also after
    a stage that ran out of memory, which the file name then says."""

    def __init__(self, settings, directory: Path, rank: int, model_stages: Sequence[str]):
        self.rank, self.max_entries = rank, settings.memory.max_entries
        if device_type() == "cpu":
            raise ValueError(
                "profiler.tool=memory needs an accelerator: on a CPU use torch with "
                "profiler.torch.profile_memory=true"
            )

    def open(self, step: int) -> None:
        self.memory = torch.get_device_module().memory
        self.memory._record_memory_history(max_entries=self.max_entries)

    @contextmanager
    def stage(self, name: str, step: int, where: Path, engine, nested: bool):
        file = f"memory_step{step}_rank{self.rank}.pickle"
        try:
            yield
        except torch.OutOfMemoryError:
            file = f"out_of_{file}"
            raise
        finally:
            if not nested:
                where.mkdir(parents=True, exist_ok=True)
                self.memory._dump_snapshot(str(where / file))

    def close(self) -> None:
        self.memory._record_memory_history(enabled=None)
