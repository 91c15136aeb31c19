"""What a rank's host does from vLLM's arrays to the loss: seconds and memory, and whether they grow with the number of ranks.

    python benchmarks/host_path.py [--tokens 1000000] [--ranks 1 8 64] [--estimators grpo gae] [--group 8]

Measured is the work of rank 0 of N, each case in a process of its own: Sampler.draw, divide and set_advantages of this repository
on --tokens tokens of log-normal length (mean 256, sigma 1), whatever N. Generation, decoding, grading and the models are left out;
what they would return is there beforehand. The other N - 1 ranks are simulated: a collective brings what they would send, as copies
of this rank's numbers and tokens. So nothing waits and nothing goes over a wire, but arrays have their true sizes, and the bytes
that this rank gives to collectives are counted. Seconds are processor time, the smallest of --repeats steps; MiB are the most
that the steps add to the memory of the process.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("draw", "divide", "advantages")


def measure(num_ranks: int, estimator: str, num_tokens: int, group_size: int, repeats: int) -> dict:
    """One case, in this process."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from config import load
    from data.batching.batch import Batch, bounds
    from data.prompts import Prompt, PromptDataset
    from engines.base import Engine
    from profiling import Profiler
    from rl.estimation import set_advantages
    from rl.models import mini_batch_prompts, uses_critic
    from rollout.drawing import Request, Sampler
    from rollout.grading.grader import Reward
    from rollout.sharing import divide

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    num_bytes = simulate_other_ranks(dist, torch, num_ranks)

    lengths = []
    while sum(lengths) < num_tokens or len(lengths) % group_size:
        lengths.append(16 + max(1, int(torch.randn(()).add(5.045).exp())))  # a prompt of 16 tokens
    lengths = torch.tensor(lengths)
    total, num_own = int(lengths.sum()), len(lengths)
    mask = (
        torch.arange(total) - torch.repeat_interleave(bounds(lengths)[:-1], lengths) >= 16
    ).float()
    drawn = Batch(
        torch.randint(0, 150_000, (total,)),
        bounds(lengths),
        {"loss_mask": mask, "rollout_log_probs": -mask},
    )
    truncated, texts = torch.zeros(num_own, dtype=torch.bool), [""] * num_own
    rewards = [Reward(float(i % 3), {}) for i in range(num_own)]
    rollout = SimpleNamespace(
        num_replicas=num_ranks,
        replica=0,
        tp_rank=0,
        drafter=None,
        generate=lambda *_: (drawn, truncated),
    )
    grader = SimpleNamespace(
        parts=[], grade=lambda *_: rewards, same_parts=lambda items, results: results
    )
    tokenizer = SimpleNamespace(batch_decode=lambda *_, **__: texts)

    class Planner(Engine):
        """Without a model."""

        def __init__(self):
            self.dp_rank, self.dp_size, self.dp_group, self.device, self.config = (
                0,
                num_ranks,
                None,
                "cpu",
                config,
            )
            self._flops = 3 * 10**9, 6 * 10**8, 6 * 10**5

        def multiple(self, size: int) -> int:
            return 1

    Planner.__abstractmethods__ = frozenset()

    class Prompts(PromptDataset):
        """Enough of them, which are in no file; how long responses were the last time is not known."""

        def __init__(self):
            self.lengths = np.full(num_own // group_size * num_ranks, 16)
            self.drawn_lengths = np.full(len(self.lengths), np.nan, np.float32)

        def __getitem__(self, index: int) -> Prompt:
            return Prompt([1] * 16, "", {})

    dataset = Prompts()
    config = load(
        "ppo.yaml",
        [
            "model.path=none",
            "data.train_files=none",
            f"algorithm.adv_estimator={estimator}",
            f"rollout.n={group_size}",
            f"data.train_batch_size={len(dataset)}",
        ],
    )
    engine = Planner()

    def step() -> list[float]:
        dataset.drawn_lengths[:] = np.nan
        clock = [time.process_time()]
        sampler = Sampler(rollout, grader, tokenizer, host_group=None, max_failure_rate=1)
        request = Request(dataset, range(len(dataset)), config.rollout, seed=(0,))
        samples = sampler.draw(request, Profiler())
        clock.append(time.process_time())
        share = divide(samples, samples.mini_batches(mini_batch_prompts(config)), engine)
        clock.append(time.process_time())
        if uses_critic(config):  # as the critic would say them
            share.batch.fields["values"] = share.batch.fields["loss_mask"] / 2
        set_advantages(config, samples, share, 0.0)
        assert sum(len(part) for part, _ in share.parts) == len(share.batch)
        clock.append(time.process_time())
        return [after - before for before, after in zip(clock, clock[1:])]

    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    seconds = [step() for _ in range(repeats)]
    return {
        "seconds": dict(zip(STAGES, map(min, zip(*seconds)))),
        "tokens": total,
        "mib": (memory("VmHWM") - before) / 2**10,
        "kb": num_bytes["numbers"] / repeats / 1e3,
    }


def simulate_other_ranks(dist, torch, num_ranks: int) -> dict[str, int]:
    """Replace the collectives. Returns the bytes that this rank has given to them, but for its tokens."""
    num_bytes = {"numbers": 0}

    def all_reduce(x, op=None, group=None):
        num_bytes["numbers"] += x.nbytes
        if x.dim() == 0:  # others have as many micro-batches
            return
        if x.shape == (num_ranks,):  # each rank's place, or its seconds
            return x.copy_(torch.arange(num_ranks) if x.dtype == torch.int64 else x[0].clone())
        own = x.reshape(len(x), -1).any(1)
        x[~own] = x[own][torch.randint(0, max(int(own.sum()), 1), (int((~own).sum()),))]

    def all_to_all_single(received, sent, received_sizes, sent_sizes, group=None):
        received.copy_(
            sent.repeat(len(received) // len(sent) + 1, *[1] * (sent.dim() - 1))[: len(received)]
        )

    def all_gather_object(received, sent, group=None):
        received[:] = [sent] * num_ranks

    dist.all_reduce, dist.all_to_all_single, dist.all_gather_object = (
        all_reduce,
        all_to_all_single,
        all_gather_object,
    )
    return num_bytes


def memory(name: str) -> int:
    """KiB of this process, by /proc/self/status"""
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith(name)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of one rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--estimators", nargs="+", default=["grpo", "gae"])
    parser.add_argument("--group", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        num_ranks, estimator = arguments.case
        print(
            json.dumps(
                measure(
                    int(num_ranks), estimator, arguments.tokens, arguments.group, arguments.repeats
                )
            )
        )
        return
    print(
        "| ranks | estimator | draw | divide | advantages | s per million own tokens | MiB more at most | kB of numbers sent |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for estimator in arguments.estimators:
        for num_ranks in arguments.ranks:
            command = [sys.executable, __file__, *sys.argv[1:], "--case", str(num_ranks), estimator]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, env=environment
            )
            case = json.loads(done.stdout.splitlines()[-1])
            times = [case["seconds"][stage] / case["tokens"] * 1e6 for stage in STAGES]
            print(
                f"| {num_ranks} | {estimator} | {' | '.join(f'{x:.3f}' for x in times)} | {sum(times):.3f} | {case['mib']:.0f} | "
                f"{case['kb']:,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
