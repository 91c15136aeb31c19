"""A model with a layer for multi-token prediction to train, and a task whose answers have a long tail of lengths.

    python benchmarks/make_mtp_data.py DIR 0.5B [--rows 16000] [--models MODELS]

DIR/train.jsonl and DIR/val.jsonl: the demo's problems (examples/arithmetic.py), several to a question, all worked out in the
answer. How many is log-normal (sigma 1), from 1 to 60, so answers have 23 to 1,746 tokens, 262 on average. Prints where the model
is: the shape SHAPE-MTP-random of benchmarks/shapes.py, with the demo's tokenizer.
"""

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.shapes import make_model
from examples.arithmetic import make_problem, make_tokenizer, write_rows

NUM_VAL, MEDIAN, MOST = 256, 6, 60  # rows; problems in one of them


def make_row(rng: random.Random) -> dict:
    problems = [
        make_problem(rng)
        for _ in range(min(MOST, max(1, round(MEDIAN * rng.lognormvariate(0, 1)))))
    ]
    question = "\n".join(problem.text for problem in problems)
    answers = [f"{problem.text}: {problem.worked_reply}" for problem in problems]
    answer = "\n".join(answers)
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("shape")
    parser.add_argument("--rows", type=int, default=16_000)
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/rankwise-models"))
    arguments = parser.parse_args()
    rng = random.Random(0)
    arguments.directory.mkdir(parents=True, exist_ok=True)
    write_rows(arguments.directory / "val.jsonl", [make_row(rng) for _ in range(NUM_VAL)])
    write_rows(arguments.directory / "train.jsonl", [make_row(rng) for _ in range(arguments.rows)])
    path = make_model(f"{arguments.shape}-MTP-random", arguments.models)
    make_tokenizer().save_pretrained(path)
    print(path)


if __name__ == "__main__":
    main()
