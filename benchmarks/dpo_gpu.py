"""DPO steps compared with TRL's DPOTrainer's, on one device: seconds, pairs/s, memory, losses.

    python benchmarks/dpo_gpu.py 1.5B --trl-python PYTHON
    python benchmarks/dpo_gpu.py 1.5B --trl-python PYTHON --cached --pairs 3 \\
        engine.torch_compile=never

Arguments: a shape (benchmarks/shapes.py), then key=value pairs of configs/dpo.yaml. Both train all
weights, in bf16 (--dtype), on the same rows in the same order: prompts of about 100 tokens and
answers of about 300, with log-normal lengths. TRL pads micro-batches of --micro-batch-size pairs;
here, micro-batches hold up to --tokens tokens without padding. --cached compares runs whose
reference is computed before the first step, which is not counted. --trl-python is the interpreter
of an environment that has TRL (see benchmarks/trl_dpo.py); without it, only this repository is
timed. The two programs run in turn, and the ratio is computed for each pair of runs.
"""

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from string import ascii_lowercase

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import (
    MODELS,
    ROOT,
    add_settings,
    make_parser,
    median_and_range,
    print_header,
    print_row,
    read_lines,
    run_quietly,
    write_lines,
)
from benchmarks.shapes import SHAPES, make_model
from examples.arithmetic import make_tokenizer

WARM_UP = 2  # first steps of either program, which are not counted
LR = 1e-6
SIGMA = 0.7  # of the log-normal distribution of lengths
SHORTEST = 4


@dataclass(frozen=True)
class Trial:
    """One run of either program.

    Attributes:
        seconds: the median of the counted steps.
        losses: the loss of every step.
        peak_gib: the largest memory of tensors on the device; 0 on a CPU.
    """

    seconds: float
    losses: list[float]
    peak_gib: float

    def cells(self, batch_size: int) -> list[str]:
        return [
            f"{self.seconds:.3f}",
            f"{batch_size / self.seconds:,.1f}",
            f"{self.peak_gib:.1f}",
            f"{self.losses[0]:.4f}, {self.losses[-1]:.4f}",
        ]


# ---- model and rows ----


def link_model(shape: str, models: Path, directory: Path) -> None:
    """Make a directory with a shape's model, and a tokenizer of bytes without a chat template."""
    source = make_model(shape, models)
    directory.mkdir()
    for file in source.iterdir():
        (directory / file.name).symlink_to(file)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(directory)


def make_rows(num_rows: int, prompt_length: int, answer_length: int, longest: int) -> list[dict]:
    """Return pairs of random letters, each of which is a token.

    Args:
        prompt_length, answer_length: means.
        longest: the largest number of tokens of a prompt and of an answer.
    """
    rng = random.Random(0)

    def text(mean: int) -> str:
        length = round(rng.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA))
        return "".join(rng.choices(ascii_lowercase, k=max(SHORTEST, min(length, longest))))

    return [
        {
            "prompt": text(prompt_length),
            "chosen": text(answer_length),
            "rejected": text(answer_length),
        }
        for _ in range(num_rows)
    ]


# ---- runs ----


def run_own(arguments: argparse.Namespace, work: Path) -> Trial:
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    command = [
        sys.executable,
        ROOT / "train_dpo.py",
        f"model.path={work}/model",
        f"data.train_files={work}/pairs.jsonl",
        f"data.cache_dir={work}/cache",
        f"data.train_batch_size={arguments.batch_size}",
        "data.shuffle=false",
        f"data.max_tokens_per_micro_batch={arguments.tokens}",
        f"output_dir={out}",
        f"trainer.total_steps={arguments.steps}",
        "trainer.save_minutes=0",
        f"engine.param_dtype={arguments.dtype}",
        f"engine.compute_dtype={arguments.dtype}",
        f"optim.lr={LR}",
        "optim.lr_scheduler_type=constant",
        "optim.lr_warmup_steps_ratio=0",
        f"reference.cache={str(arguments.cached).lower()}",
        *arguments.settings,
    ]
    run_quietly(command)
    steps = [line for line in read_lines(out / "metrics.jsonl") if "timing/step" in line]
    seconds = [step["timing/step"] for step in steps[WARM_UP:]]
    has_device = "perf/memory_reserved_gib" in steps[-1]
    peak = max(step["perf/memory_peak_gib"] for step in steps) if has_device else 0.0
    return Trial(median(seconds), [step["train/loss"] for step in steps], peak)


def run_trl(arguments: argparse.Namespace, work: Path) -> Trial:
    out = work / "trl.json"
    command = [arguments.trl_python, ROOT / "benchmarks/trl_dpo.py"]
    command += ["--model", work / "model", "--data", work / "pairs.jsonl", "--out", out]
    command += ["--steps", str(arguments.steps), "--batch-size", str(arguments.batch_size)]
    command += ["--micro-batch-size", str(arguments.micro_batch_size), "--lr", str(LR)]
    command += ["--dtype", arguments.dtype, "--attention", arguments.attention]
    command += ["--precompute"] if arguments.cached else []
    run_quietly(command)
    result = json.loads(out.read_text())
    return Trial(median(result["step_seconds"][WARM_UP:]), result["step_loss"], result["peak_gib"])


def print_table(arguments: argparse.Namespace, work: Path) -> None:
    own_runs = []
    trl_runs = []
    for _ in range(arguments.pairs):
        own_runs.append(run_own(arguments, work))
        if arguments.trl_python:
            trl_runs.append(run_trl(arguments, work))
    print_header(
        "shape", "program", "s per step", "pairs/s", "peak [GiB]", "losses, first and last", "ratio"
    )
    reference = ", reference computed before" if arguments.cached else ""
    own = sorted(own_runs, key=lambda run: run.seconds)[len(own_runs) // 2]
    print_row(arguments.shape, f"rankwise{reference}", *own.cells(arguments.batch_size), "")
    if trl_runs:
        trl = sorted(trl_runs, key=lambda run: run.seconds)[len(trl_runs) // 2]
        ratios = [trl.seconds / own.seconds for own, trl in zip(own_runs, trl_runs)]
        cells = trl.cells(arguments.batch_size)
        print_row(arguments.shape, f"TRL{reference}", *cells, median_and_range(ratios, ".2f"))


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--trl-python", help="the interpreter of TRL's environment")
    parser.add_argument("--cached", action="store_true", help="reference computed before")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each program")
    parser.add_argument(
        "--steps", type=int, default=12, help=f"of each run; the first {WARM_UP} are not counted"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="pairs per step")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="pairs (TRL only)")
    parser.add_argument("--tokens", type=int, default=16384, help="per micro-batch (not TRL)")
    parser.add_argument("--prompt-length", type=int, default=100, help="tokens, on average")
    parser.add_argument("--answer-length", type=int, default=300, help="tokens, on average")
    parser.add_argument("--longest", type=int, default=1500, help="tokens of an answer")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and computation")
    parser.add_argument("--attention", default="sdpa", help="of TRL's transformers")
    parser.add_argument("--models", type=Path, default=MODELS)
    add_settings(parser)
    return parser.parse_intermixed_args()


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        link_model(arguments.shape, arguments.models, work / "model")
        rows = make_rows(
            arguments.steps * arguments.batch_size,
            arguments.prompt_length,
            arguments.answer_length,
            arguments.longest,
        )
        write_lines(work / "pairs.jsonl", rows)
        print_table(arguments, work)


if __name__ == "__main__":
    main()
