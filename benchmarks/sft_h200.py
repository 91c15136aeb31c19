"""Speed of SFT steps: Qwen2.5 shapes with random weights, packed batches, the product's own engine.

    python benchmarks/sft_h200.py 7B engine.param_dtype=bfloat16 data.max_tokens_per_micro_batch=16384
    torchrun --nproc-per-node 2 benchmarks/sft_h200.py 7B ... [--profile]
    torchrun --nproc-per-node 2 benchmarks/sft_h200.py 7B model_engine=megatron engine.tensor_model_parallel_size=2 ...

Arguments: a shape (benchmarks/shapes.py), then key=value pairs of configs/sft.yaml. Sequence lengths are log-normal, about 1,000
tokens on average, at most 4,096; with a shape of Qwen2.5-VL each begins with an image of about 1,000 tokens besides. In a step each
data-parallel rank takes --micro-batches micro-batches, which are 97 % full (at least 90 % with images). Prints one line of a
Markdown table on rank 0.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.shapes import IMAGE, NAMES, VISION, make_model
from config import load
from data.batching.batch import Batch
from data.batching.packing import pack
from data.images.processor import Pictures
from engines.build import engine_class
from engines.memory import GIB
from engines.parallel import device


def make_batch(
    seed: int, tokens: int, micro_batches: int, vocabulary: int, reader=None, size=None
) -> Batch:
    """Sequences that fill this many micro-batches to 97 %; if there is a reader, each with an image of that size (height,
    width), and to 90 % at least."""
    rng = np.random.default_rng(seed)
    lengths, room, first, pictures = (
        [],
        int(0.97 * tokens * micro_batches),
        torch.empty(0, dtype=torch.int64),
        None,
    )
    if reader:
        image = rng.integers(0, 256, (*size, 3), np.uint8)
        first, pictures = (
            torch.tensor(reader.expand(reader.image_token, [image]).tokens.ids),
            Pictures([[image]], reader),
        )
    while room > len(first):
        lengths.append(min(room, len(first) + int(np.clip(rng.lognormal(6.6, 0.75), 32, 4096))))
        room -= lengths[-1]
    while len(pack(lengths, tokens)) > micro_batches:
        lengths.pop()
    assert sum(lengths) > 0.9 * tokens * micro_batches
    ids = torch.from_numpy(rng.integers(0, 256 if reader else vocabulary, sum(lengths)))
    for start in np.cumsum([0, *lengths[:-1]]):
        ids[start : start + len(first)] = first
    return Batch(
        ids,
        torch.tensor([0, *lengths]).cumsum(0),
        {"loss_mask": torch.ones(len(ids))},
        torch.zeros(len(lengths), dtype=torch.int64),
        pictures,
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=NAMES)
    parser.add_argument("settings", nargs="*", help="key=value")
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/rankwise-models"))
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print where a step's GPU time goes")
    arguments = parser.parse_intermixed_args()
    this_device = device.init()
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        make_model(arguments.shape, arguments.models)
    dist.barrier()
    config = load(
        "sft.yaml",
        [
            f"model.path={arguments.models / arguments.shape}",
            "data.train_files=none",
            f"model.images={str(arguments.shape in VISION).lower()}",
            *arguments.settings,
        ],
    )
    start = time.perf_counter()
    engine = engine_class(config.model_engine)(config, this_device, total_steps=1000)
    loaded = time.perf_counter() - start
    tokens = config.data.max_tokens_per_micro_batch
    batches = [
        make_batch(
            1000 * s + engine.dp_rank,
            tokens,
            arguments.micro_batches,
            engine.hf_config.vocab_size,
            engine.reader,
            IMAGE.get(arguments.shape),
        )
        for s in range(3)
    ]
    denominator = len(batches[0].input_ids) * engine.dp_size
    loss_fn = lambda log_probs, entropy, fields: (
        -(log_probs * fields["loss_mask"]).sum() / denominator,
        {},
    )

    def step(i):
        return engine.train_batch(batches[i % 3], loss_fn, i)

    start = device.synchronize()
    first = [step(i)["loss"] for i in range(3)]
    warm = device.synchronize() - start
    seconds = []
    for i in range(arguments.steps):
        start = device.synchronize()
        step(i)
        seconds.append(device.synchronize() - start)
    peaks = [None] * world
    dist.all_gather_object(peaks, device.memory()["perf/memory_peak_gib"])
    median = sorted(seconds)[len(seconds) // 2]
    num_tokens = denominator / world
    flops = (
        sum(engine.flops(b.lengths) + sum(engine.image_flops(b)) for b in batches)
        / 3
        * engine.dp_size
        / world
    )
    limit = device.peak_flops(this_device) or float("nan")
    if rank == 0:
        shown = " ".join(s for s in arguments.settings if "max_tokens" not in s)
        estimates = engine_class(config.model_engine).estimate_memory(
            config, world, this_device.type
        )
        guess = max(estimate.device_total for estimate in estimates) / GIB
        print(
            f"| {arguments.shape} | {world} | {tokens} | {shown} | {num_tokens / median:,.0f} | "
            f"{flops / median / limit:.1%} | {max(peaks):.1f} ({guess:.1f}) | {median:.3f} |  load {loaded:.1f} s, first three "
            f"steps {warm:.1f} s, loss {first[0]:.4f}",
            flush=True,
        )
    if arguments.profile:
        profile(step, rank)
    device.shutdown()


def profile(step, rank: int) -> None:
    """GPU time of one step by kind of kernel."""
    kinds = {
        "fused elementwise": ("triton",),
        "attention": ("flash",),
        "collectives": ("nccl",),
        "matrix products": ("gemm", "nvjet", "cutlass", "cublas"),
        "optimizer": ("adam", "multi_tensor"),
        "FSDP copies": ("chunk_cat", "split_with_sizes", "memcpy dtod", "copy_kernel"),
        "gradient sums": ("add<", "_add"),
    }
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        start = device.synchronize()
        step(0)
        wall = device.synchronize() - start
    if rank:
        return
    total, rows = {}, []
    for event in prof.key_averages():
        name, ms = event.key.lower(), event.self_device_time_total / 1e3
        kind = next((k for k, parts in kinds.items() if any(p in name for p in parts)), "other")
        total[kind] = total.get(kind, 0) + ms
        rows.append((ms, event.count, event.key[:110]))
    print(json.dumps({"wall ms": round(wall * 1e3), **{k: round(v, 1) for k, v in total.items()}}))
    for ms, count, name in sorted(rows, reverse=True)[:22]:
        print(f"  {ms:8.1f} ms {count:6d} {name}")


if __name__ == "__main__":
    main()
