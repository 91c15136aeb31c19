"""Ranks that share sequences as these need it (engine.context_parallel_size=auto), against a fixed number of ranks that share all.

    python benchmarks/dynamic_cp.py [--shapes 0.5B 7B] [--ranks 8 64 512]            simulated, on a CPU
    torchrun --nproc-per-node 2 benchmarks/dynamic_cp.py --measure 0.5B engine.param_dtype=bfloat16 [model_engine=megatron]

A step has --sequences per rank, whose lengths are log-normal between --shortest and --longest tokens. Each rank has room for --cap
tokens; n ranks that share have room for n times as many. Simulated: the share of the ranks' time that is used, if passes take as
long as the rank with most FLOPs and ranks that share lose nothing by it. Measured: FSDP2 (or model_engine=megatron) takes the same
steps in each way in turn; fixed numbers of ranks that cannot hold the longest are left out. Prints a Markdown table.
"""

import argparse
import gc
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig

from benchmarks.shapes import SHAPES, make_model
from config import load
from data.batching.batch import Batch
from data.batching.groups import schedule
from data.batching.packing import pack, partition, spread
from data.batching.plan import Plan
from engines.build import engine_class
from engines.parallel import device


def draw(count: int, seed: int, shortest: int, longest: int, median: int) -> list[int]:
    lengths = np.random.default_rng(seed).lognormal(np.log(median), 1.3, count)
    return lengths.clip(shortest, longest).astype(int).tolist()


# -- simulated -----------------------------------------------------------------------------------------------------------


def flops_of(shape: str):
    """A function of a sequence's length."""
    from engines.model.flops import count_flops
    from engines.model.hf import build_on_meta

    vocab_size, hidden, intermediate, layers, heads, kv_heads, tied = SHAPES[shape]
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
    )
    in_layers, in_head, in_attention = count_flops(build_on_meta(config, torch.float32), config)
    return lambda length: float((in_layers + in_head) * length + in_attention * length**2)


