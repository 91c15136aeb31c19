"""Compare SFT steps of this repository with TRL's SFTTrainer on a CPU.

    python benchmarks/sft_vs_trl.py --trl-python TRL_VENV/bin/python [--pairs 5] [--ranks 1 2]

Both have the same model, rows, optimizer and sequences per step. By default TRL pads micro-batches
of 8 rows. With 1 row there is nothing to pad, which is its fastest setting on a CPU. --trl-python
is the interpreter of an environment that has TRL (see benchmarks/trl_sft.py); without it only this
repository is timed. The two run in turn, so that a busy machine slows both. The result is the ratio
of each pair, in real tokens per second: padding does not count.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import (
    ROOT,
    make_parser,
    median_and_range,
    print_header,
    print_row,
    python_command,
    read_lines,
    run_quietly,
)

WARM_UP = 2  # first steps of either program, which are not counted
NUM_CORES = 2
LR = 1e-4
WEIGHT_DECAY = 0.1
CLIP_GRAD = 1.0


@dataclass(frozen=True)
class Trial:
    """One run of either program.

    Attributes:
        speed: tokens per second of all ranks, the median of the counted steps.
        losses: the loss of every step.
    """

    speed: float
    losses: list[float]

    @property
    def first_and_last_loss(self) -> str:
        return f"{self.losses[0]:.4f}, {self.losses[-1]:.4f}"


@dataclass(frozen=True)
class Bench:
    """What all runs share.

    Attributes:
        work: a folder with data/ in it, for everything that runs write.
        steps: number of steps per run, including the first WARM_UP.
        batch_size: sequences per step.
    """

    work: Path
    steps: int
    batch_size: int


def launch(python: str, ranks: int, script: str, *arguments: str) -> None:
    """Run a script of this repository to its end, on the same cores for either program.

    It has two threads in one process, or one in each of two processes.
    """
    command = [*python_command(ranks, python), str(ROOT / script), *arguments]
    num_threads = max(1, NUM_CORES // ranks)
    run_quietly(command, OMP_NUM_THREADS=str(num_threads), HF_HUB_OFFLINE="1")


def run_own(bench: Bench, ranks: int) -> Trial:
    out = bench.work / "ours"
    shutil.rmtree(out, ignore_errors=True)
    launch(
        sys.executable,
        ranks,
        "train_sft.py",
        f"model.path={bench.work}/data/model",
        f"data.train_files={bench.work}/data/train.jsonl",
        f"data.cache_dir={bench.work}/cache",
        f"data.train_batch_size={bench.batch_size}",
        f"output_dir={out}",
        "data.max_tokens_per_micro_batch=2048",
        "engine.reshard_after_forward=false",
        f"trainer.total_steps={bench.steps}",
        "engine.compute_dtype=float32",
        f"optim.lr={LR}",
        f"optim.weight_decay={WEIGHT_DECAY}",
        f"optim.clip_grad={CLIP_GRAD}",
        "optim.lr_scheduler_type=constant",
        "optim.lr_warmup_steps_ratio=0",
    )
    steps = read_steps(out)
    speeds = [step["perf/tokens_per_second"] * ranks for step in steps[WARM_UP:]]
    return Trial(median(speeds), [step["train/loss"] for step in steps])


def read_steps(out: Path) -> list[dict]:
    """Return the metrics of every step of a run.

    Other lines hold a validation before the first step, or the time of the last checkpoint.
    """
    return [line for line in read_lines(out / "metrics.jsonl") if "timing/step" in line]


def run_trl(bench: Bench, ranks: int, python: str, variant: str) -> Trial:
    """Run TRL. variant: VARIANT:MICRO_BATCH_SIZE of trl_sft.py."""
    out = bench.work / "trl.json"
    name, micro_batch_size = variant.split(":")
    options = {
        "--model": bench.work / "data/model",
        "--data": bench.work / "data/train.jsonl",
        "--steps": bench.steps,
        "--batch-size": bench.batch_size,
        "--micro-batch-size": micro_batch_size,
        "--variant": name,
        "--out": out,
        "--lr": LR,
        "--weight-decay": WEIGHT_DECAY,
        "--clip-grad": CLIP_GRAD,
    }
    words = [str(word) for option in options.items() for word in option]
    launch(python, ranks, "benchmarks/trl_sft.py", *words)
    result = json.loads(out.read_text())
    steps = zip(result["step_tokens"], result["step_seconds"])
    speeds = [tokens / seconds for tokens, seconds in steps]
    return Trial(median(speeds[WARM_UP:]), result["step_loss"])


# ---- tables ----


def time_alone(bench: Bench, all_ranks: Sequence[int], num_runs: int) -> None:
    print("no --trl-python: TRL is left out")
    speed = "this [tokens/s]: median (smallest, largest) of runs"
    print_header("ranks", speed, "losses, first and last")
    for ranks in all_ranks:
        runs = [run_own(bench, ranks) for _ in range(num_runs)]
        speeds = [run.speed for run in runs]
        print_row(ranks, median_and_range(speeds, ",.0f"), runs[-1].first_and_last_loss)


def time_pairs(bench: Bench, arguments: argparse.Namespace) -> None:
    print_header(
        "ranks",
        "TRL",
        "this [tokens/s]",
        "TRL [tokens/s]",
        "ratio: median (smallest, largest) of pairs",
        "losses, first and last: this; TRL",
    )
    for ranks in arguments.ranks:
        for variant in arguments.variants:
            own_runs = []
            trl_runs = []
            for _ in range(arguments.pairs):
                own_runs.append(run_own(bench, ranks))
                trl_runs.append(run_trl(bench, ranks, arguments.trl_python, variant))
            ratios = [own.speed / trl.speed for own, trl in zip(own_runs, trl_runs)]
            print_row(
                ranks,
                variant,
                f"{median(run.speed for run in own_runs):,.0f}",
                f"{median(run.speed for run in trl_runs):,.0f}",
                median_and_range(ratios, ".2f"),
                f"{own_runs[-1].first_and_last_loss}; {trl_runs[-1].first_and_last_loss}",
            )


# ---- the command ----


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--trl-python", help="the interpreter of TRL's environment; without it TRL is left out"
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--steps", type=int, default=6, help=f"of each run; the first {WARM_UP} are not counted"
    )
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step")
    parser.add_argument("--rows", type=int, default=2000, help="of the data that is made")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=["default:8", "default:1"],
        metavar="VARIANT:MICRO_BATCH_SIZE",
        help="of trl_sft.py",
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        script = str(ROOT / "benchmarks/make_sft_data.py")
        data = str(work / "data")
        make_data = [sys.executable, script, data, "--rows", str(arguments.rows)]
        subprocess.run(make_data, check=True)
        run_own(Bench(work, WARM_UP + 1, arguments.batch_size), 1)  # fills the token cache
        bench = Bench(work, arguments.steps, arguments.batch_size)
        if arguments.trl_python:
            time_pairs(bench, arguments)
        else:
            time_alone(bench, arguments.ranks, arguments.pairs)


if __name__ == "__main__":
    main()
