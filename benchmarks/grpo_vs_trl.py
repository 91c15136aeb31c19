"""GRPO steps of this repository against TRL's GRPOTrainer on a CPU: same model, prompts, reward and updates.

    python benchmarks/grpo_vs_trl.py --trl-python TRL_VENV/bin/python [--pairs 5] [--ranks 1 2] [--steps 4]

A step is 8 prompts x 8 responses of 64 to 256 tokens (benchmarks/make_grpo_data.py says why they end) and one
optimizer step: fp32, temperature 1, advantages within groups, clipped loss over all tokens, no KL to a reference.
Neither program computes old log-probabilities, which one update per rollout does not need. Here vLLM generates, in the
same process; TRL calls transformers' generate, because the vLLM that it would start in its process fails on a CPU.
TRL takes micro-batches of 8 rows, or of all, padded to the step's longest; ours are packed. Both have two cores: two
threads in one process, or one in each of two.

TRL lives in a virtual environment of its own (benchmarks/trl_sft.py says what to install); without --trl-python only
this repository is timed. The two run in turn, so that a busy machine slows both. The result is the ratio of each pair,
in response tokens per second: each token is generated once and trained on once. Responses are random, so their number
of tokens differs a little from run to run; the mean length is given for both. Score and gradient norm show that both do
the same work.

The second table is in seconds of a mean step, on rank 0. With two ranks, waiting for the other rank's responses is in
`generate` for TRL, and in `reward` for this repository.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sft_vs_trl import ROOT, launch, read_steps

WARM_UP = 1  # first steps of either program, which are not counted
SAMPLES, MAX_TOKENS = 8, 256
# Columns of the second table, and the stages of train_ppo.py that each is the sum of.
STAGES = {
    "generate": ["rollout_generate"],
    "reward": ["reward"],
    "log-probs, update": ["actor_update"],
    "weight sync": ["sleep", "offload", "wake", "update_weights"],
}
OPTIMIZER = {"lr": 1e-6, "weight_decay": 0.01, "clip_grad": 1.0}


def mean_step(steps: list[dict[str, float]], prompts: int) -> dict[str, float]:
    """The mean of the counted steps, with tokens per second, and the seconds that are in no stage as `rest`."""
    counted = steps[WARM_UP:]
    step = {key: statistics.mean(s[key] for s in counted) for key in counted[0]}
    return step | {
        "speed": prompts * SAMPLES * step["length"] / step["step"],
        "rest": step["step"] - sum(step[name] for name in STAGES),
    }


def ours(
    work: Path, ranks: int, steps: int, prompts: int, micro_batch_tokens: int
) -> dict[str, float]:
    out = work / "ours"
    shutil.rmtree(out, ignore_errors=True)
    launch(
        sys.executable,
        ranks,
        "train_ppo.py",
        f"model.path={work}/data/model",
        f"data.train_files={work}/data/train.jsonl",
        f"data.cache_dir={work}/cache",
        f"output_dir={out}",
        f"data.train_batch_size={prompts}",
        f"rollout.n={SAMPLES}",
        f"rollout.max_tokens={MAX_TOKENS}",
        "data.max_prompt_length=80",
        f"data.max_tokens_per_micro_batch={micro_batch_tokens}",
        "engine.compute_dtype=float32",
        "engine.reshard_after_forward=false",
        f"reward.function={ROOT}/benchmarks/even_words.py:even_words",
        "algorithm.adv_estimator=grpo",
        "algorithm.loss_agg_mode=token-mean",
        "algorithm.clip_ratio_c=0",
        f"trainer.total_steps={steps + WARM_UP}",
        "trainer.rollout_freq=-1",
        *(f"optim.{key}={value}" for key, value in OPTIMIZER.items()),
    )
    return mean_step(
        [
            {
                **{
                    name: sum(line[f"timing/{stage}"] for stage in stages)
                    for name, stages in STAGES.items()
                },
                "step": line["timing/step"],
                "length": line["response_length/mean"],
                "score": line["critic/score/mean"],
                "grad_norm": line["actor/grad_norm"],
            }
            for line in read_steps(out)
        ],
        prompts,
    )


def trl(
    python: str, work: Path, ranks: int, steps: int, prompts: int, micro_batch_size: int, *more: str
) -> dict[str, float]:
    out = work / "trl.json"
    launch(
        python,
        ranks,
        "benchmarks/trl_grpo.py",
        "--model",
        f"{work}/data/model",
        "--data",
        f"{work}/data/train.jsonl",
        "--steps",
        str(steps + WARM_UP),
        "--prompts",
        str(prompts),
        "--samples",
        str(SAMPLES),
        "--max-tokens",
        str(MAX_TOKENS),
        "--micro-batch-size",
        str(micro_batch_size),
        "--out",
        str(out),
        *more,
        *(
            x
            for key, value in OPTIMIZER.items()
            for x in (f"--{key.replace('_', '-')}", str(value))
        ),
    )
    lines = json.loads(out.read_text())["steps"]
    return mean_step(
        [{**line, "log-probs, update": line["update"], "weight sync": 0.0} for line in lines],
        prompts,
    )


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
        "--steps", type=int, default=4, help="counted steps, after one that is not counted"
    )
    parser.add_argument(
        "--prompts", type=int, default=8, help="per step, over all ranks; 8 responses to each"
    )
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
    arguments = parser.parse_args()
    steps, prompts = arguments.steps, arguments.prompts
    more = ["--continuous-batching"] if arguments.continuous_batching else []
    by_stage = []
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        subprocess.run(
            [sys.executable, ROOT / "benchmarks/make_grpo_data.py", work / "data"], check=True
        )

        def run_ours(ranks: int) -> dict[str, float]:
            return ours(work, ranks, steps, prompts, arguments.micro_batch_tokens)

        if not arguments.trl_python:
            print("no --trl-python: TRL is left out", flush=True)
            for ranks in arguments.ranks:
                by_stage.append(
                    (ranks, "this", medians([run_ours(ranks) for _ in range(arguments.pairs)]))
                )
            return print_stages(by_stage)
        print(
            "| ranks | TRL's micro-batch | step, this / TRL [s] | tokens/s, this / TRL | ratio of tokens/s: median "
            "(smallest, largest) of pairs |\n|---|---|---|---|---|",
            flush=True,
        )
        for ranks in arguments.ranks:
            for rows in arguments.trl_micro_batches:
                pairs = [
                    (
                        run_ours(ranks),
                        trl(arguments.trl_python, work, ranks, steps, prompts, rows, *more),
                    )
                    for _ in range(arguments.pairs)
                ]
                ratios = [mine["speed"] / theirs["speed"] for mine, theirs in pairs]
                a, b = (medians(runs) for runs in zip(*pairs))
                rows = min(rows, prompts * SAMPLES // ranks)
                print(
                    f"| {ranks} | {rows} rows | {a['step']:.2f} / {b['step']:.2f} | "
                    f"{a['speed']:,.0f} / {b['speed']:,.0f} | "
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f}) |",
                    flush=True,
                )
                by_stage += [(ranks, "this", a), (ranks, f"TRL, {rows} rows", b)]
    print_stages(by_stage)


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def print_stages(by_stage: list[tuple[int, str, dict[str, float]]]) -> None:
    columns = [*STAGES, "rest", "step"]
    print(
        f"\n| ranks | seconds of | {' | '.join(columns)} | tokens/s | mean length [tokens] | mean score | gradient norm |\n"
        f"|{'---|' * (len(columns) + 6)}"
    )
    for ranks, name, x in by_stage:
        print(
            f"| {ranks} | {name} | {' | '.join(f'{x[column]:.2f}' for column in columns)} | {x['speed']:,.0f} | "
            f"{x['length']:.0f} | {x['score']:.3f} | {x['grad_norm']:.3f} |"
        )


if __name__ == "__main__":
    main()
