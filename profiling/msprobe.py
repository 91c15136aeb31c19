"""Precision dumps with msprobe (package mindstudio-probe).

Files: {directory}/step_{N}/{stage}/step{N}/rank{R}/dump.json.

A dump does not change a single bit of a forward pass. It may change the last bits of gradients:
hooks on a module's backward pass insert nodes into autograd's graph. If several operations read a
tensor, its gradients are then added in another order. Weights and losses after a dumped training
step therefore match a run without dumps only up to rounding.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from profiling.outputs import FILE, OutputRecorder
from profiling.tool import Stage, Tool

TASKS = ("statistics", "tensor")
LEVELS = ("L0", "L1", "mix")
# These dumps are large: they have a record per decoded token, or per batch of a whole validation.
ONLY_WHEN_NAMED = ("rollout_generate", "validate")


@dataclass(frozen=True)
class Dump:
    """A finished dump: the name of the stage, and the folder of this rank."""

    stage: str
    directory: Path


class Msprobe(Tool):
    """One msprobe session per selected stage. A process has one debugger: sessions never nest."""

    def __init__(self, settings, directory: Path, rank: int, model_stages: Sequence[str]):
        self.options = settings.msprobe
        self.directory = directory
        self.rank = rank
        self.stages = select_stages(self.options.stages, model_stages)
        path = self.options.config_path
        self.config_path = Path(path) if path else None
        self.debugger_class = import_debugger()
        check_path("output_dir", directory)
        config = {}
        if self.config_path is not None:
            check_path("profiler.msprobe.config_path", self.config_path)
            config = read_config(self.config_path)
        self.task = self.options.task or config.get("task") or "statistics"
        self.level = self.options.level or config.get("level") or "L0"
        check_choice("task", self.task, TASKS)
        check_choice("level", self.level, LEVELS)
        if self.config_path is not None:
            check_config(self.config_path, self.task, self.level)
        self.debugger = None
        self.current_stage: str | None = None
        self.num_failed = 0
        self.has_reported_cost = False
        self.dumps: list[Dump] = []  # of this step
        self.seconds_before: dict[str, float] = {}  # of the last step without a dump
        self.never_run = list(self.options.stages or [])

    def open(self, step: int) -> None:
        if self.config_path is None:
            path = self.directory / f"msprobe_rank{self.rank}.json"
            self.config_path = write_config(path, self.task, self.level)
        # Not constructed earlier: at levels L1 and mix, a debugger slows down every torch call.
        self.debugger = self.debugger_class(
            config_path=str(self.config_path),
            task=self.task,
            level=self.level,
            dump_path=str(self.directory),
        )

    def stage(self, stage: Stage):
        if stage.name not in self.stages:
            return nullcontext()
        return self._session(stage)

    @contextmanager
    def _session(self, stage: Stage):
        if self.current_stage is not None:
            raise RuntimeError(
                f"msprobe cannot dump stage {stage.name} inside stage {self.current_stage}: name "
                "only one of them in profiler.msprobe.stages"
            )
        if stage.engine is None:
            raise RuntimeError(f"stage {stage.name} has no engine whose modules msprobe could dump")
        self.current_stage = stage.name
        self.never_run = [name for name in self.never_run if name != stage.name]
        dump = Dump(stage.name, stage.directory / f"step{stage.step}" / f"rank{self.rank}")
        recorder = OutputRecorder(stage.engine)
        has_started = False
        try:
            with self._counting_failures(stage):
                self._start(stage, dump.directory)
                recorder.start()
                has_started = True
            # Hooks do not run inside compiled functions.
            with torch.compiler.set_stance("force_eager"):
                yield
        except BaseException:
            with suppress(Exception):  # the stage's own error is the one to report
                self.debugger.stop()
                self.debugger.step()
            raise
        finally:
            recorder.stop()
            self.current_stage = None
        if has_started:
            with self._counting_failures(stage):
                self._finish(stage, dump)
                recorder.write(dump.directory / FILE)

    def _start(self, stage: Stage, target: Path) -> None:
        if target.exists():  # left by a killed run whose step is repeated
            shutil.rmtree(target)
        self.debugger.service.config.dump_path = str(stage.directory)
        self.debugger.set_init_step(stage.step)
        self.debugger.start(stage.engine.modules(), rank_id=self.rank)

    def _finish(self, stage: Stage, dump: Dump) -> None:
        self.debugger.stop()
        self.debugger.step()  # clears its records and counts calls from 0 again
        written = json.loads((dump.directory / "dump.json").read_text())
        if not written["data"]:
            raise RuntimeError("dump.json is empty: no module ran")
        coordinates = {"of": type(stage.engine).__name__, **stage.engine.coordinates()}
        (dump.directory / "coordinates.json").write_text(json.dumps(coordinates))
        self.dumps.append(dump)

    @contextmanager
    def _counting_failures(self, stage: Stage):
        try:
            yield
        except Exception as error:  # msprobe may raise any error
            if self.options.strict:
                raise RuntimeError(
                    f"msprobe could not dump {stage.name} of step {stage.step}: {error}"
                ) from error
            if self.num_failed == 0:
                print(
                    f"rank {self.rank}: msprobe could not dump {stage.name} of step {stage.step}; "
                    f"further failures are only counted, in profiler/failed_dumps: {error!r}",
                    flush=True,
                )
            self.num_failed += 1

    def end_step(self, seconds: dict[str, float]) -> dict[str, float]:
        if not self.debugger:
            self.seconds_before = seconds
            return {}
        if self.dumps and not self.has_reported_cost:
            self.has_reported_cost = True
            self._report_cost(seconds)
        self.dumps.clear()
        return {"profiler/failed_dumps": self.num_failed}

    def _report_cost(self, seconds: dict[str, float]) -> None:
        """Print the time and the disk space that the first dumped step took."""
        names = list(dict.fromkeys(dump.stage for dump in self.dumps))
        num_bytes = sum(directory_size(dump.directory) for dump in self.dumps)
        seconds_now = sum(seconds.get(name, 0.0) for name in names)
        seconds_before = sum(self.seconds_before.get(name, 0.0) for name in names)
        comparison = f" ({seconds_before:.3g} s in the step before)" if seconds_before else ""
        print(
            f"rank {self.rank}: msprobe dumped {', '.join(names)} with {self.task} {self.level}: "
            f"{seconds_now:.3g} s in these stages{comparison}, {num_bytes / 1e6:.3g} MB per step "
            "and rank",
            flush=True,
        )

    def close(self) -> None:
        if self.never_run:
            print(
                f"rank {self.rank}: msprobe dumped nothing of {', '.join(self.never_run)}, which "
                "did not run in the interval",
                flush=True,
            )
        self.debugger = None
        self.seconds_before = {}


def directory_size(directory: Path) -> int:
    """Return the bytes of all files in a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def import_debugger() -> type:
    """Return msprobe's PrecisionDebugger; raises ValueError if msprobe is not installed."""
    # Level 2 shows only warnings. By default, msprobe prints two lines per session.
    os.environ.setdefault("MSPROBE_LOG_LEVEL", "2")
    try:
        from msprobe.pytorch import PrecisionDebugger
    except ImportError as error:
        raise ValueError(
            "profiler.tool=msprobe needs the package mindstudio-probe: pip install "
            f"mindstudio-probe ({error})"
        ) from None
    return PrecisionDebugger


