"""Run a script's main() on one rank, in a fork of the test's process, which starts nothing."""

import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest
from omegaconf import DictConfig

from config import InputError, load
from engines.checkpoint import export
from engines.checkpoint.checkpointer import Checkpointer
from engines.model.model_files import fingerprint
from engines.parallel import device
from engines.schedule import learning_rate
from job.run import Run

SECONDS = 300  # for a run of one step, on a busy machine
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_in_fork(
    main: Callable[[DictConfig], None], defaults: str, arguments: list[str], log: Path
) -> str:
    """Run a script to its end, and return what it prints.

    Args:
        main: the script's main().
        defaults: its file in configs/.
        arguments: key=value pairs.
        log: the file that its output is written to.
    """
    context = multiprocessing.get_context("fork")
    process = context.Process(target=run_here, args=(main, defaults, arguments, log))
    process.start()
    process.join(SECONDS)
    printed = log.read_text()
    assert process.exitcode == 0, f"exit code {process.exitcode}: {printed}"
    return printed


def run_here(
    main: Callable[[DictConfig], None], defaults: str, arguments: list[str], log: Path
) -> None:
    gc.freeze()  # what earlier tests left may not be destroyed in a fork
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    # pytest has its own in place of these.
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", closefd=False)
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    main(load(defaults, arguments))
    sys.stdout.flush()


def print_roles(script: ModuleType) -> None:
    """Let a script's set_up() print the roles whose memory it estimates. For a fork of the test."""
    set_up = script.set_up

    def set_up_and_print(*arguments):
        run = set_up(*arguments)
        print("memory of", *run.memory_plan.roles)
        return run

    script.set_up = set_up_and_print


def print_base_names() -> None:
    """Let exports print the name of the model that they are based on. For a fork of the test."""
    export_hf = export.export_hf

    def export_and_print(engine, tokenizer, directory, base_name=None):
        print("an export is based on", base_name)
        export_hf(engine, tokenizer, directory, base_name)

    export.export_hf = export_and_print


def set_up_in_fork(
    set_up: Callable[[DictConfig], Run], defaults: str, arguments: list[str], log: Path
) -> dict:
    """Set a run up in a fork of the test, and return what it has made; or {"error": a mistake}.

    What it prints is in "log".

    Args:
        set_up: calls the script's set_up().
        defaults, arguments, log: as in run_in_fork().
    """
    result = log.with_suffix(".json")

    def write_result(config: DictConfig) -> None:
        try:
            made = describe_set_up(set_up, config)
        except InputError as error:
            made = {"error": str(error)}
        result.write_text(json.dumps(made))
        device.shutdown()

    printed = run_in_fork(write_result, defaults, [*arguments, "dry_run=true"], log)
    return {"log": printed, **json.loads(result.read_text())}


def describe_set_up(set_up: Callable[[DictConfig], Run], config: DictConfig) -> dict:
    start_profiler = Run.start_profiler
    find = Checkpointer.find
    stages = []
    sought = []

    def record_stages(run: Run, model_stages: list[str]) -> None:
        stages.extend(model_stages)
        start_profiler(run, model_stages)

    def record_find(checkpointer: Checkpointer, *values) -> Path | None:
        sought.extend(values)
        return find(checkpointer, *values)

    Run.start_profiler = record_stages
    Checkpointer.find = record_find
    run = set_up(config)
    return {
        "progress": run.progress.to_json(),
        "stages": stages,
        "rows": {key: len(dataset) for key, dataset in run.datasets().items()},
        "first batch": run.order.rows_of_batch(0).tolist(),
        "roles": [*run.memory_plan.roles],
        "steps": [run.steps_per_epoch, run.total_steps],
        "checkpoints": [run.checkpointer.directory.name, run.checkpointer.max_checkpoints],
        "async_save": run.checkpointer.asynchronous,
        "sought": sought,
    }


# Settings that every script's progress and checkpoints follow.
CHANGED = [
    "model.lora.rank=4",
    "model.lora.dtype=float32",
    "engine.compute_dtype=bfloat16",
    "data.shuffle=false",
    "trainer.seed=5",
    "trainer.max_checkpoints=5",
    "trainer.async_save=true",
]


