"""Precision dumps with msprobe (package mindstudio-probe): {directory}/step_{N}/{stage}/step{N}/rank{R}/dump.json.

A dump changes no bit of a forward pass. It may change the last bits of gradients: hooks on a module's backward pass insert
nodes into autograd's graph, so the gradients of a tensor that several operations read are summed in another order. Weights
and losses after a dumped training step therefore equal those without a dump only up to rounding.
"""

import json
import os
import re
import shutil
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import torch

from profiling.tool import Tool

TASKS, LEVELS = ("statistics", "tensor"), ("L0", "L1", "mix")
# Large: one record per token that vLLM decodes, or per batch of a whole validation. So these have to be named.
ONLY_WHEN_NAMED = ("rollout_generate", "validate")


class Msprobe(Tool):
    """One msprobe session per selected stage. msprobe has one debugger per process, so sessions never nest."""

    def __init__(self, settings, directory: Path, rank: int, model_stages):
        self.options, self.directory, self.rank = settings.msprobe, directory, rank
        self.stages = select_stages(self.options.stages, model_stages)
        self.config_path = self.options.config_path and Path(self.options.config_path)
        os.environ.setdefault(
            "MSPROBE_LOG_LEVEL", "2"
        )  # warnings; otherwise it prints two lines per session
        try:
            from msprobe.core.common.const import FileCheckConst
            from msprobe.pytorch import PrecisionDebugger
        except ImportError as error:
            raise ValueError(
                "profiler.tool=msprobe needs the package mindstudio-probe: pip install mindstudio-probe "
                f"({error})"
            ) from None
        for key, path in (
            ("output_dir", directory),
            ("profiler.msprobe.config_path", self.config_path),
        ):
            if path and not re.match(FileCheckConst.FILE_VALID_PATTERN, str(path.resolve())):
                raise ValueError(
                    f"{key}: msprobe refuses the path {path.resolve()}: it may only have the letters a to z, digits "
                    "and _ . : / -"
                )
        self.make_debugger = PrecisionDebugger
        given = read_config(self.config_path) if self.config_path else {}
        self.task = self.options.task or given.get("task") or "statistics"
        self.level = self.options.level or given.get("level") or "L0"
        for key, value, choices in (("task", self.task, TASKS), ("level", self.level, LEVELS)):
            if value not in choices:
                raise ValueError(
                    f"profiler.msprobe.{key}={value} must be one of {', '.join(choices)}"
                )
        if self.config_path:
            check_config(self.config_path, self.task, self.level)
        self.debugger = self.inside = None
        self.failed, self.told, self.dumped, self.before = 0, False, [], {}
        self.never = list(self.options.stages or [])  # named, but not run yet

    def open(self, step: int) -> None:
        # Only now: once constructed, levels L1 and mix slow down every torch call of this process.
        if self.config_path is None:
            self.config_path = write_config(
                self.directory / f"msprobe_rank{self.rank}.json", self.task, self.level
            )
        self.debugger = self.make_debugger(
            config_path=str(self.config_path),
            task=self.task,
            level=self.level,
            dump_path=str(self.directory),
        )

    def stage(self, name: str, step: int, where: Path, engine, nested: bool):
        return self._session(name, step, where, engine) if name in self.stages else nullcontext()

    @contextmanager
    def _session(self, name: str, step: int, where: Path, engine):
        if self.inside:
            raise RuntimeError(
                f"msprobe cannot dump stage {name} inside stage {self.inside}: name only one of them in "
                "profiler.msprobe.stages"
            )
        if engine is None:
            raise RuntimeError(
                f"stage {name} was not given an engine, whose modules msprobe would dump"
            )
        self.inside, target, started = name, where / f"step{step}" / f"rank{self.rank}", False
        self.never = [stage for stage in self.never if stage != name]
        try:
            with self._may_fail(name, step):
                if target.exists():  # left by a killed run whose step is repeated
                    shutil.rmtree(target)
                self.debugger.service.config.dump_path = str(where)
                self.debugger.set_init_step(step)
                self.debugger.start(engine.modules(), rank_id=self.rank)
                started = True
            with torch.compiler.set_stance(
                "force_eager"
            ):  # hooks do not run inside compiled functions
                yield
        except BaseException:
            with suppress(Exception):  # the stage's own error is the one to report
                self.debugger.stop()
                self.debugger.step()
            raise
        finally:
            self.inside = None
        if started:
            with self._may_fail(name, step):
                self.debugger.stop()
                self.debugger.step()  # forgets what it wrote and counts calls from 0 again
                if not json.loads((target / "dump.json").read_text())["data"]:
                    raise RuntimeError("dump.json is empty: no module ran")
                (target / "coordinates.json").write_text(
                    json.dumps({"of": type(engine).__name__, **engine.coordinates()})
                )
                self.dumped.append((name, target))

    @contextmanager
    def _may_fail(self, name: str, step: int):
        try:
            yield
        except Exception as error:  # msprobe raises all kinds
            if self.options.strict:
                raise RuntimeError(
                    f"msprobe could not dump {name} of step {step}: {error}"
                ) from error
            if not self.failed:
                print(
                    f"rank {self.rank}: msprobe could not dump {name} of step {step}; from now on failures "
                    f"are only counted, in profiler/failed_dumps: {error!r}",
                    flush=True,
                )
            self.failed += 1

    def end_step(self, seconds: dict[str, float]) -> dict[str, float]:
        if not self.debugger:
            self.before = seconds
            return {}
        if self.dumped and not self.told:
            self.told = True
            names = dict.fromkeys(name for name, _ in self.dumped)
            size = sum(
                file.stat().st_size
                for _, target in self.dumped
                for file in target.rglob("*")
                if file.is_file()
            )
            took, usual = (sum(s.get(name, 0.0) for name in names) for s in (seconds, self.before))
            print(
                f"rank {self.rank}: msprobe dumped {', '.join(names)} with {self.task} {self.level}: {took:.3g} s in these "
                f"stages{f' ({usual:.3g} s in the step before)' if usual else ''}, {size / 1e6:.3g} MB per step and rank",
                flush=True,
            )
        self.dumped.clear()
        return {"profiler/failed_dumps": self.failed}

    def close(self) -> None:
        if self.never:
            print(
                f"rank {self.rank}: msprobe dumped nothing of {', '.join(self.never)}: not run in the interval",
                flush=True,
            )
        self.debugger, self.before = None, {}


