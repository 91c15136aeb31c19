"""What routing replay changes: the gap between vLLM's and the trainer's log-probabilities.

    python benchmarks/routing_replay.py 8B-A1B engine.param_dtype=bfloat16 \\
        rollout.gpu_memory_utilization=0.6 [--updates 30] [--minutes 60] [--prompts 64] [--n 8] \\
        [--tokens 256] [key=value ...]
    python benchmarks/routing_replay.py tiny-MoE optim.lr=1e-3 --prompts 8 --tokens 64

Trains a mixture of experts of benchmarks/shapes.py, with random weights and one GPU or CPU, twice:
without and with rollout.routing_replay. Each update draws --n responses to each prompt. The reward
of a response is the share of its tokens with an even number, relative to its group.

Prints a Markdown table: the mean and the largest gap [nats] over the response tokens of all
updates, the gap in the first and in the last five updates, the share of tokens' experts that the
trainer would have chosen differently, and the median seconds of an update (generation, training and
weight sync; the pass that measures the gap does not count). The columns are preceded by the number
of updates, since after --minutes no further update of a case starts.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from omegaconf import DictConfig
from torch import Tensor

from benchmarks.harness import (
    MODELS,
    add_settings,
    make_parser,
    model_settings,
    print_header,
    print_row,
)
from benchmarks.shapes import EXPERTS, make_model
from config import load
from data.batching.batch import Batch
from engines.fsdp.engine import FSDPEngine
from engines.parallel import device
from rollout.vllm.engine import Rollout

PROMPT_TOKENS = 32
PROGRESS = "update"  # prefix of the lines that show the progress of a case
FEW_UPDATES = 5  # at the beginning and at the end


def make_prompts(number: int, vocab_size: int) -> list[list[int]]:
    """Return random prompts."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, vocab_size, (number, PROMPT_TOKENS), generator=generator).tolist()


def set_advantages(batch: Batch, n: int) -> None:
    """Set the advantage of each token: the reward of its response, relative to its group."""
    is_response = batch.fields["loss_mask"]
    sequence = torch.repeat_interleave(torch.arange(len(batch)), batch.cu_seqlens.diff())
    is_even = (batch.input_ids % 2 == 0).float() * is_response
    lengths = torch.zeros(len(batch)).index_add(0, sequence, is_response)
    rewards = torch.zeros(len(batch)).index_add(0, sequence, is_even) / lengths
    groups = rewards.view(-1, n)
    deviation = groups.std(1, keepdim=True) + 1e-6
    advantages = ((groups - groups.mean(1, keepdim=True)) / deviation).flatten()
    batch.fields["advantages"] = advantages[sequence] * is_response


def train(engine: FSDPEngine, batch: Batch, step: int) -> dict[str, float]:
    """Take a step of the policy gradient."""
    num_tokens = batch.fields["loss_mask"].sum().item()

    def loss_fn(log_probs: Tensor, _, fields: dict[str, Tensor]) -> tuple[Tensor, dict]:
        return -(log_probs * fields["advantages"]).sum() / num_tokens, {}

    return engine.train_batch(batch, loss_fn, step)


def measure_gap(engine: FSDPEngine, batch: Batch) -> Tensor:
    """Return the difference of the log-probabilities of each response token, as absolute values."""
    log_probs = engine.log_probs(batch)[0].cpu()
    is_response = batch.fields["loss_mask"] > 0
    return (log_probs - batch.fields["rollout_log_probs"])[is_response].abs()