def check_changed_settings(made: dict, model: Path, options: Sequence[str]) -> dict:
    """Check what a script has made of CHANGED, and return the settings that identify the run.

    Args:
        model: the directory of the model.
        options: the keys of `data` on which the tokens of a row depend.
    """
    progress = made["progress"]
    assert progress["export_dtype"] == "bfloat16"
    lora = progress["lora"]
    assert (lora["rank"], lora["dtype"]) == (4, "float32")
    assert lora["base"] == lora["base_name"]
    assert Path(lora["base"]).is_absolute()
    assert Path(lora["base"]).samefile(model)
    keys = [*options, "train_files", "chat_template", "val_size", "train_max_samples"]
    assert progress["tokenization"].keys() == {f"data.{key}" for key in keys}
    assert made["checkpoints"] == ["checkpoints", 5]
    assert made["async_save"] is True
    assert made["sought"] == ["auto", True], "a dry run renames no damaged checkpoint"
    identity = progress["run"]
    assert identity["model.lora"].startswith("rank 4, ")
    assert identity["frozen weights"] == fingerprint(model)
    assert identity["data.shuffle"] is False
    assert identity["trainer.seed"] == 5
    num_rows = made["rows"]["data.train_files"]
    batch_size = identity["data.train_batch_size"]
    assert made["first batch"] == [*range(batch_size)]
    assert made["steps"][0] == num_rows // batch_size
    assert "the model is built without its 1 MTP layer" in made["log"]
    assert f"never uses the last {num_rows % batch_size} of {num_rows} rows" in made["log"]
    return identity


def check_first_checkpoint(out: Path, batch_size: int) -> dict:
    """Check what the checkpoint of any script's first step names, and return all of it."""
    saved = json.loads((out / "checkpoints" / "step_00000001" / "trainer.json").read_text())
    assert saved["step"] == 1
    assert saved["export_dtype"] == "float32"
    assert saved["lora"] is None
    assert saved["tokenization"]["data.train_files"].endswith("train.jsonl")
    assert saved["run"]["data.train_batch_size"] == batch_size
    assert saved["run"]["data.shuffle"] is True
    return saved


def limit_positions(model: Path, num_positions: int) -> None:
    """Let a model's config.json say that its sequences are at most this long."""
    change_description(model, max_position_embeddings=num_positions)


def change_description(model: Path, **values) -> None:
    """Change values in a model's config.json."""
    file = model / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | values))


STOPPING_LOSS = """
import os
import signal
from pathlib import Path

import {module}


def mine({arguments}, **_):
    result = {module}.{loss}({arguments})
    mark = Path(__file__).with_suffix(".called")
    if mark.exists():
        return result
    mark.touch()
    os.kill(os.getpid(), signal.SIGTERM)
    return {not_finite}
"""


def check_a_stopped_run_goes_on(
    main: Callable[[DictConfig], None], defaults: str, pairs: list[str], out: Path
) -> None:
    """Check a run of three steps that is asked to stop in its first one, and then started again.

    Args:
        pairs: its settings, with a loss of STOPPING_LOSS; the gradient of its first step is NaN.
        out: its directory.
    """
    settings = [*pairs, "trainer.total_steps=3"]
    printed = run_in_fork(main, defaults, settings, out.with_name("stopped.txt"))
    assert "stopped by a signal after step 1;" in printed
    assert not (out / "hf").exists(), "only a complete run exports its model"
    printed = run_in_fork(main, defaults, settings, out.with_name("resumed.txt"))
    assert f"model: {out}/hf" in printed
    assert (out / "hf" / "model.safetensors").exists()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["train/skipped"] for line in lines] == [1, 1, 1], "the first step, forever"
    optim = load(defaults, settings).optim
    rates = [learning_rate(optim, step, total_steps=3) for step in range(3)]
    assert [line["train/lr"] for line in lines] == pytest.approx(rates)