def select_stages(wanted, model_stages) -> list[str]:
    """The stages to dump (null: all that run a model of the trainer). Raises ValueError for an unknown one."""
    if wanted is None:
        return [name for name in model_stages if name not in ONLY_WHEN_NAMED]
    for name in wanted:
        if name not in model_stages:
            why = "; it needs rollout.enforce_eager=true, because CUDA graphs call no hooks" * (
                name == "rollout_generate"
            )
            raise ValueError(
                f"profiler.msprobe.stages: {name} is not a stage of this run that runs a model; those are "
                f"{', '.join(model_stages)}{why}"
            )
    return list(wanted)


def read_config(path: Path) -> dict:
    """msprobe's config.json. Raises ValueError if it cannot be read, or selects what this configuration selects."""
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
                f"profiler.msprobe.config_path={path} selects a {key}: leave that list empty and set "
                f"{instead}"
            )
    return config


def check_config(path: Path, task: str, level: str) -> None:
    """Raises ValueError for what msprobe would refuse at the first recorded step, when the debugger is constructed, and for
    what profiling.compare cannot read."""
    from msprobe.pytorch.dump.debugger.debugger_config import DebuggerConfig
    from msprobe.pytorch.dump.pt_config import parse_json_config

    try:
        mode = DebuggerConfig(
            *parse_json_config(str(path), task), task, str(path.parent), level
        ).summary_mode
    except Exception as error:  # msprobe raises all kinds
        raise ValueError(
            f"profiler.msprobe.config_path={path} is refused by msprobe: {error}"
        ) from None
    if mode != "statistics":
        raise ValueError(
            f"profiler.msprobe.config_path={path} has summary_mode {mode}: only statistics can be compared"
        )


def write_config(path: Path, task: str, level: str) -> Path:
    """Write a config.json that dumps everything. A copy with a scope or a list of modules can be given to the next run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    both = {"scope": [], "list": [], "data_mode": ["all"]}
    path.write_text(
        json.dumps(
            {
                "task": task,
                "dump_path": str(path.parent),
                "rank": [],
                "step": [],
                "level": level,
                "async_dump": False,
                "statistics": {**both, "summary_mode": "statistics"},
                "tensor": both,
            },
            indent=2,
        )
        + "\n"
    )
    return path
