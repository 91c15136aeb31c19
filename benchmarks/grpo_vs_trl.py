"""Compare GRPO steps of this repository with TRL's GRPOTrainer on a CPU.

    python benchmarks/grpo_vs_trl.py --trl-python TRL_VENV/bin/python [--pairs 5] [--ranks 1 2] \\
        [--steps 4]

Both have the same model, prompts, reward and updates. A step is 8 prompts x 8 responses of 64 to
256 tokens (benchmarks/make_grpo_data.py explains why they end) and one optimizer step: fp32,
temperature 1, advantages within groups, clipped loss over all tokens, no KL to a reference. Neither
program computes old log-probabilities, which one update per rollout does not need. Here vLLM
generates, in the same process; TRL calls transformers' generate, because the vLLM that it would
start in its process fails on a CPU. TRL's micro-batches have 8 rows, or all rows, padded to the
longest row of the step; ours are packed. Both use two cores: one process with two threads, or two
processes with one thread each.

--trl-python is the interpreter of an environment that has TRL (see benchmarks/trl_sft.py); without
it only this repository is timed. The two run in turn, so that a busy machine slows both. The result
is the ratio of each pair, in response tokens per second: each token is generated once and trained
on once. Responses are random, so their number of tokens differs a little from run to run; the mean
length is printed for both. Score and gradient norm show that both do the same work.

The second table has the seconds of a mean step on rank 0. With two ranks, waiting for the other
rank's responses is in `generate` for TRL, and in `reward` for this repository.
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
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import (
    ROOT,
    make_parser,
    median_and_range,
    medians,
    print_header,
    print_row,
)
from benchmarks.sft_vs_trl import launch, read_steps

WARM_UP = 1  # first steps of either program, which are not counted
SAMPLES = 8  # responses to each prompt
# Columns of the second table, and the stages of train_ppo.py that each is the sum of.
STAGES = {
    "generate": ["rollout_generate"],
    "reward": ["reward"],
    "log-probs, update": ["actor_update"],
    "weight sync": ["sleep", "offload", "wake", "update_weights"],
}
OPTIMIZER = {"lr": 1e-6, "weight_decay": 0.01, "clip_grad": 1.0}

# The mean of a run's counted steps, by name: the columns of STAGES, "rest" and "step" in seconds;
# "speed" in response tokens per second; "length", "score", "grad_norm".
MeanStep = dict[str, float]


@dataclass(frozen=True)
class Bench:
    """What all runs share.

    Attributes:
        work: a folder with data/ in it, for everything that runs write.
        steps: number of counted steps per run.
        prompts: number of prompts per step, over all ranks.
        max_tokens: length limit of a response.
        micro_batch_tokens: the cap of this repository's micro-batches.
        trl_python: the interpreter of TRL's environment, or None.
        continuous_batching: whether TRL generates with generate_batch.
    """

    work: Path
    steps: int
    prompts: int
    max_tokens: int
    micro_batch_tokens: int
    trl_python: str | None
    continuous_batching: bool


def mean_step(steps: list[dict[str, float]], prompts: int) -> MeanStep:
    """Return the mean of the counted steps; `rest` is the time outside all stages."""
    counted = steps[WARM_UP:]
    step = {}
    for name in counted[0]:
        step[name] = mean(counted_step[name] for counted_step in counted)
    step["speed"] = prompts * SAMPLES * step["length"] / step["step"]
    step["rest"] = step["step"] - sum(step[name] for name in STAGES)
    return step


def run_own(bench: Bench, ranks: int) -> MeanStep:
    out = bench.work / "ours"
    shutil.rmtree(out, ignore_errors=True)
    launch(
        sys.executable,
        ranks,
        "train_ppo.py",
        f"model.path={bench.work}/data/model",
        f"data.train_files={bench.work}/data/train.jsonl",
        f"data.cache_dir={bench.work}/cache",
        f"output_dir={out}",
        f"data.train_batch_size={bench.prompts}",
        f"rollout.n={SAMPLES}",
        f"rollout.max_tokens={bench.max_tokens}",
        "data.max_prompt_length=80",
        f"data.max_tokens_per_micro_batch={bench.micro_batch_tokens}",
        "engine.compute_dtype=float32",
        "engine.reshard_after_forward=false",
        f"reward.function={ROOT}/benchmarks/even_words.py:even_words",
        "algorithm.adv_estimator=grpo",
        "algorithm.loss_agg_mode=token-mean",
        "algorithm.clip_ratio_c=0",
        f"trainer.total_steps={bench.steps + WARM_UP}",
        "trainer.rollout_freq=-1",
        *(f"optim.{key}={value}" for key, value in OPTIMIZER.items()),
    )
    steps = [own_step(metrics) for metrics in read_steps(out)]
    return mean_step(steps, bench.prompts)


def own_step(metrics: dict) -> dict[str, float]:
    """Return the columns of the tables from the metrics of a step of train_ppo.py."""
    step = {
        "step": metrics["timing/step"],
        "length": metrics["response_length/mean"],
        "score": metrics["score/mean"],
        "grad_norm": metrics["actor/grad_norm"],
    }
    for column, stages in STAGES.items():
        step[column] = sum(metrics[f"timing/{stage}"] for stage in stages)
    return step


def run_trl(bench: Bench, ranks: int, micro_batch_size: int) -> MeanStep:
    out = bench.work / "trl.json"
    options = {
        "--model": bench.work / "data/model",
        "--data": bench.work / "data/train.jsonl",
        "--steps": bench.steps + WARM_UP,
        "--prompts": bench.prompts,
        "--samples": SAMPLES,
        "--max-tokens": bench.max_tokens,
        "--micro-batch-size": micro_batch_size,
        "--out": out,
    }
    for key, value in OPTIMIZER.items():
        options[f"--{key.replace('_', '-')}"] = value
    words = [str(word) for option in options.items() for word in option]
    if bench.continuous_batching:
        words.append("--continuous-batching")
    launch(bench.trl_python, ranks, "benchmarks/trl_grpo.py", *words)
    steps = json.loads(out.read_text())["steps"]
    for step in steps:
        step["log-probs, update"] = step.pop("update")
        step["weight sync"] = 0.0
    return mean_step(steps, bench.prompts)


# ---- tables ----


@dataclass(frozen=True)
class StageRow:
    """A row of the second table: a program's step on this many ranks."""

    ranks: int
    program: str
    step: MeanStep


