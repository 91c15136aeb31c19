"""Seconds that an engine's parameters and optimizer state take to host memory and back.

    python benchmarks/offload_h200.py 7B engine.param_dtype=bfloat16 [--rounds 3]

Arguments: a shape of benchmarks/sft_h200.py, then key=value pairs of configs/ppo.yaml. Random weights. Prints lines of Markdown
tables. In the background: until the memory for the optimizer is pinned, while nothing else happens; in a run vLLM starts then.
"""

import argparse
import sys
from concurrent.futures import wait
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.shapes import SHAPES, make_model
from config import load
from data.batching.batch import Batch
from engines.build import engine_class
from engines.parallel import device
from engines.parallel.offload import PART_BYTES

BOTH = "parameters", "optimizer"


def seconds(work, *arguments) -> float:
    start = device.synchronize()
    work(*arguments)
    return device.synchronize() - start


def step(engine) -> None:
    """An update on 64 tokens: after it, the optimizer has a state."""
    batch = Batch(torch.arange(64) + 3, torch.tensor([0, 64]))
    engine.train_batch(batch, lambda log_probs, *_: (-log_probs.sum() / 64, {}), 1)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("settings", nargs="*", help="key=value")
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/rankwise-models"))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_intermixed_args()
    this_device = device.init()
    make_model(arguments.shape, arguments.models)
    config = load(
        "ppo.yaml",
        [
            f"model.path={arguments.models / arguments.shape}",
            "data.train_files=none",
            "engine.torch_compile=never",
            *arguments.settings,
        ],
    )
    built = device.synchronize()
    engine = engine_class(config.model_engine)(config, this_device, 10)
    built = device.synchronize() - built
    first = seconds(engine.offload, *BOTH)
    memory = engine._host_memory
    background = seconds(wait, memory.parts)
    step(engine)
    print(
        "| shape | start s | first offload of parameters s | in the background s | offload s | onload s | GiB pinned |"
    )
    for _ in range(arguments.rounds):
        there, back = seconds(engine.offload, *BOTH), seconds(engine._onload, *BOTH)
        print(
            f"| {arguments.shape} | {built:.2f} | {first:.2f} | {background:.2f} | {there:.3f} | {back:.3f} | "
            f"{len(memory.parts) * PART_BYTES / 2**30:.2f} |",
            flush=True,
        )
    device.shutdown()


if __name__ == "__main__":
    main()
