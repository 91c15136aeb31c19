"""Seconds to move an engine's parameters and optimizer state to host memory and back.

    python benchmarks/offload_h200.py 7B engine.param_dtype=bfloat16 [--rounds 3]

Arguments: a shape of benchmarks/shapes.py, then key=value pairs of configs/ppo.yaml. The weights
are random. Prints lines of a Markdown table. "In the background" is the time that pinning the
optimizer's memory takes while nothing else happens; in a run, vLLM starts meanwhile.
"""

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from omegaconf import DictConfig

from benchmarks.harness import MODELS, add_settings, make_parser, model_settings, print_row
from benchmarks.shapes import SHAPES, make_model
from config import load
from data.batching.batch import Batch
from engines.base import Engine
from engines.build import engine_class
from engines.parallel import device
from engines.parallel.offload import PART_BYTES

BOTH = ("parameters", "optimizer")
NUM_TOKENS = 64  # of the step that gives the optimizer a state


def measure_seconds(work: Callable, *arguments) -> float:
    start = device.synchronize()
    work(*arguments)
    return device.synchronize() - start


def take_step(engine: Engine) -> None:
    """Take an optimizer step on a few tokens, after which the optimizer has a state."""
    batch = Batch(torch.arange(NUM_TOKENS) + 3, torch.tensor([0, NUM_TOKENS]))

    def loss_fn(log_probs, entropy, fields):
        return -log_probs.sum() / NUM_TOKENS, {}

    engine.train_batch(batch, loss_fn, 1)


def load_config(arguments: argparse.Namespace) -> DictConfig:
    settings = [
        *model_settings(arguments.models / arguments.shape),
        "engine.torch_compile=never",
        *arguments.settings,
    ]
    return load("ppo.yaml", settings)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("shape", choices=SHAPES)
    add_settings(parser)
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_intermixed_args()


def main() -> None:
    arguments = parse_arguments()
    this_device = device.init()
    make_model(arguments.shape, arguments.models)
    config = load_config(arguments)
    start = device.synchronize()
    engine = engine_class(config.model_engine)(config, this_device, 10)
    building = device.synchronize() - start
    first_offload = measure_seconds(engine.offload, *BOTH)
    background = measure_seconds(wait, engine.host_memory.parts)
    take_step(engine)
    num_pinned_bytes = len(engine.host_memory.parts) * PART_BYTES
    print_row(
        "shape",
        "start s",
        "first offload of parameters s",
        "in the background s",
        "offload s",
        "onload s",
        "GiB pinned",
    )
    for _ in range(arguments.rounds):
        offload = measure_seconds(engine.offload, *BOTH)
        onload = measure_seconds(engine.onload, *BOTH)
        print_row(
            arguments.shape,
            f"{building:.2f}",
            f"{first_offload:.2f}",
            f"{background:.2f}",
            f"{offload:.3f}",
            f"{onload:.3f}",
            f"{num_pinned_bytes / 2**30:.2f}",
        )
    device.shutdown()


if __name__ == "__main__":
    main()
