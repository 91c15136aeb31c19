"""Context parallelism chosen per batch, compared with fixed context-parallel sizes.

    # simulated, on a CPU
    python benchmarks/dynamic_cp.py [--shapes 0.5B 7B] [--ranks 8 64 512]
    # measured
    torchrun --nproc-per-node 2 benchmarks/dynamic_cp.py --measure 0.5B \\
        engine.param_dtype=bfloat16 [model_engine=megatron]

This compares engine.context_parallel_size=auto with fixed sizes. A step has --sequences
sequences per rank, whose lengths are log-normal between --shortest and --longest tokens. Each rank
has room for --cap tokens; n ranks that share have room for n times as many.

Simulated: the share of the ranks' time that is used, if a pass takes as long as its busiest rank. A
rank's time is that of its FLOPs, where those of attention take longer than others. Sharing costs
nothing, unless --costs has the numbers of engine.context_parallel_costs for the one shape of
--shapes. Measured: FSDP2 (or model_engine=megatron) takes the same steps with each value in turn,
and then takes all of them again: the first time, new lengths may compile kernels, open connections
between ranks, and allocate memory. Fixed numbers of ranks that cannot hold the longest sequence are
left out. Prints a Markdown table.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from transformers import AutoConfig

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
from data.batching.groups import PassRules, schedule
from data.batching.packing import pack, partition, split_micro_batches
from data.batching.plan import Group, PassCosts, Plan, total_time
from engines.base import Engine
from engines.build import engine_class
from engines.parallel import device
from engines.pass_costs import measured_costs

SIGMA = 1.3  # of the log-normal distribution of lengths
LARGEST_FIXED = 16  # ranks that share all sequences, simulated
COSTS_KEY = "engine.context_parallel_costs="
MEASURED_SIZES = (1, 2, 4, 8)
# Tokens, unless options say otherwise.
MEASURED_DEFAULTS = {"median": 3072, "longest": 32768, "cap": 16384}
SIMULATED_DEFAULTS = {"median": 6144, "longest": 131072, "cap": 32768}


def draw_lengths(arguments: argparse.Namespace, num_ranks: int, seed: int) -> list[int]:
    """Return the lengths of the sequences of a step."""
    count = arguments.sequences * num_ranks
    drawn = np.random.default_rng(seed).lognormal(np.log(arguments.median), SIGMA, count)
    return drawn.clip(arguments.shortest, arguments.longest).astype(int).tolist()


# ---- simulated ----


def cost_of_shape(shape: str) -> Callable[[int], float]:
    """Return a function that maps the length of a sequence to its time, as FLOPs."""
    from engines.model.flops import cost_of_length, count_flops
    from engines.model.hf import build_on_meta

    config = AutoConfig.for_model("qwen2", **SHAPES[shape].settings())
    flops = count_flops(build_on_meta(config, torch.float32), config)
    return lambda length: cost_of_length(flops, length)


def fixed_efficiency(
    lengths: list[int],
    costs: list[float],
    num_ranks: int,
    size: int,
    cap: int,
    pass_costs: PassCosts,
) -> float | None:
    """Return the share of time that is used with groups of one size, divided as engines divide.

    None if there are no groups of this size, or they cannot hold the longest sequence.
    """
    if size > num_ranks or max(lengths) > cap * size:
        return None
    shares = partition(costs, num_ranks // size)
    packed_shares = []
    for share in shares:
        share_lengths = [lengths[i] for i in share]
        packed_shares.append(pack(share_lengths, cap * size))
    num_passes = max(len(micro_batches) for micro_batches in packed_shares)
    groups_of_shares = []
    for number, (share, micro_batches) in enumerate(zip(shares, packed_shares)):
        share_lengths = [lengths[i] for i in share]
        groups = []
        for members in split_micro_batches(micro_batches, num_passes, share_lengths):
            groups.append(Group(number * size, size, [share[i] for i in members]))
        groups_of_shares.append(groups)
    passes = [[*groups] for groups in zip(*groups_of_shares)]
    return sum(costs) / num_ranks / total_time(passes, costs, pass_costs)


def simulate(arguments: argparse.Namespace) -> None:
    largest = min(max(arguments.ranks), LARGEST_FIXED)
    sizes = [1 << exponent for exponent in range(largest.bit_length())]
    print_header(
        "model",
        "ranks",
        "sequences",
        "auto",
        "tokens in groups of 1, 2, 4, ...",
        "ms to plan",
        *(f"fixed {size}" for size in sizes),
    )
    for shape in arguments.shapes:
        cost_of_length = cost_of_shape(shape)
        for num_ranks in arguments.ranks:
            lengths = draw_lengths(arguments, num_ranks, seed=0)
            costs = [cost_of_length(length) for length in lengths]
            print_simulation(shape, num_ranks, lengths, costs, sizes, arguments)


def print_simulation(
    shape: str,
    num_ranks: int,
    lengths: list[int],
    costs: list[float],
    sizes: Sequence[int],
    arguments: argparse.Namespace,
) -> None:
    """Print a row of the table. costs: the time of each sequence, in any unit."""
    cap = arguments.cap
    pass_costs = PassCosts()
    rules = PassRules()
    if arguments.costs:
        pass_costs = measured_costs(*arguments.costs)
        rules = PassRules(costs=pass_costs)
    start = time.perf_counter()
    passes = schedule(lengths, costs, num_ranks, cap, multiple=lambda size: 1, rules=rules)
    plan = Plan.of(passes, 0, lengths, costs)
    seconds = time.perf_counter() - start
    num_tokens = sum(lengths)
    shares = [
        f"{amount / num_tokens:.0%}" for name, amount in plan.metrics.items() if "/cp_" in name
    ]
    efficiency_of_auto = sum(costs) / num_ranks / total_time(passes, costs, pass_costs)
    efficiencies = []
    for size in sizes:
        efficiencies.append(fixed_efficiency(lengths, costs, num_ranks, size, cap, pass_costs))
    print_row(
        shape,
        num_ranks,
        len(lengths),
        f"{efficiency_of_auto:.1%}",
        ", ".join(shares[:6]),
        f"{1e3 * seconds:.0f}",
        *("-" if efficiency is None else f"{efficiency:.1%}" for efficiency in efficiencies),
    )


# ---- measured ----


class Measurement:
    """The measured steps with one context-parallel size.

    Attributes:
        speeds: tokens per second and rank of each step.
        losses: the loss of each step.
        efficiencies: the share of the ranks' time that is used, as far as FLOPs tell; empty unless
            the size is chosen per batch.
    """

    def __init__(self):
        self.speeds: list[float] = []
        self.losses: list[float] = []
        self.efficiencies: list[float] = []

    def take_step(self, engine: Engine, batch: Batch, number: int) -> None:
        num_tokens = len(batch.input_ids)

        def loss_fn(log_probs, entropy, fields):
            return -log_probs.sum() / num_tokens, {}

        start = device.synchronize()
        plan = engine.plan(batch.lengths)
        share = batch.select(plan.sequences)
        metrics = engine.train_batch(share, loss_fn, number, plan.micro_batches)
        seconds = device.synchronize() - start
        self.losses.append(metrics["loss"])
        self.speeds.append(num_tokens / seconds / dist.get_world_size())
        if "perf/plan_efficiency" in plan.metrics:
            self.efficiencies.append(plan.metrics["perf/plan_efficiency"])

    @property
    def first_speeds(self) -> list[float]:
        """Return the speeds of the steps whose batch is new; the warm-up step is left out."""
        return self.speeds[1 : 1 + (len(self.speeds) - 1) // 2]

    @property
    def repeated_speeds(self) -> list[float]:
        """Return the speeds of the steps whose batch has been trained on before."""
        return self.speeds[1 + (len(self.speeds) - 1) // 2 :]

    @property
    def speed(self) -> float:
        return median(self.repeated_speeds)


def measured_ways(arguments: argparse.Namespace, num_ranks: int) -> list[str]:
    """Return the values of engine.context_parallel_size that can hold the longest sequence."""
    ways = []
    for size in MEASURED_SIZES:
        can_hold_longest = arguments.longest <= arguments.cap * size
        if num_ranks % size == 0 and can_hold_longest:
            ways.append(str(size))
    return [*ways, "auto"]


def load_config(arguments: argparse.Namespace, way: str) -> DictConfig:
    cap = arguments.cap if way == "auto" else arguments.cap * int(way)
    settings_of_run = arguments.settings
    if way != "auto":
        # Fixed sizes reject the costs of a pass, since they have no use for them.
        settings_of_run = [pair for pair in settings_of_run if not pair.startswith(COSTS_KEY)]
    settings = [
        *model_settings(arguments.models / arguments.measure),
        f"data.train_batch_size={dist.get_world_size()}",
        f"data.max_tokens_per_micro_batch={cap}",
        f"engine.context_parallel_size={way}",
        *settings_of_run,
    ]
    return load("sft.yaml", settings)


def make_batch(arguments: argparse.Namespace, seed: int) -> Batch:
    """Return a batch of random tokens for all ranks."""
    lengths = draw_lengths(arguments, dist.get_world_size(), seed)
    vocab_size = SHAPES[arguments.measure].vocab_size
    ids = np.random.default_rng(seed).integers(0, vocab_size, sum(lengths))
    fields = {"loss_mask": torch.ones(len(ids))}
    return Batch(torch.from_numpy(ids), make_cu_seqlens(torch.tensor(lengths)), fields)


def measure_way(
    arguments: argparse.Namespace, way: str, batches: list[Batch], this_device: torch.device
) -> Measurement:
    config = load_config(arguments, way)
    engine = engine_class(config.model_engine)(config, this_device, total_steps=1000)
    if torch.accelerator.is_available():
        torch.accelerator.reset_peak_memory_stats()
    measurement = Measurement()
    warm_up = batches[:1]
    for number, batch in enumerate([*warm_up, *batches, *batches]):
        measurement.take_step(engine, batch, number)
    return measurement


def in_one_cell(speeds: Sequence[float]) -> str:
    return ", ".join(f"{speed:,.0f}" for speed in speeds)


def free_memory() -> None:
    """Forget the last engine and what was compiled for it, which can slow the next one down."""
    torch.compiler.reset()
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def measure(arguments: argparse.Namespace) -> None:
    this_device = device.init()
    is_first_rank = dist.get_rank() == 0
    num_ranks = dist.get_world_size()
    if is_first_rank:
        make_model(arguments.measure, arguments.models)
        print_header(
            "model",
            "ranks",
            "sharing",
            "tokens/s per rank of each step",
            "again: median (each step)",
            "relative to the first",
            "time used",
            "peak GiB",
            "loss",
        )
    dist.barrier()
    batches = [make_batch(arguments, seed) for seed in range(arguments.steps)]
    first_speed = None
    for way in arguments.ways or measured_ways(arguments, num_ranks):
        measurement = measure_way(arguments, way, batches, this_device)
        if first_speed is None:
            first_speed = measurement.speed
        efficiencies = measurement.efficiencies[1:]
        if is_first_rank:
            print_row(
                arguments.measure,
                num_ranks,
                way,
                in_one_cell(measurement.first_speeds),
                f"{measurement.speed:,.0f} ({in_one_cell(measurement.repeated_speeds)})",
                f"{measurement.speed / first_speed:.2f}",
                f"{np.mean(efficiencies):.1%}" if efficiencies else "-",
                f"{device.memory()['perf/memory_peak_gib']:.1f}",
                f"{measurement.losses[0]:.5f}",
            )
        free_memory()
    device.shutdown()


# ---- the command ----


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_settings(parser)
    parser.add_argument(
        "--measure",
        choices=SHAPES,
        metavar="SHAPE",
        help="measure steps instead of simulating them",
    )
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--steps", type=int, default=5, help="to measure")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5B", "7B"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512], help="to simulate")
    parser.add_argument(
        "--ways", nargs="+", help="to measure only these values of engine.context_parallel_size"
    )
    parser.add_argument("--costs", type=float, nargs=4, help="to simulate what sharing costs")
    parser.add_argument("--sequences", type=int, default=16, help="per rank and step")
    parser.add_argument("--shortest", type=int, default=1024, help="tokens")
    parser.add_argument(
        "--median", type=int, help=f"tokens, of the log-normal distribution with sigma {SIGMA}"
    )
    parser.add_argument("--longest", type=int, help="tokens")
    parser.add_argument("--cap", type=int, help="tokens that a rank has room for")
    arguments = parser.parse_intermixed_args()
    if arguments.measure and arguments.costs:
        parser.error(f"--costs is for simulations; to measure, add {COSTS_KEY}[...]")
    if arguments.ways and not arguments.measure:
        parser.error("--ways is for measurements: add --measure")
    defaults = MEASURED_DEFAULTS if arguments.measure else SIMULATED_DEFAULTS
    for name, value in defaults.items():
        if not getattr(arguments, name):
            setattr(arguments, name, value)
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.measure:
        measure(arguments)
    else:
        simulate(arguments)


if __name__ == "__main__":
    main()
