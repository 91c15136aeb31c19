"""The speed of SFT steps on our engines: Qwen2.5 shapes with random weights, packed batches.

    python benchmarks/sft_h200.py 7B engine.param_dtype=bfloat16 \\
        data.max_tokens_per_micro_batch=16384
    torchrun --nproc-per-node 2 benchmarks/sft_h200.py 7B ... [--profile]
    torchrun --nproc-per-node 2 benchmarks/sft_h200.py 7B model_engine=megatron \\
        engine.tensor_model_parallel_size=2 ...

Arguments: a shape (benchmarks/shapes.py), then key=value pairs of configs/sft.yaml. The lengths of
sequences are log-normal, about 1,000 tokens on average and at most 4,096. With a shape of
Qwen2.5-VL every sequence also begins with an image of about 1,000 tokens. In a step each
data-parallel rank takes --micro-batches micro-batches, which are 97 % full (at least 90 % with
images). Prints one line of a Markdown table on rank 0. --json also writes its numbers to a file.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import DictConfig

from benchmarks.harness import MODELS, add_settings, make_parser, model_settings, print_row
from benchmarks.shapes import IMAGE, NAMES, VISION, make_model
from config import load
from data.batching.batch import Batch, make_cu_seqlens
from data.batching.packing import pack
from data.images.processor import ImageStore, Processor
from engines.base import Engine
from engines.build import engine_class
from engines.memory import GIB
from engines.parallel import device

WARM_UP = 3  # steps that are not counted
NUM_BATCHES = 3  # which steps take in turn
FULL = 0.97  # of the tokens of a micro-batch
LEAST_FULL = 0.9
MEAN_LOG_LENGTH = 6.6
SIGMA = 0.75
SHORTEST = 32
LONGEST = 4096
NUM_BYTES = 256  # the tokens of texts with images
# Kind of kernel -> parts of the names of its kernels. The first kind that matches counts.
KERNELS = {
    "fused elementwise": ("triton",),
    "attention": ("flash",),
    "collectives": ("nccl",),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas"),
    "optimizer": ("adam", "multi_tensor"),
    "FSDP copies": ("chunk_cat", "split_with_sizes", "memcpy dtod", "copy_kernel"),
    "gradient sums": ("add<", "_add"),
}
NUM_KERNELS = 22  # that are listed one by one

Step = Callable[[int], dict[str, float]]


# ---- batches ----


def make_batch(seed: int, tokens: int, micro_batches: int, vocabulary: int) -> Batch:
    """Return sequences of random tokens that fill this many micro-batches of `tokens` tokens."""
    rng = np.random.default_rng(seed)
    lengths = draw_lengths(rng, tokens, micro_batches)
    ids = torch.from_numpy(rng.integers(0, vocabulary, sum(lengths)))
    return packed(ids, lengths)


def make_image_batch(
    seed: int, tokens: int, micro_batches: int, processor: Processor, size: tuple[int, int]
) -> Batch:
    """Return these sequences with an image before every text. size: its height and width."""
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (*size, 3), np.uint8)
    image_ids = torch.tensor(processor.expand(processor.image_token, [image]).tokens.ids)
    lengths = draw_lengths(rng, tokens, micro_batches, num_image_tokens=len(image_ids))
    ids = torch.from_numpy(rng.integers(0, NUM_BYTES, sum(lengths)))
    batch = packed(ids, lengths)
    for start in batch.cu_seqlens[:-1].tolist():
        ids[start : start + len(image_ids)] = image_ids
    batch.rows = torch.zeros(len(lengths), dtype=torch.int64)
    batch.image_store = ImageStore([[image]], processor)
    return batch


def draw_lengths(
    rng: np.random.Generator, tokens: int, micro_batches: int, num_image_tokens: int = 0
) -> list[int]:
    """Return lengths that fit into this many micro-batches and nearly fill them."""
    room = int(FULL * tokens * micro_batches)
    longest = min(LONGEST, tokens)
    lengths = []
    while room > num_image_tokens:
        drawn = int(np.clip(rng.lognormal(MEAN_LOG_LENGTH, SIGMA), SHORTEST, longest))
        length = min(room, num_image_tokens + drawn)
        lengths.append(length)
        room -= length
    while len(pack(lengths, tokens)) > micro_batches:
        lengths.pop()
    share = sum(lengths) / (tokens * micro_batches)
    assert share > LEAST_FULL, f"micro-batches are {share:.0%} full: choose a larger size"
    return lengths


def packed(ids: torch.Tensor, lengths: list[int]) -> Batch:
    return Batch(ids, make_cu_seqlens(torch.tensor(lengths)), {"loss_mask": torch.ones(len(ids))})


# ---- steps ----


@dataclass
class Timing:
    """What one rank measures.

    Attributes:
        warm_up: seconds of the first steps together.
        first_loss: loss of the first step, over all ranks.
        step: seconds of a step, the median of those after the first.
        tokens_per_rank: tokens of one rank per step.
        flops_per_rank: FLOPs of one rank per step, averaged over batches.
        peak_gib: the largest of all ranks.
    """

    warm_up: float
    first_loss: float
    step: float
    tokens_per_rank: float
    flops_per_rank: float
    peak_gib: float


def make_batches(engine: Engine, arguments: argparse.Namespace) -> list[Batch]:
    """Return this rank's shares of the batches that steps take in turn."""
    tokens = engine.config.data.max_tokens_per_micro_batch
    seeds = [1000 * i + engine.dp_rank for i in range(NUM_BATCHES)]
    if engine.processor:
        size = IMAGE[arguments.shape]
        return [
            make_image_batch(seed, tokens, arguments.micro_batches, engine.processor, size)
            for seed in seeds
        ]
    vocabulary = engine.hf_config.vocab_size
    return [make_batch(seed, tokens, arguments.micro_batches, vocabulary) for seed in seeds]


