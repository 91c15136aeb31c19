"""What a pass costs when every rank has a sequence of its own, and when all ranks share one.

    torchrun --nproc-per-node 2 benchmarks/cp_cost.py 0.5B engine.param_dtype=bfloat16

engine.context_parallel_size=auto saves communication by leaving short sequences on one rank. This
measures how much there is to save: the same sequences in one pass, divided over ranks ("alone"),
or each of them shared by all ranks ("shared"). A rank computes the same number of tokens and FLOPs
in both. The last line is the setting with which plans count these costs. Choose the shape that is
closest to your model, the same layout, and --tokens from a few up to
data.max_tokens_per_micro_batch.

Arguments: a shape of benchmarks/shapes.py, then key=value pairs of configs/sft.yaml. The time of a
pass, forward and backward, is the time that --passes extra passes add to a step, divided by their
number, so that the optimizer does not count. Prints a Markdown table.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from benchmarks.harness import (
    MODELS,
    add_settings,
    make_parser,
    model_settings,
    print_header,
    print_row,
)
from benchmarks.shapes import SHAPES, make_model
from config import load
from data.batching.batch import Batch, make_cu_seqlens
from engines.base import Engine
from engines.build import engine_class
from engines.parallel import device

# A pass of at least so many times the least time is limited by its work.
LONGER = 1.25


@dataclass(frozen=True)
class Work:
    """What a rank does in a pass.

    Attributes:
        group_size: the number of ranks that share each sequence.
        length: tokens of each sequence.
        count: the number of sequences in its group's micro-batch.
    """

    group_size: int
    length: int
    count: int


def make_share(work: Work, num_passes: int, vocab_size: int) -> Batch:
    """Return this rank's share of a batch: the sequences of all its passes."""
    # Ranks that share a sequence need the same tokens.
    generator = torch.Generator().manual_seed(dist.get_rank() // work.group_size)
    lengths = [work.length] * work.count * num_passes
    ids = torch.randint(0, vocab_size, (sum(lengths),), generator=generator)
    fields = {"loss_mask": torch.ones(len(ids))}
    return Batch(ids, make_cu_seqlens(torch.tensor(lengths)), fields)


def seconds_of_step(engine: Engine, work: Work, num_passes: int, vocab_size: int) -> float:
    share = make_share(work, num_passes, vocab_size)
    micro_batches = []
    for number in range(num_passes):
        first = number * work.count
        micro_batches.append((work.group_size, list(range(first, first + work.count))))
    num_tokens = len(share.input_ids) * dist.get_world_size()

    def loss_fn(log_probs, entropy, fields):
        return -log_probs.sum() / num_tokens, {}

    start = device.synchronize()
    engine.train_batch(share, loss_fn, 0, micro_batches)
    return device.synchronize() - start


def seconds_of_pass(engine: Engine, work: Work, arguments: argparse.Namespace) -> float:
    """Return the median over --repeats of the seconds of a pass."""
    vocab_size = SHAPES[arguments.shape].vocab_size
    seconds = []
    for _ in range(arguments.repeats + 1):
        short = seconds_of_step(engine, work, 1, vocab_size)
        long = seconds_of_step(engine, work, 1 + arguments.passes, vocab_size)
        seconds.append((long - short) / arguments.passes)
    return median(seconds[1:])


@dataclass(frozen=True)
class Row:
    """The time of a pass.

    Attributes:
        num_tokens: tokens of each rank.
        cost: the work of each rank, see cost_of_length() in engines/model/flops.py.
    """

    num_tokens: int
    cost: float
    seconds_alone: float
    seconds_shared: float

    @property
    def ratio(self) -> float:
        return self.seconds_shared / self.seconds_alone

    @property
    def speed(self) -> float:
        return self.cost / self.seconds_alone


def costs_setting(rows: list[Row]) -> str:
    """Return engine.context_parallel_costs as measured.

    The least times are those of the fastest passes. The largest pass determines the speed, and how
    much sharing slows it down, unless it takes hardly longer than it takes to start.
    """
    if min(min(row.seconds_alone, row.seconds_shared) for row in rows) <= 0:
        return "no setting: longer steps took less time than shorter ones; raise --passes"
    smallest = min(rows, key=lambda row: row.num_tokens)
    largest = max(rows, key=lambda row: row.num_tokens)
    if largest.speed < LONGER * smallest.speed:
        return (
            "no setting: even the smallest pass takes longer than its start; add smaller --tokens"
        )
    alone = min(row.seconds_alone for row in rows)
    shared = max(alone, min(row.seconds_shared for row in rows))
    is_limited_by_work = (
        largest.seconds_alone > LONGER * alone and largest.seconds_shared > LONGER * shared
    )
    slowdown = max(0.0, largest.ratio - 1) if is_limited_by_work else 0.0
    numbers = f"{largest.speed / 1e12:.3g},{1e3 * alone:.1f},{1e3 * shared:.1f},{slowdown:.2f}"
    return f"engine.context_parallel_costs=[{numbers}]"


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("shape", choices=SHAPES)
    add_settings(parser)
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--count", type=int, default=4, help="sequences of each rank in a pass")
    parser.add_argument("--passes", type=int, default=4, help="extra passes of the longer steps")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_intermixed_args()


def main() -> None:
    arguments = parse_arguments()
    this_device = device.init()
    num_ranks = dist.get_world_size()
    is_first_rank = dist.get_rank() == 0
    if is_first_rank:
        make_model(arguments.shape, arguments.models)
        print_header("shape", "ranks", "tokens per rank", "alone ms", "shared ms", "shared / alone")
    dist.barrier()
    settings = [
        *model_settings(arguments.models / arguments.shape),
        f"data.train_batch_size={num_ranks}",
        f"data.max_tokens_per_micro_batch={max(arguments.tokens)}",
        "engine.context_parallel_size=auto",
        *arguments.settings,
    ]
    config = load("sft.yaml", settings)
    engine = engine_class(config.model_engine)(config, this_device, total_steps=1000)
    rows = []
    for num_tokens in arguments.tokens:
        length = num_tokens // arguments.count
        alone = Work(1, length, arguments.count)
        shared = Work(num_ranks, length, arguments.count * num_ranks)
        row = Row(
            num_tokens,
            arguments.count * engine.cost(length),
            seconds_of_pass(engine, alone, arguments),
            seconds_of_pass(engine, shared, arguments),
        )
        rows.append(row)
        if is_first_rank:
            print_row(
                arguments.shape,
                num_ranks,
                num_tokens,
                f"{1e3 * row.seconds_alone:.1f}",
                f"{1e3 * row.seconds_shared:.1f}",
                f"{row.ratio:.2f}",
            )
    if is_first_rank and num_ranks > 1:
        print(f"\n{costs_setting(rows)}", flush=True)
    device.shutdown()


if __name__ == "__main__":
    main()
