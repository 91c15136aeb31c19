"""Make a model with a layer for multi-token prediction, and a task to train it on.

    python benchmarks/make_mtp_data.py DIR 0.5B [--rows 16000] [--models MODELS]

DIR/train.jsonl and DIR/val.jsonl: the demo's problems (examples/arithmetic.py), several in one
question, all worked out in the answer. Their number is log-normal (sigma 1), from 1 to 60, so
answers have 23 to 1,746 tokens, 262 on average. Prints the path of the model: the shape
SHAPE-MTP-random of benchmarks/shapes.py, with the demo's tokenizer.
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import MODELS, make_parser
from benchmarks.shapes import make_model
from examples.arithmetic import make_problem, make_tokenizer, write_rows

NUM_VAL = 256  # rows
MEDIAN_PROBLEMS = 6  # of a row
MOST_PROBLEMS = 60


def make_row(rng: random.Random) -> dict:
    drawn = round(MEDIAN_PROBLEMS * rng.lognormvariate(0, 1))
    num_problems = min(MOST_PROBLEMS, max(1, drawn))
    problems = [make_problem(rng) for _ in range(num_problems)]
    question = "\n".join(problem.text for problem in problems)
    answers = [f"{problem.text}: {problem.worked_reply}" for problem in problems]
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "\n".join(answers)},
    ]
    return {"messages": messages}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("shape")
    parser.add_argument("--rows", type=int, default=16_000, help="of train.jsonl")
    parser.add_argument("--models", type=Path, default=MODELS)
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
