"""Helpers of the scripts in this folder: parser, commands, settings and tables."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
# Where models with random weights are made, unless --models names another folder.
MODELS = Path("/dev/shm/rankwise-models")


# ---- arguments and settings ----


def make_parser(documentation: str) -> argparse.ArgumentParser:
    """Return a parser whose --help prints a script's docstring as it is."""
    return argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Take key=value arguments. They may stand between options: use parse_intermixed_args()."""
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of the configuration")


def model_settings(path: Path) -> list[str]:
    """Return settings for the keys that have no default; a script that makes its own
    batches reads no file."""
    return [f"model.path={path}", "data.train_files=none"]


# ---- commands ----


def python_command(num_ranks: int, python: str = sys.executable) -> list[str]:
    """Return the beginning of a command that runs a script on one process or under torchrun."""
    if num_ranks == 1:
        return [python]
    return torchrun_command(num_ranks, python)


def torchrun_command(num_ranks: int, python: str = sys.executable) -> list[str]:
    return [
        *(python, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", str(num_ranks)),
    ]


def run_quietly(command: Sequence[str | Path], **variables: str) -> str:
    """Run a command, return what it prints, and exit with its last lines if it fails.

    variables: set in its environment.
    """
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    if done.returncode:
        output = f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
        words = " ".join(str(word) for word in command)
        sys.exit(f"{output}\nexit code {done.returncode}: {words}")
    return done.stdout


# ---- results ----


def read_lines(file: Path) -> list[dict]:
    """Return the objects of a .jsonl file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def read_metrics(file: Path) -> list[dict]:
    """Return the lines of metrics.jsonl. The last line of a killed run may be incomplete."""
    complete, _, _ = file.read_text().rpartition("\n")
    return [json.loads(line) for line in complete.splitlines()]


def write_lines(file: Path, rows: Iterable[Mapping]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of every metric; a step that lacks a metric counts as 0."""
    values_by_name = {name: [] for step in steps for name in step}
    for name, values in values_by_name.items():
        values.extend(step.get(name, 0.0) for step in steps)
    return {name: median(values) for name, values in values_by_name.items()}


def flops_of_lengths(flops: tuple[int, int, int], lengths: Sequence[int]) -> float:
    """Return the FLOPs of forward and backward on sequences of these lengths, as Engine.flops().

    flops: see count_flops in engines/model/flops.py.
    """
    in_layers, in_head, in_attention = flops
    num_tokens = sum(lengths)
    squares = sum(length * length for length in lengths)
    return float((in_layers + in_head) * num_tokens + in_attention * squares)


def print_header(*names: str) -> None:
    """Print the header of a Markdown table."""
    print_row(*names)
    print(f"|{'---|' * len(names)}", flush=True)


def print_row(*cells: object, note: str = "") -> None:
    """Print a line of a Markdown table, at once. note: printed after its last cell."""
    texts = [str(cell) for cell in cells]
    print(f"| {' | '.join(texts)} |{note}", flush=True)


def median_and_range(values: Sequence[float], form: str) -> str:
    """Return "median (smallest, largest)". form: a format specification, such as ",.0f"."""
    middle = format(median(values), form)
    smallest = format(min(values), form)
    largest = format(max(values), form)
    return f"{middle} ({smallest}, {largest})"