def run_updates(config: DictConfig, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Train, and return for each update its mean and largest gap, mismatches, and seconds."""
    this_device = device.init()
    engine = FSDPEngine(config, this_device, arguments.updates)
    engine.offload("parameters", "optimizer")
    rollout = Rollout(config, this_device)
    prompts = make_prompts(arguments.prompts, rollout.vocab_size)
    repeated = [prompt for prompt in prompts for _ in range(arguments.n)]
    results = {"mean": [], "largest": [], "mismatch": [], "seconds": []}
    begin = time.monotonic()
    for step in range(arguments.updates):
        if time.monotonic() - begin > 60 * arguments.minutes:
            break
        start = device.synchronize()
        rollout.wake("weights")
        rollout.update_weights(engine.export_weights())
        engine.offload("parameters", "optimizer")
        rollout.wake("kv_cache")
        first_seed = step * len(repeated)
        seeds = list(range(first_seed, first_seed + len(repeated)))
        batch, _ = rollout.generate(repeated, seeds, config.rollout)
        rollout.sleep()
        generated = device.synchronize()
        gap = measure_gap(engine, batch)
        set_advantages(batch, arguments.n)
        measured = device.synchronize()
        metrics = train(engine, batch, step)
        engine.offload("optimizer")  # vLLM needs its memory, and the update does not.
        end = device.synchronize()
        results["mean"].append(gap.mean().item())
        results["largest"].append(gap.max().item())
        results["mismatch"].append(metrics.get("routing_mismatch", float("nan")))
        results["seconds"].append(end - measured + generated - start)
        print(
            f"{PROGRESS} {step + 1}: gap {results['mean'][-1]:.2e}, {end - start:.1f} s", flush=True
        )
    rollout.shutdown()
    return results


def run_case(replays: str) -> dict[str, list[float]]:
    """Run a case in a process of its own, and show its progress on stderr.

    vLLM takes the process group with it when it ends, so no second case can follow in a process.
    """
    command = [sys.executable, *sys.argv, "--case", replays]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        for line in process.stdout:
            if line.startswith(PROGRESS):
                print(f"rollout.routing_replay={replays}, {line}", end="", file=sys.stderr)
            last_line = line
        if process.wait():
            errors.seek(0)
            sys.exit(f"{errors.read()[-4000:]}\nexit code {process.returncode}")
    return json.loads(last_line)


def load_config(arguments: argparse.Namespace, replays: str) -> DictConfig:
    longest = PROMPT_TOKENS + arguments.tokens
    settings = [
        *model_settings(arguments.models / arguments.shape),
        f"data.train_batch_size={arguments.prompts}",
        f"data.max_prompt_length={PROMPT_TOKENS}",
        f"data.max_tokens_per_micro_batch={max(16384, longest)}",
        f"rollout.n={arguments.n}",
        f"rollout.max_tokens={arguments.tokens}",
        f"rollout.routing_replay={replays}",
        *arguments.settings,
    ]
    return load("ppo.yaml", settings)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("shape", choices=EXPERTS)
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument(
        "--minutes", type=float, default=60, help="start no update of a case after this time"
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--tokens", type=int, default=256, help="of each response, at most")
    parser.add_argument("--case", choices=("false", "true"), help=argparse.SUPPRESS)
    add_settings(parser)
    return parser.parse_intermixed_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.case:
        results = run_updates(load_config(arguments, arguments.case), arguments)
        print(json.dumps(results))
        return
    make_model(arguments.shape, arguments.models)
    print_header(
        "shape",
        "rollout.routing_replay",
        "updates",
        "mean gap",
        "largest gap",
        f"mean gap, first {FEW_UPDATES}",
        f"mean gap, last {FEW_UPDATES}",
        "other choices",
        "s per update",
    )
    for replays in ("false", "true"):
        results = run_case(replays)
        mismatch = fmean(results["mismatch"])
        print_row(
            arguments.shape,
            replays,
            len(results["mean"]),
            f"{fmean(results['mean']):.2e}",
            f"{max(results['largest']):.2e}",
            f"{fmean(results['mean'][:FEW_UPDATES]):.2e}",
            f"{fmean(results['mean'][-FEW_UPDATES:]):.2e}",
            f"{mismatch:.2%}" if mismatch == mismatch else "",
            f"{median(results['seconds']):.2f}",
        )


if __name__ == "__main__":
    main()