def fixed(
    lengths: list[int], costs: list[float], num_ranks: int, size: int, cap: int
) -> float | None:
    """The share of time that is used with groups of one size, as the engine divides a batch; None: they cannot hold it."""
    if max(lengths) > cap * size:
        return None
    shares, passes = partition(costs, num_ranks // size), []
    bins = [pack([lengths[i] for i in share], cap * size) for share in shares]
    for share, of_share in zip(shares, bins):
        of_share = spread(of_share, max(map(len, bins)), [lengths[i] for i in share])
        passes.append([sum(costs[share[i]] for i in members) for members in of_share])
    return sum(costs) / len(shares) / sum(map(max, zip(*passes)))


def simulate(arguments) -> None:
    sizes = [1 << k for k in range(max(arguments.ranks).bit_length()) if 1 << k <= 16]
    print(
        "| model | ranks | sequences | auto | tokens in groups of 1, 2, 4, ... | ms to plan | "
        + " | ".join(f"fixed {size}" for size in sizes)
        + " |\n"
        + "|---" * (6 + len(sizes))
        + "|"
    )
    for shape in arguments.shapes:
        flops = flops_of(shape)
        for num_ranks in arguments.ranks:
            lengths = draw(
                arguments.sequences * num_ranks,
                0,
                arguments.shortest,
                arguments.longest,
                arguments.median,
            )
            costs = [flops(n) for n in lengths]
            start = time.perf_counter()
            plan = Plan.of(
                schedule(lengths, costs, num_ranks, arguments.cap, lambda size: 1),
                0,
                lengths,
                costs,
            )
            seconds = time.perf_counter() - start
            of_size = [
                amount / sum(lengths) for name, amount in plan.metrics.items() if "/cp_" in name
            ]
            used = [
                fixed(lengths, costs, num_ranks, size, arguments.cap) if size <= num_ranks else None
                for size in sizes
            ]
            print(
                f"| {shape} | {num_ranks} | {len(lengths)} | {plan.metrics['perf/plan_efficiency']:.1%} | "
                f"{', '.join(f'{x:.0%}' for x in of_size[:6])} | {1e3 * seconds:.0f} | "
                + " | ".join("-" if x is None else f"{x:.1%}" for x in used)
                + " |",
                flush=True,
            )


# -- measured ------------------------------------------------------------------------------------------------------------


def measure(arguments) -> None:
    this_device = device.init()
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        make_model(arguments.measure, arguments.models)
        print(
            "| model | ranks | sharing | tokens/s per rank (each step) | against the first | time used | peak GiB | loss |\n"
            + "|---" * 8
            + "|"
        )
    dist.barrier()
    batches = [make_batch(arguments, world, seed) for seed in range(arguments.steps)]
    sizes, first = [size for size in (1, 2, 4, 8) if size <= world and world % size == 0], None
    for way in [
        *(str(size) for size in sizes if arguments.longest <= arguments.cap * size),
        "auto",
    ]:
        cap = arguments.cap * (1 if way == "auto" else int(way))
        config = load(
            "sft.yaml",
            [
                f"model.path={arguments.models / arguments.measure}",
                "data.train_files=none",
                f"data.train_batch_size={world}",
                f"data.max_tokens_per_micro_batch={cap}",
                f"engine.context_parallel_size={way}",
                *arguments.settings,
            ],
        )
        engine = engine_class(config.model_engine)(config, this_device, total_steps=1000)
        speeds, losses, used = [], [], []
        torch.accelerator.reset_peak_memory_stats() if torch.accelerator.is_available() else None
        for number, batch in enumerate([batches[0], *batches]):  # the first warms up
            start = device.synchronize()
            plan = engine.plan(batch.lengths)
            tokens = len(batch.input_ids)
            loss_fn = lambda log_probs, *_, tokens=tokens: (-log_probs.sum() / tokens, {})
            losses.append(
                engine.train_batch(
                    batch.select(plan.sequences), loss_fn, number, plan.micro_batches
                )["loss"]
            )
            speeds.append(tokens / (device.synchronize() - start) / world)
            used.append(plan.metrics.get("perf/plan_efficiency", float("nan")))
        median = sorted(speeds[1:])[len(speeds[1:]) // 2]
        first = first or median
        if rank == 0:
            print(
                f"| {arguments.measure} | {world} | {way} | {median:,.0f} ({', '.join(f'{x:,.0f}' for x in speeds[1:])}) | "
                f"{median / first:.2f} | {np.mean(used[1:]):.1%} | {device.memory()['perf/memory_peak_gib']:.1f} | "
                f"{losses[0]:.5f} |",
                flush=True,
            )
        del engine
        gc.collect()
        torch.accelerator.empty_cache() if torch.accelerator.is_available() else None
    device.shutdown()


def make_batch(arguments, world: int, seed: int) -> Batch:
    lengths = draw(
        arguments.sequences * world, seed, arguments.shortest, arguments.longest, arguments.median
    )
    ids = torch.from_numpy(
        np.random.default_rng(seed).integers(0, SHAPES[arguments.measure][0], sum(lengths))
    )
    return Batch(ids, torch.tensor([0, *lengths]).cumsum(0), {"loss_mask": torch.ones(len(ids))})


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", help="key=value, to measure with")
    parser.add_argument("--measure", choices=SHAPES)
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/rankwise-models"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5B", "7B"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--shortest", type=int, default=1024)
    parser.add_argument(
        "--median", type=int, help="tokens; of the log-normal distribution, whose sigma is 1.3"
    )
    parser.add_argument("--longest", type=int)
    parser.add_argument("--cap", type=int)
    arguments = parser.parse_intermixed_args()
    defaults = (
        {"median": 3072, "longest": 32768, "cap": 16384}
        if arguments.measure
        else {"median": 6144, "longest": 131072, "cap": 32768}
    )
    for name, value in defaults.items():
        setattr(arguments, name, getattr(arguments, name) or value)
    measure(arguments) if arguments.measure else simulate(arguments)


if __name__ == "__main__":
    main()