def check_path(key: str, path: Path | None) -> None:
    """Raise ValueError for a path that msprobe would not accept."""
    from msprobe.core.common.const import FileCheckConst

    if path is not None and not re.match(FileCheckConst.FILE_VALID_PATTERN, str(path.resolve())):
        raise ValueError(
            f"{key}: msprobe does not accept the path {path.resolve()}: it may "
            "contain only letters a to z, digits and _ . : / -"
        )


def check_choice(key: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"profiler.msprobe.{key}={value} must be one of {', '.join(choices)}")


def select_stages(requested: Iterable[str] | None, model_stages: Sequence[str]) -> list[str]:
    """Return the stages to dump.

    Args:
        requested: None for all of `model_stages` except ONLY_WHEN_NAMED.
        model_stages: the stages of this run in which a model computes.

    Raises:
        ValueError: a requested stage is not in `model_stages`.
    """
    if requested is None:
        return [name for name in model_stages if name not in ONLY_WHEN_NAMED]
    for name in requested:
        if name not in model_stages:
            hint = ""
            if name == "rollout_generate":
                hint = "; it needs rollout.enforce_eager=true, because CUDA graphs call no hooks"
            raise ValueError(
                f"profiler.msprobe.stages: {name} is not a stage of this run in which a model "
                f"computes; these are {', '.join(model_stages)}{hint}"
            )
    return list(requested)


def read_config(path: Path) -> dict:
    """Read msprobe's config.json.

    Raises:
        ValueError: the file cannot be read, or it selects steps or ranks, which other keys do.
    """
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"profiler.msprobe.config_path={path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"profiler.msprobe.config_path={path} is not JSON: {error}") from None
    if not isinstance(config, dict) or path.suffix != ".json":
        raise ValueError(
            f"profiler.msprobe.config_path={path} must be a .json file that holds an object"
        )
    for key, instead in (("step", "trainer.profile_interval"), ("rank", "profiler.ranks")):
        if config.get(key):
            raise ValueError(
                f"profiler.msprobe.config_path={path} selects a {key}: leave that list empty and "
                f"set {instead}"
            )
    return config


def check_config(path: Path, task: str, level: str) -> None:
    """Check that msprobe accepts a config.json, and that profiling.compare can read its dumps.

    msprobe itself would complain at the first recorded step, when the debugger is constructed.

    Raises:
        ValueError: msprobe rejects the file, or its dumps could not be compared.
    """
    from msprobe.pytorch.dump.debugger.debugger_config import DebuggerConfig
    from msprobe.pytorch.dump.pt_config import parse_json_config

    try:
        parsed = parse_json_config(str(path), task)
        mode = DebuggerConfig(*parsed, task, str(path.parent), level).summary_mode
    except Exception as error:  # msprobe may raise any error
        raise ValueError(
            f"profiler.msprobe.config_path={path} is rejected by msprobe: {error}"
        ) from None
    if mode != "statistics":
        raise ValueError(
            f"profiler.msprobe.config_path={path} has summary_mode {mode}: only statistics can be "
            "compared"
        )


def write_config(path: Path, task: str, level: str) -> Path:
    """Write a config.json that dumps everything.

    The next run can use an edited copy, for example with a scope or a list of modules.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    everything = {"scope": [], "list": [], "data_mode": ["all"]}
    config = {
        "task": task,
        "dump_path": str(path.parent),
        "rank": [],
        "step": [],
        "level": level,
        "async_dump": False,
        "statistics": {**everything, "summary_mode": "statistics"},
        "tensor": everything,
    }
    path.write_text(json.dumps(config, indent=2) + "\n")
    return path
