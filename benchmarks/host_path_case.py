"""One case of benchmarks/host_path.py: the work of rank 0 of N, as a JSON line.

    python benchmarks/host_path_case.py --ranks 8 --estimator grpo --tokens 1000000 --group 8 \\
        --repeats 5

Generation, decoding, grading and the models are left out: their results are made beforehand. The
other N - 1 ranks are simulated: a collective returns copies of this rank's numbers and tokens in
place of theirs. So nothing waits and nothing is sent, but arrays have their true sizes, and the
bytes that this rank passes to collectives are counted.

The line has "seconds" {stage: the smallest of all steps}, "tokens" of this rank, "mib" that the
steps add to the memory of the process at most, and "kb" of numbers sent per step.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.harness import make_parser
from config import load
from data.batching.batch import Batch, make_cu_seqlens
from data.prompts import Prompt, PromptDataset
from engines.base import Engine
from profiling import Profiler
from rl.estimation import set_advantages
from rl.models import mini_batch_prompts, uses_critic
from rollout.drawing import Request, Sampler
from rollout.grading.grader import Reward
from rollout.sharing import divide

PROMPT_TOKENS = 16
MEAN_LOG_LENGTH = 5.045  # with sigma 1: responses of 256 tokens on average
VOCABULARY = 150_000


# ---- the other ranks ----


class SimulatedRanks:
    """Collectives of N ranks in one process.

    Attributes:
        num_bytes: bytes of the numbers that this rank has passed to all_reduce, without tokens.
    """

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self.num_bytes = 0

    def install(self) -> None:
        """Replace the collectives of torch.distributed."""
        dist.init_process_group("fake", rank=0, world_size=self.num_ranks, store=FakeStore())
        dist.all_reduce = self.all_reduce
        dist.all_to_all_single = self.all_to_all_single
        dist.all_gather_object = self.all_gather_object

    def all_reduce(self, tensor: Tensor, op=None, group=None) -> None:
        self.num_bytes += tensor.nbytes
        if tensor.dim() == 0:
            return  # the other ranks have as many micro-batches
        if tensor.shape == (self.num_ranks,):
            # Each rank's index, or its seconds.
            is_index = tensor.dtype == torch.int64
            tensor.copy_(torch.arange(self.num_ranks) if is_index else tensor[0].clone())
            return
        # Rows of other ranks, which are 0 here, become random rows of this rank.
        is_own = tensor.reshape(len(tensor), -1).any(1)
        num_own = int(is_own.sum())
        num_other = len(tensor) - num_own
        chosen = torch.randint(0, max(num_own, 1), (num_other,))
        tensor[~is_own] = tensor[is_own][chosen]

    def all_to_all_single(
        self, received: Tensor, sent: Tensor, received_sizes, sent_sizes, group=None
    ) -> None:
        num_copies = len(received) // len(sent) + 1
        repeats = [num_copies] + [1] * (sent.dim() - 1)
        received.copy_(sent.repeat(repeats)[: len(received)])

    def all_gather_object(self, received: list, sent, group=None) -> None:
        received[:] = [sent] * self.num_ranks


# ---- what is left out ----


class PlanningEngine(Engine):
    """An engine without a model, which divides batches."""

    def __init__(self, config: DictConfig, num_ranks: int):
        self.config = config
        self.device = "cpu"
        self.dp_rank = 0
        self.dp_size = num_ranks
        self.dp_group = None
        self._flops = (3 * 10**9, 6 * 10**8, 6 * 10**5)

    def padding_multiple(self, group_size: int) -> int:
        return 1


PlanningEngine.__abstractmethods__ = frozenset()


class Prompts(PromptDataset):
    """Prompts that are in no file. The lengths of their last responses are unknown."""

    def __init__(self, num_prompts: int):
        self.lengths = np.full(num_prompts, PROMPT_TOKENS)
        self.drawn_lengths = np.full(num_prompts, np.nan, np.float32)

    def __getitem__(self, index: int) -> Prompt:
        return Prompt([1] * PROMPT_TOKENS, "", {})


@dataclass
class Case:
    """The inputs of a case's steps."""

    config: DictConfig
    dataset: Prompts
    sampler: Sampler
    engine: PlanningEngine
    num_tokens: int


