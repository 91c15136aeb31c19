"""Data with which a pretrained model learns to call the calculator of examples/calculator.py.

    python examples/tools.py build runs/tools

A problem is a product of numbers of three digits, to which one to three numbers are added or
subtracted: "347*829+512-2907". The calculator takes one step at a time, so that this problem needs
three calls. `build` writes these files, the same ones in every call:
    traces.jsonl           conversations for supervised fine-tuning
    val_traces.jsonl       more of them
    train.jsonl            problems with their answers, for episodes
    val.jsonl              other problems
    chat_template.jinja    prints tools and calls; set it as data.chat_template

Half of the traces call the calculator. The other half answer at once, which a small model cannot
do: it guesses. Fine-tuning teaches the model both; reinforcement learning finds that calling pays
off. The episode is examples/calculator.py:solve.
"""

import argparse
import random
import re
import sys
from pathlib import Path

# The repository, for examples/calculator.py: this script runs from any directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.arithmetic import write_rows
from examples.calculator import CALCULATOR, CHAT_TEMPLATE, calculate, make_trace

SEED = 0
NUM_ROWS = {"val": 500, "train": 4000, "traces": 500, "val_traces": 200}
# This fraction of the traces calls the calculator.
SHARE_CALLS = 0.5


def make_steps(rng: random.Random) -> list[str]:
    """Draw a problem; return what the calculator has to compute, step by step.

    The problem 347*829+512-2907 has the steps 347*829, 287663+512 and 288175-2907.
    """
    first = rng.randint(100, 999)
    second = rng.randint(100, 999)
    steps = [f"{first}*{second}"]
    for _ in range(rng.randint(1, 3)):
        sign = rng.choice("+-")
        number = rng.randint(100, 3000)  # Results stay positive: the calculator reads no others.
        steps.append(f"{calculate(steps[-1])}{sign}{number}")
    return steps


def problem_text(steps: list[str]) -> str:
    """Return the whole problem: the first step, and the ends of the others."""
    first, *later = steps
    ends = [re.sub(r"^\d+", "", step) for step in later]
    return first + "".join(ends)


def make_row(steps: list[str], is_trace: bool, rng: random.Random) -> dict:
    """Return a trace, or a problem with its answer."""
    question = f"What is {problem_text(steps)}"
    answer = calculate(steps[-1])
    if not is_trace:
        return {"prompt": question, "answer": answer}
    is_calling = rng.random() < SHARE_CALLS
    replies = make_trace(steps) if is_calling else [{"role": "assistant", "content": answer}]
    return {"messages": [{"role": "user", "content": question}, *replies], "tools": [CALCULATOR]}


def make_rows(num_rows: dict[str, int]) -> dict[str, list[dict]]:
    """Return the rows of each file. No problem occurs twice."""
    rng = random.Random(SEED)
    rows: dict[str, list[dict]] = {name: [] for name in num_rows}
    problems = set()
    for name, size in num_rows.items():
        while len(rows[name]) < size:
            steps = make_steps(rng)
            if steps[0] in problems:
                continue
            problems.add(steps[0])
            rows[name].append(make_row(steps, name.endswith("traces"), rng))
    return rows


def build(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in make_rows(NUM_ROWS).items():
        write_rows(directory / f"{name}.jsonl", rows)
        print(f"{directory}/{name}.jsonl: {len(rows)} problems")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build", help="write the traces, the problems and the template")
    command.add_argument("directory", type=Path)
    build(parser.parse_args().directory)


if __name__ == "__main__":
    main()
