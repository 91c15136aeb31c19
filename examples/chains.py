"""Sums of two to a hundred numbers, worked out step by step: a task with a long tail.

    python examples/chains.py build runs/chains
    python examples/chains.py build runs/chains n=4000 n_val=500 median=5 sigma=1 longest=100

The reply to "What is 12 + 7 - 30?" is "12 + 7 = 19", "19 - 30 = -11" and "#### -11", in three
lines. The number of steps is log-normal with this median and sigma, and at most `longest`, so the
longest of a few hundred replies has ten times as many tokens as the mean one.

`build` writes train.jsonl with n problems and val.jsonl with n_val others, the same ones for the
same arguments. A row has the columns `messages`, whose last one is the worked reply, and `lines`,
the lines of this reply. The reward function is examples/chains.py:score: the share of lines that
are right before the first error. `score_lines` gives the same score line by line, for
reward.step_rewards=true.
"""

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

SEED = 0
LARGEST = 99


@dataclass(frozen=True)
class Options:
    """What problems to write; see the text above."""

    n: int = 4000
    n_val: int = 500
    median: float = 5.0
    sigma: float = 1.0
    longest: int = 100


def score(response: str, row: dict) -> float:
    """Return the share of lines that are right before the first error.

    A response with too many lines does not get the full score.
    """
    written_lines = response.strip().split("\n")
    num_lines = max(len(written_lines), len(row["lines"]))
    return num_right_lines(written_lines, row["lines"]) / num_lines


def num_right_lines(written_lines: list[str], expected_lines: list[str]) -> int:
    """Return the number of lines before the first error."""
    num_right = 0
    for written, expected in zip(written_lines, expected_lines):
        if written != expected:
            break
        num_right += 1
    return num_right


def score_lines(response: str, row: dict) -> tuple[float, list[tuple[int, float]]]:
    """Return 0, because lines earn the whole score, and a reward for each line of the response.

    A step is the position at which a line ends, and the line's part of the score: 0 from the first
    error on. Without these zeros, all steps of a problem would have the same reward, and grpo_steps
    would learn nothing from them.
    """
    if not response.strip():
        return 0.0, []
    written_lines = response.strip().split("\n")
    num_right = num_right_lines(written_lines, row["lines"])
    reward_of_line = 1 / max(len(written_lines), len(row["lines"]))
    end = len(response) - len(response.lstrip())
    steps = []
    for i, line in enumerate(written_lines):
        end += len(line)
        steps.append((end, reward_of_line if i < num_right else 0.0))
        end += len("\n")
    return 0.0, steps


def draw_num_steps(rng: random.Random, options: Options) -> int:
    """Return how many additions and subtractions a problem has."""
    num_steps = round(options.median * rng.lognormvariate(0.0, options.sigma))
    return min(max(num_steps, 1), options.longest)


def make_row(rng: random.Random, num_steps: int) -> dict:
    """Return a problem with its worked reply."""
    total = rng.randint(1, LARGEST)
    question = f"What is {total}"
    lines = []
    for _ in range(num_steps):
        sign = rng.choice("+-")
        number = rng.randint(1, LARGEST)
        result = total + number if sign == "+" else total - number
        question += f" {sign} {number}"
        lines.append(f"{total} {sign} {number} = {result}")
        total = result
    lines.append(f"#### {total}")
    messages = [
        {"role": "user", "content": f"{question}?"},
        {"role": "assistant", "content": "\n".join(lines)},
    ]
    return {"messages": messages, "lines": lines}


def make_rows(options: Options) -> list[dict]:
    """Return the problems of both files, those of val.jsonl first. No problem occurs twice."""
    rng = random.Random(SEED)
    rows: dict[str, dict] = {}
    while len(rows) < options.n + options.n_val:
        row = make_row(rng, draw_num_steps(rng, options))
        rows[row["messages"][0]["content"]] = row
    return list(rows.values())


def build(directory: Path, options: Options) -> None:
    """Write DIR/train.jsonl and DIR/val.jsonl."""
    rows = make_rows(options)
    directory.mkdir(parents=True, exist_ok=True)
    parts = {"val": rows[: options.n_val], "train": rows[options.n_val :]}
    for name, part in parts.items():
        path = directory / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
        print(f"{path}: {len(part)} problems")


def read_options(arguments: list[str]) -> Options:
    """Read arguments of the form key=value.

    Raises:
        ValueError: an argument has another form, an unknown key, or a value that is no number.
    """
    types = {"n": int, "n_val": int, "median": float, "sigma": float, "longest": int}
    values = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in types:
            raise ValueError(f"{argument!r} is not of the form key=value with {', '.join(types)}")
        values[key] = types[key](value)
    return Options(**values)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build", help="write the problems")
    command.add_argument("directory", type=Path)
    command.add_argument("settings", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    try:
        options = read_options(arguments.settings)
    except ValueError as error:
        sys.exit(f"examples/chains.py: {error}")
    build(arguments.directory, options)


if __name__ == "__main__":
    main()
