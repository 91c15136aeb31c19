"""TRL's SFTTrainer on the work of benchmarks/sft_h200.py, on one device, in bf16.

    python benchmarks/trl_sft_h200.py 7B [--lora 16] [--liger] [--steps 5]

The sequences and micro-batches are the same. A micro-batch is one row without padding, whose
position_ids begin anew with every sequence, as TRL recommends; nothing is recomputed. --lora takes
peft's adapters of this rank on all linear layers and freezes the rest.

Needs trl, and on a GPU flash-attn, for attention that stays within sequences (--attention sdpa
builds a mask instead, which is the default on a CPU). Prints a line of the Markdown table of
sft_h200.py, with the same count of FLOPs.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.harness import MODELS, flops_of_lengths, make_parser, model_settings, print_row
from benchmarks.sft_h200 import NUM_BATCHES, WARM_UP, make_batch
from benchmarks.shapes import SHAPES, make_model
from config import load
from data.batching.packing import pack
from engines.fsdp.transforms import build_model
from engines.heads import Head
from engines.model.flops import count_flops
from engines.model.hf import read_hf_config
from engines.parallel import device


class Clock(TrainerCallback):
    """When each optimizer step ended."""

    def __init__(self):
        self.ends: list[float] = []

    def on_step_end(self, *_, **__):
        self.ends.append(device.synchronize())

    def median_step(self) -> float:
        """Return the median seconds of the steps after those that warm up."""
        ends = self.ends[WARM_UP - 1 :]
        return median(after - before for before, after in zip(ends, ends[1:]))


@dataclass
class Work:
    """What TRL trains on.

    Attributes:
        rows: one per micro-batch, in order.
        lengths: the lengths of each step's sequences.
    """

    rows: list[dict]
    lengths: list[list[int]]


def make_work(arguments: argparse.Namespace, vocab_size: int) -> Work:
    work = Work([], [])
    for step in range(WARM_UP + arguments.steps):
        seed = 1000 * (step % NUM_BATCHES)
        batch = make_batch(seed, arguments.tokens, arguments.micro_batches, vocab_size)
        work.lengths.append(batch.lengths)
        micro_batches = pack(batch.lengths, arguments.tokens)
        for indices in micro_batches:
            micro_batch = batch.select(indices)
            ids = micro_batch.input_ids.tolist()
            row = {"input_ids": ids, "labels": ids, "seq_lengths": micro_batch.lengths}
            work.rows.append(row)
    return work


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that satisfies TRL; the rows are tokens already."""
    backend = Tokenizer(models.WordLevel({"w": 0, "<eos>": vocab_size - 1}, unk_token="w"))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>", unk_token="w"
    )


def load_model(arguments: argparse.Namespace, path: Path) -> nn.Module:
    device_map = {"": 0} if torch.cuda.is_available() else None
    return AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.bfloat16,
        attn_implementation=arguments.attention,
        device_map=device_map,
    )


def make_trainer(
    arguments: argparse.Namespace,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict],
    scratch: str,
) -> SFTTrainer:
    adapters = None
    if arguments.lora:
        adapters = LoraConfig(
            r=arguments.lora, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    settings = SFTConfig(
        output_dir=scratch,
        use_cpu=not torch.cuda.is_available(),
        max_steps=WARM_UP + arguments.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=arguments.micro_batches,
        gradient_checkpointing=False,
        bf16=False,  # the weights are bf16
        optim="adamw_torch_fused",
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=100,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_liger_kernel=arguments.liger,
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=arguments.tokens,
    )
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        peft_config=adapters,
        args=settings,
    )
    # TRL's own collator of packed rows, without TRL's packing.
    trainer.data_collator.padding_free = True
    trainer.padding_free = True
    trainer._signature_columns = ["input_ids", "labels", "seq_lengths"]
    return trainer


@contextmanager
def counted_sequences(model: nn.Module) -> Iterator[list[int]]:
    """Within this block, record how many sequences each forward pass begins."""
    counts = []

    def count(module, args, kwargs):
        counts.append(int((kwargs["position_ids"] == 0).sum()))

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield counts
    finally:
        hook.remove()


def count_step_flops(path: Path, lora_rank: int, lengths: list[list[int]]) -> float:
    """Return the FLOPs of a step, the mean over the batches that steps take in turn."""
    config = load("sft.yaml", [*model_settings(path), f"model.lora.rank={lora_rank}"])
    model, _ = build_model(config, Head.LOG_PROBS)
    flops = count_flops(model, read_hf_config(path))
    batches = lengths[:NUM_BATCHES]
    return sum(flops_of_lengths(flops, batch) for batch in batches) / len(batches)


def print_result(arguments: argparse.Namespace, seconds: float, tokens: float, flops: float):
    """Print the line of the table. tokens, flops: totals of a step."""
    this_device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak_flops = device.peak_flops(this_device) or float("nan")
    name = "TRL"
    if arguments.liger:
        name += ", Liger"
    if arguments.lora:
        name += f", peft of rank {arguments.lora}"
    print_row(
        arguments.shape,
        1,
        arguments.tokens,
        name,
        f"{tokens / seconds:,.0f}",
        f"{flops / seconds / peak_flops:.1%}",
        f"{device.memory()['perf/memory_peak_gib']:.1f}",
        f"{seconds:.3f}",
    )


def parse_arguments() -> argparse.Namespace:
    attention = "flash_attention_2" if torch.cuda.is_available() else "sdpa"
    parser = make_parser(__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    parser.add_argument("--liger", action="store_true", help="use Liger's kernels")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--tokens", type=int, default=16384, help="per micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--attention", default=attention, help="implementation in transformers")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    path = make_model(arguments.shape, arguments.models)
    vocab_size = read_hf_config(path).vocab_size
    work = make_work(arguments, vocab_size)
    model = load_model(arguments, path)
    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = make_trainer(arguments, model, make_tokenizer(vocab_size), work.rows, scratch)
        trainer.add_callback(clock)
        with counted_sequences(model) as counts:
            trainer.train()
    num_sequences = sum(counts[: arguments.micro_batches])
    assert num_sequences == len(work.lengths[0]), "attention would cross sequences"
    num_tokens = sum(sum(lengths) for lengths in work.lengths) / len(work.lengths)
    flops = count_step_flops(path, arguments.lora, work.lengths)
    print_result(arguments, clock.median_step(), num_tokens, flops)


if __name__ == "__main__":
    main()
