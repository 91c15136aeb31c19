"""TRL's half of benchmarks/dpo_gpu.py: print one JSON line about DPOTrainer's steps.

    python benchmarks/trl_dpo.py --model DIR/model --data DIR/pairs.jsonl --steps 12 \\
        --batch-size 32 --micro-batch-size 4 [--precompute] [--dtype float32]

requirements-cpu.txt has TRL. An environment of its own takes

    pip install torch==2.13.0 transformers==5.19.0 trl==1.16.0 accelerate==1.15.0 datasets==5.2.0

Rows have prompt, chosen and rejected as strings, and are used in the order of the file. --dtype is
the dtype of the weights. AdamW, constant learning rate, no gradient checkpointing. With
--precompute, the reference's log-probabilities are computed before the first step, and not counted.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer

from benchmarks.harness import make_parser, read_lines
from benchmarks.trl_peer import (
    add_optimizer_options,
    is_on_cpu,
    report,
    trainer_settings,
    world_size,
)


class Clock(TrainerCallback):
    """Seconds between the ends of optimizer steps, and the loss of each step."""

    def __init__(self):
        self.seconds: list[float] = []
        self.loss: list[float] = []

    def on_train_begin(self, *_, **__):
        self.last_end = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        if not is_on_cpu():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self.last_end)
        self.last_end = now

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            self.loss.append(logs["loss"])


def train(arguments: argparse.Namespace) -> Clock:
    rows_per_pass = arguments.micro_batch_size * world_size()
    if arguments.batch_size % rows_per_pass:
        sys.exit(
            f"error: --batch-size {arguments.batch_size} is not a multiple of {rows_per_pass}, the "
            "pairs that all ranks compute at once: change one of them"
        )
    clock = Clock()
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model,
        dtype=getattr(torch, arguments.dtype),
        attn_implementation=arguments.attention,
    )
    with tempfile.TemporaryDirectory() as scratch:
        settings = DPOConfig(
            **trainer_settings(arguments, scratch),
            bf16=False,  # the weights have the dtype
            per_device_train_batch_size=arguments.micro_batch_size,
            gradient_accumulation_steps=arguments.batch_size // rows_per_pass,
            train_sampling_strategy="sequential",
            max_length=arguments.max_length,
            precompute_ref_log_probs=arguments.precompute,
        )
        trainer = DPOTrainer(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
            train_dataset=Dataset.from_list(read_lines(Path(arguments.data))),
            callbacks=[clock],
            args=settings,
        )
        trainer.train()
    return clock


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="pairs per step")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="pairs in a forward pass")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens")
    parser.add_argument("--precompute", action="store_true", help="reference computed before")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--attention", default="sdpa", help="implementation in transformers")
    parser.add_argument("--out", type=Path, help="write the JSON line to this file too")
    add_optimizer_options(parser, lr=1e-6, weight_decay=0.01)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    clock = train(arguments)
    peak = 0 if is_on_cpu() else torch.cuda.max_memory_allocated()
    result = {
        "step_seconds": clock.seconds,
        "step_loss": clock.loss,
        "peak_gib": peak / 2**30,
    }
    report(result, arguments.out)


if __name__ == "__main__":
    main()