def draw_batch(num_tokens: int, group_size: int) -> Batch:
    """Return prompts and responses with at least this many tokens, in whole groups."""
    lengths = []
    while sum(lengths) < num_tokens or len(lengths) % group_size:
        response = max(1, int(torch.randn(()).add(MEAN_LOG_LENGTH).exp()))
        lengths.append(PROMPT_TOKENS + response)
    lengths = torch.tensor(lengths)
    cu_seqlens = make_cu_seqlens(lengths)
    total = int(lengths.sum())
    positions = torch.arange(total) - torch.repeat_interleave(cu_seqlens[:-1], lengths)
    mask = (positions >= PROMPT_TOKENS).float()
    ids = torch.randint(0, VOCABULARY, (total,))
    return Batch(ids, cu_seqlens, {"loss_mask": mask, "rollout_log_probs": -mask})


def make_case(arguments: argparse.Namespace) -> Case:
    batch = draw_batch(arguments.tokens, arguments.group)
    num_own = len(batch)
    truncated = torch.zeros(num_own, dtype=torch.bool)
    rewards = [Reward(float(i % 3), {}) for i in range(num_own)]
    rollout = SimpleNamespace(
        num_replicas=arguments.ranks,
        replica=0,
        tp_rank=0,
        drafter=None,
        generate=lambda *_: (batch, truncated),
    )
    grader = SimpleNamespace(
        parts=[],
        has_steps=False,
        grade=lambda *_: rewards,
        check_parts=lambda items, results: results,
    )
    tokenizer = SimpleNamespace(batch_decode=lambda *_, **__: [""] * num_own)
    dataset = Prompts(num_own // arguments.group * arguments.ranks)
    settings = [
        "model.path=none",
        "data.train_files=none",
        f"algorithm.adv_estimator={arguments.estimator}",
        f"rollout.n={arguments.group}",
        f"data.train_batch_size={len(dataset)}",
    ]
    config = load("ppo.yaml", settings)
    sampler = Sampler(
        rollout,
        grader,
        tokenizer,
        host_group=None,
        max_failure_rate=1,
        skip_special_tokens=True,
    )
    engine = PlanningEngine(config, arguments.ranks)
    return Case(config, dataset, sampler, engine, len(batch.input_ids))


# ---- the work ----


def take_step(case: Case) -> dict[str, float]:
    """Return the seconds of processor time of each stage."""
    case.dataset.drawn_lengths[:] = np.nan
    start = time.process_time()
    rows = range(len(case.dataset))
    request = Request(case.dataset, rows, case.config.rollout, seed=(0,))
    samples = case.sampler.draw(request, Profiler())
    drawn = time.process_time()
    mini_batches = samples.mini_batches(mini_batch_prompts(case.config))
    share = divide(samples, mini_batches, case.engine)
    divided = time.process_time()
    fields = share.batch.fields
    if uses_critic(case.config):
        fields["values"] = fields["loss_mask"] / 2  # as the critic would return them
    set_advantages(case.config, samples, share, 0.0)
    num_shared = sum(len(part) for part, _ in share.parts)
    assert num_shared == len(share.batch)
    end = time.process_time()
    return {"draw": drawn - start, "divide": divided - drawn, "advantages": end - divided}


def memory_kib(name: str) -> int:
    """Return a size from /proc/self/status, such as VmRSS."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise KeyError(name)


def measure(arguments: argparse.Namespace) -> dict:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ranks = SimulatedRanks(arguments.ranks)
    ranks.install()
    case = make_case(arguments)
    before = memory_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the peak, begins anew
    steps = [take_step(case) for _ in range(arguments.repeats)]
    peak = memory_kib("VmHWM")
    seconds = {}
    for stage in steps[0]:
        seconds[stage] = min(step[stage] for step in steps)
    return {
        "seconds": seconds,
        "tokens": case.num_tokens,
        "mib": (peak - before) / 2**10,
        "kb": ranks.num_bytes / arguments.repeats / 1e3,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--estimator", required=True)
    parser.add_argument("--tokens", type=int, required=True, help="of one rank, at least")
    parser.add_argument("--group", type=int, required=True, help="responses to a prompt")
    parser.add_argument("--repeats", type=int, required=True)
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