def make_step(engine: Engine, batches: list[Batch]) -> Step:
    """Return a function that takes the optimizer step of this number."""
    denominator = len(batches[0].input_ids) * engine.dp_size

    def loss_fn(log_probs, entropy, fields):
        return -(log_probs * fields["loss_mask"]).sum() / denominator, {}

    def step(number: int) -> dict[str, float]:
        return engine.train_batch(batches[number % NUM_BATCHES], loss_fn, number)

    return step


def time_steps(engine: Engine, batches: list[Batch], step: Step, num_steps: int) -> Timing:
    start = device.synchronize()
    first_losses = [step(number)["loss"] for number in range(WARM_UP)]
    warm_up = device.synchronize() - start
    seconds = []
    for number in range(num_steps):
        start = device.synchronize()
        step(number)
        seconds.append(device.synchronize() - start)
    world_size = dist.get_world_size()
    peaks = [0.0] * world_size
    dist.all_gather_object(peaks, device.memory()["perf/memory_peak_gib"])
    ranks_per_share = world_size / engine.dp_size
    flops = [engine.flops(batch.lengths) + sum(engine.image_flops(batch)) for batch in batches]
    return Timing(
        warm_up=warm_up,
        first_loss=first_losses[0],
        step=sorted(seconds)[len(seconds) // 2],
        tokens_per_rank=len(batches[0].input_ids) / ranks_per_share,
        flops_per_rank=sum(flops) / len(flops) / ranks_per_share,
        peak_gib=max(peaks),
    )


# ---- GPU time by kernel ----


def print_profile(step: Step, rank: int) -> None:
    """Take a step, and print the GPU time of each kind of kernel and of the slowest kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        start = device.synchronize()
        step(0)
        seconds = device.synchronize() - start
    if rank > 0:
        return
    milliseconds_by_kind = defaultdict(float)
    rows = []
    for event in recorded.key_averages():
        milliseconds = event.self_device_time_total / 1e3
        milliseconds_by_kind[kind_of_kernel(event.key)] += milliseconds
        rows.append((milliseconds, event.count, event.key[:110]))
    totals = {"wall ms": round(seconds * 1e3)}
    for kind, milliseconds in milliseconds_by_kind.items():
        totals[kind] = round(milliseconds, 1)
    print(json.dumps(totals))
    for milliseconds, count, name in sorted(rows, reverse=True)[:NUM_KERNELS]:
        print(f"  {milliseconds:8.1f} ms {count:6d} {name}")


def kind_of_kernel(name: str) -> str:
    for kind, parts in KERNELS.items():
        if any(part in name.lower() for part in parts):
            return kind
    return "other"


# ---- the command ----


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("shape", choices=NAMES)
    add_settings(parser)
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print where a step's GPU time goes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    return parser.parse_intermixed_args()


def load_config(arguments: argparse.Namespace) -> DictConfig:
    has_images = arguments.shape in VISION
    settings = [
        *model_settings(arguments.models / arguments.shape),
        f"model.images={str(has_images).lower()}",
        *arguments.settings,
    ]
    return load("sft.yaml", settings)


@dataclass
class Result:
    """The numbers of a row.

    Attributes:
        tokens_per_second: of each device.
        mfu: model FLOPs utilization; nan if the peak of the device is unknown.
        peak_gib, estimated_gib: memory of the device, of the rank that has most.
        step: seconds.
    """

    tokens_per_second: float
    mfu: float
    peak_gib: float
    estimated_gib: float
    step: float


def make_result(config: DictConfig, this_device: torch.device, timing: Timing) -> Result:
    peak_flops = device.peak_flops(this_device) or float("nan")
    engine = engine_class(config.model_engine)
    estimates = engine.estimate_memory(config, dist.get_world_size(), this_device.type)
    return Result(
        tokens_per_second=timing.tokens_per_rank / timing.step,
        mfu=timing.flops_per_rank / timing.step / peak_flops,
        peak_gib=timing.peak_gib,
        estimated_gib=max(estimate.device_total for estimate in estimates) / GIB,
        step=timing.step,
    )


def print_result(
    arguments: argparse.Namespace,
    config: DictConfig,
    result: Result,
    timing: Timing,
    loading: float,
) -> None:
    """Print the line of the table. loading: seconds until the engine was built."""
    print_row(
        arguments.shape,
        dist.get_world_size(),
        config.data.max_tokens_per_micro_batch,
        " ".join(setting for setting in arguments.settings if "max_tokens" not in setting),
        f"{result.tokens_per_second:,.0f}",
        f"{result.mfu:.1%}",
        f"{result.peak_gib:.1f} ({result.estimated_gib:.1f})",
        f"{result.step:.3f}",
        note=f"  load {loading:.1f} s, first {WARM_UP} steps {timing.warm_up:.1f} s, "
        f"loss {timing.first_loss:.4f}",
    )


def main() -> None:
    arguments = parse_arguments()
    this_device = device.init()
    rank = dist.get_rank()
    if rank == 0:
        make_model(arguments.shape, arguments.models)
    dist.barrier()
    config = load_config(arguments)
    start = time.perf_counter()
    engine = engine_class(config.model_engine)(config, this_device, total_steps=1000)
    loading = time.perf_counter() - start
    batches = make_batches(engine, arguments)
    step = make_step(engine, batches)
    timing = time_steps(engine, batches, step, arguments.steps)
    if rank == 0:
        result = make_result(config, this_device, timing)
        print_result(arguments, config, result, timing, loading)
        if arguments.json:
            arguments.json.write_text(json.dumps(asdict(result)))
    if arguments.profile:
        print_profile(step, rank)
    device.shutdown()


if __name__ == "__main__":
    main()
