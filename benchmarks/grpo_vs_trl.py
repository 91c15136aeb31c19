"""GRPO steps of this repository against TRL's GRPOTrainer on CPU: the same model, prompts, reward and updates.

    python benchmarks/grpo_vs_trl.py --trl-python TRL_VENV/bin/python [--pairs 5] [--ranks 1 2] [--steps 4]

A step is 8 prompts x 8 responses of 64 to 256 tokens (benchmarks/make_grpo_data.py says why they end) and one
optimizer step: fp32, temperature 1, advantages within groups, clipped loss over all tokens, no divergence from a
reference, no old log-probabilities, which both leave out when there is one update a rollout. Here vLLM generates, in
the same process; TRL calls transformers' generate, because the vLLM that it would start in its process fails on a CPU.
TRL takes micro-batches of 8 rows, or of all, padded to the step's longest; ours are packed. Both have two cores: two
threads in one process, or one in each of two.

TRL lives in a virtual environment of its own (benchmarks/trl_sft.py says what to install). The two run in turn, so that
a busy machine slows both; what counts is the ratio of each pair, in tokens of responses a second: each of them is
generated once and trained on once. Which responses come is chance, so their number differs a little from run to run;
their mean length is given for both. Score and gradient norm show that both do the same work.

The second table is in seconds of a mean step, on rank 0. With two ranks, waiting for the other one's responses is in
`generate` of TRL, and in `reward` of this repository.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from sft_vs_trl import ROOT, launch

WARM_UP = 1                 # steps that are not counted, of either program
SAMPLES, MAX_TOKENS = 8, 256
# Columns of the second table, and the stages of train_ppo.py that each is the sum of.
STAGES = {"generate": ["rollout_generate"], "reward": ["reward"], "log-probs, update": ["actor_update"],
          "weight sync": ["sleep", "offload", "wake", "update_weights"]}
OPTIMIZER = {"lr": 1e-6, "weight_decay": 0.01, "clip_grad": 1.0}


def mean_step(steps: list[dict[str, float]], prompts: int) -> dict[str, float]:
    """The mean of what is counted, with tokens a second and the seconds in no stage."""
    counted = steps[WARM_UP:]
    step = {key: statistics.mean(s[key] for s in counted) for key in counted[0]}
    return step | {"speed": prompts * SAMPLES * step["length"] / step["step"],
                   "rest": step["step"] - sum(step[name] for name in STAGES)}


def ours(work: Path, ranks: int, steps: int, prompts: int, micro_batch_tokens: int) -> dict[str, float]:
    out = work / "ours"
    shutil.rmtree(out, ignore_errors=True)
    launch(sys.executable, ranks, "train_ppo.py", f"model.path={work}/data/model",
           f"data.train_files={work}/data/train.jsonl", f"data.cache_dir={work}/cache", f"output_dir={out}",
           f"data.train_batch_size={prompts}", f"rollout.n={SAMPLES}", f"rollout.max_tokens={MAX_TOKENS}",
           "data.max_prompt_length=80", f"data.max_tokens_per_micro_batch={micro_batch_tokens}",
           "engine.compute_dtype=float32", "engine.reshard_after_forward=false",
           f"reward.function={ROOT}/benchmarks/even_words.py:even_words",
           "algorithm.adv_estimator=grpo", "algorithm.loss_agg_mode=token-mean", "algorithm.clip_ratio_c=0",
           f"trainer.total_steps={steps + WARM_UP}", "trainer.rollout_freq=-1",
           *(f"optim.{key}={value}" for key, value in OPTIMIZER.items()))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return mean_step([{
        **{name: sum(line[f"timing/{stage}"] for stage in stages) for name, stages in STAGES.items()},
        "step": line["timing/step"],
        "length": line["response_length/mean"], "score": line["critic/score/mean"],
        "grad_norm": line["actor/grad_norm"]} for line in lines], prompts)


def trl(python: str, work: Path, ranks: int, steps: int, prompts: int, micro_batch_size: int,
        *more: str) -> dict[str, float]:
    out = work / "trl.json"
    launch(python, ranks, "benchmarks/trl_grpo.py", "--model", f"{work}/data/model",
           "--data", f"{work}/data/train.jsonl", "--steps", str(steps + WARM_UP),
           "--prompts", str(prompts), "--samples", str(SAMPLES), "--max-tokens", str(MAX_TOKENS),
           "--micro-batch-size", str(micro_batch_size), "--out", str(out), *more,
           *(x for key, value in OPTIMIZER.items() for x in (f"--{key.replace('_', '-')}", str(value))))
    lines = json.loads(out.read_text())["steps"]
    return mean_step([{**line, "log-probs, update": line["update"], "weight sync": 0.0} for line in lines], prompts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=4, help="that are counted, after one that is not")
    parser.add_argument("--prompts", type=int, default=8, help="a step, of all ranks; 8 responses to each")
    parser.add_argument("--trl-micro-batches", type=int, nargs="+", default=[8, 64],
                        help="rows; a rank that has fewer takes all at once")
    parser.add_argument("--micro-batch-tokens", type=int, default=2048, help="ours")
    parser.add_argument("--continuous-batching", action="store_true", help="TRL generates with generate_batch")
    arguments = parser.parse_args()
    steps, prompts = arguments.steps, arguments.prompts
    more = ["--continuous-batching"] if arguments.continuous_batching else []
    by_stage = []
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        subprocess.run([sys.executable, ROOT / "benchmarks/make_grpo_data.py", work / "data"], check=True)
        print("| ranks | TRL's micro-batch | step, this / TRL [s] | tokens/s, this / TRL | ratio of tokens/s: median "
              "(smallest, largest) of pairs |\n|---|---|---|---|---|", flush=True)
        for ranks in arguments.ranks:
            for rows in arguments.trl_micro_batches:
                pairs = [(ours(work, ranks, steps, prompts, arguments.micro_batch_tokens),
                          trl(arguments.trl_python, work, ranks, steps, prompts, rows, *more))
                         for _ in range(arguments.pairs)]
                ratios = [mine["speed"] / theirs["speed"] for mine, theirs in pairs]
                a, b = ({key: statistics.median(x[key] for x in runs) for key in runs[0]} for runs in zip(*pairs))
                rows = min(rows, prompts * SAMPLES // ranks)
                print(f"| {ranks} | {rows} rows | {a['step']:.2f} / {b['step']:.2f} | "
                      f"{a['speed']:,.0f} / {b['speed']:,.0f} | "
                      f"{statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f}) |", flush=True)
                by_stage += [(ranks, "this", a), (ranks, f"TRL, {rows} rows", b)]
    stages = [*STAGES, "rest"]
    print(f"\n| ranks | seconds of | {' | '.join(stages)} | mean length [tokens] | mean score | gradient norm |\n"
          f"|{'---|' * (len(stages) + 5)}")
    for ranks, name, x in by_stage:
        print(f"| {ranks} | {name} | {' | '.join(f'{x[stage]:.2f}' for stage in stages)} | {x['length']:.0f} | "
              f"{x['score']:.3f} | {x['grad_norm']:.3f} |")


if __name__ == "__main__":
    main()