def time_alone(bench: Bench, all_ranks: Sequence[int], num_runs: int) -> list[StageRow]:
    print("no --trl-python: TRL is left out", flush=True)
    rows = []
    for ranks in all_ranks:
        runs = [run_own(bench, ranks) for _ in range(num_runs)]
        rows.append(StageRow(ranks, "this", medians(runs)))
    return rows


def time_pairs(bench: Bench, arguments: argparse.Namespace) -> list[StageRow]:
    """Print the table of ratios; return the rows of the other table."""
    print_header(
        "ranks",
        "TRL's micro-batch",
        "step, this / TRL [s]",
        "tokens/s, this / TRL",
        "ratio of tokens/s: median (smallest, largest) of pairs",
    )
    rows = []
    for ranks in arguments.ranks:
        for micro_batch_size in arguments.trl_micro_batches:
            own_runs = []
            trl_runs = []
            for _ in range(arguments.pairs):
                own_runs.append(run_own(bench, ranks))
                trl_runs.append(run_trl(bench, ranks, micro_batch_size))
            ratios = [own["speed"] / trl["speed"] for own, trl in zip(own_runs, trl_runs)]
            own = medians(own_runs)
            trl = medians(trl_runs)
            num_rows = min(micro_batch_size, bench.prompts * SAMPLES // ranks)
            print_row(
                ranks,
                f"{num_rows} rows",
                f"{own['step']:.2f} / {trl['step']:.2f}",
                f"{own['speed']:,.0f} / {trl['speed']:,.0f}",
                median_and_range(ratios, ".2f"),
            )
            rows.append(StageRow(ranks, "this", own))
            rows.append(StageRow(ranks, f"TRL, {num_rows} rows", trl))
    return rows


def print_stages(rows: Sequence[StageRow]) -> None:
    columns = [*STAGES, "rest", "step"]
    print()
    print_header(
        "ranks",
        "seconds of",
        *columns,
        "tokens/s",
        "mean length [tokens]",
        "mean score",
        "gradient norm",
    )
    for row in rows:
        step = row.step
        print_row(
            row.ranks,
            row.program,
            *(f"{step[column]:.2f}" for column in columns),
            f"{step['speed']:,.0f}",
            f"{step['length']:.0f}",
            f"{step['score']:.3f}",
            f"{step['grad_norm']:.3f}",
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
        "--steps", type=int, default=4, help="counted steps, after one that is not counted"
    )
    parser.add_argument(
        "--prompts",
        type=int,
        default=8,
        help=f"per step, over all ranks; {SAMPLES} responses to each",
    )
    parser.add_argument("--max-tokens", type=int, default=256, help="of a response")
    parser.add_argument(
        "--trl-micro-batches",
        type=int,
        nargs="+",
        default=[8, 64],
        help="rows; a rank that has fewer takes all at once",
    )
    parser.add_argument("--micro-batch-tokens", type=int, default=2048, help="of this repository")
    parser.add_argument(
        "--continuous-batching", action="store_true", help="TRL generates with generate_batch"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        script = str(ROOT / "benchmarks/make_grpo_data.py")
        subprocess.run([sys.executable, script, str(work / "data")], check=True)
        bench = Bench(
            work=work,
            steps=arguments.steps,
            prompts=arguments.prompts,
            max_tokens=arguments.max_tokens,
            micro_batch_tokens=arguments.micro_batch_tokens,
            trl_python=arguments.trl_python,
            continuous_batching=arguments.continuous_batching,
        )
        if arguments.trl_python:
            rows = time_pairs(bench, arguments)
        else:
            rows = time_alone(bench, arguments.ranks, arguments.pairs)
    print_stages(rows)


if __name__ == "__main__":
    main()
