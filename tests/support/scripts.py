"""Run a script's main() on one rank, in a fork of the test's process, which starts nothing."""

import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from omegaconf import DictConfig

from config import load

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
    assert process.exitcode == 0, printed
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
    file = model / "config.json"
    config = json.loads(file.read_text())
    config["max_position_embeddings"] = num_positions
    file.write_text(json.dumps(config))
