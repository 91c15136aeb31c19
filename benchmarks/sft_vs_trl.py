"""SFT steps of this repository against TRL's SFTTrainer on a CPU: same model, rows, optimizer and sequences per step.

    python benchmarks/sft_vs_trl.py --trl-python TRL_VENV/bin/python [--pairs 5] [--ranks 1 2]

TRL's default pads micro-batches of 8 rows. With 1 row there is nothing to pad, which is its fastest setting on a CPU.
TRL lives in a virtual environment of its own (benchmarks/trl_sft.py says what to install); without --trl-python only
this repository is timed. The two run in turn, so that a busy machine slows both. The result is the ratio of each pair,
in real tokens per second: padding does not count.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 2  # first steps of either program, which are not counted
SETTINGS = {"--lr": "1e-4", "--weight-decay": "0.1", "--clip-grad": "1.0"}


def launch(python: str, ranks: int, script: str, *arguments: str) -> None:
    launcher = (
        []
        if ranks == 1
        else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    )
    # The same cores for both: two threads in one process, or one in each of two.
    env = {**os.environ, "OMP_NUM_THREADS": str(max(1, 2 // ranks)), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, *launcher, ROOT / script, *arguments], env=env, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(
            f"{done.stdout[-2000:]}{done.stderr[-4000:]}\n{script}: exit code {done.returncode}"
        )


def ours(work: Path, ranks: int, steps: int, batch_size: int) -> tuple[float, list[float]]:
    """(tokens per second, losses)"""
    out = work / "ours"
    shutil.rmtree(out, ignore_errors=True)
    launch(
        sys.executable,
        ranks,
        "train_sft.py",
        f"model.path={work}/data/model",
        f"data.train_files={work}/data/train.jsonl",
        f"data.cache_dir={work}/cache",
        f"data.train_batch_size={batch_size}",
        f"output_dir={out}",
        "data.max_tokens_per_micro_batch=2048",
        "engine.reshard_after_forward=false",
        f"trainer.total_steps={steps}",
        "engine.compute_dtype=float32",
        "optim.lr=1e-4",
        "optim.weight_decay=0.1",
        "optim.lr_scheduler_type=constant",
        "optim.lr_warmup_steps_ratio=0",
    )
    steps = read_steps(out)
    speeds = [step["perf/tokens_per_second"] * ranks for step in steps[WARM_UP:]]
    return statistics.median(speeds), [step["train/loss"] for step in steps]


def read_steps(out: Path) -> list[dict]:
    """The metrics of every step. Other lines hold validation before the first step, or the time of the last checkpoint."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "timing/step" in line]


def trl(
    python: str, work: Path, ranks: int, steps: int, batch_size: int, variant: str
) -> tuple[float, list[float]]:
    out = work / "trl.json"
    variant, micro = variant.split(":")
    launch(
        python,
        ranks,
        "benchmarks/trl_sft.py",
        "--model",
        f"{work}/data/model",
        "--data",
        f"{work}/data/train.jsonl",
        "--steps",
        str(steps),
        "--batch-size",
        str(batch_size),
        "--micro-batch-size",
        micro,
        "--variant",
        variant,
        "--out",
        str(out),
        *(x for pair in SETTINGS.items() for x in pair),
    )
    result = json.loads(out.read_text())
    speeds = [n / s for n, s in zip(result["step_tokens"], result["step_seconds"])][WARM_UP:]
    return statistics.median(speeds), result["step_loss"]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trl-python",
        help="the interpreter of TRL's environment; without it TRL's part is left out",
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--steps", type=int, default=6, help=f"of each run; the first {WARM_UP} are not counted"
    )
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rows", type=int, default=2000, help="of the data that is made")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=["default:8", "default:1"],
        help="VARIANT:MICRO_BATCH_SIZE of trl_sft.py",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        subprocess.run(
            [
                sys.executable,
                ROOT / "benchmarks/make_sft_data.py",
                work / "data",
                "--rows",
                str(arguments.rows),
            ],
            check=True,
        )
        ours(work, 1, WARM_UP + 1, arguments.batch_size)  # fills the token cache
        if not arguments.trl_python:
            print(
                "no --trl-python: TRL is left out\n| ranks | this [tokens/s]: median (smallest, largest) of runs | losses, "
                "first and last |\n|---|---|---|"
            )
            for ranks in arguments.ranks:
                runs = [
                    ours(work, ranks, arguments.steps, arguments.batch_size)
                    for _ in range(arguments.pairs)
                ]
                speeds = [speed for speed, _ in runs]
                print(
                    f"| {ranks} | {statistics.median(speeds):,.0f} ({min(speeds):,.0f}, {max(speeds):,.0f}) | "
                    f"{runs[-1][1][0]:.4f}, {runs[-1][1][-1]:.4f} |",
                    flush=True,
                )
            return
        print(
            "| ranks | TRL | this [tokens/s] | TRL [tokens/s] | ratio: median (smallest, largest) of pairs | losses, first and "
            "last: this; TRL |\n|---|---|---|---|---|---|"
        )
        for ranks in arguments.ranks:
            for variant in arguments.variants:
                pairs = []
                for _ in range(arguments.pairs):
                    mine = ours(work, ranks, arguments.steps, arguments.batch_size)
                    theirs = trl(
                        arguments.trl_python,
                        work,
                        ranks,
                        arguments.steps,
                        arguments.batch_size,
                        variant,
                    )
                    pairs.append((mine[0], theirs[0]))
                ratios = [a / b for a, b in pairs]
                a, b = (statistics.median(x) for x in zip(*pairs))
                print(
                    f"| {ranks} | {variant} | {a:,.0f} | {b:,.0f} | {statistics.median(ratios):.2f} ({min(ratios):.2f}, "
                    f"{max(ratios):.2f}) | {mine[1][0]:.4f}, {mine[1][-1]:.4f}; {theirs[1][0]:.4f}, {theirs[1][-1]:.4f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
