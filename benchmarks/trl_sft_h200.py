"""TRL's SFTTrainer on the work of benchmarks/sft_h200.py, on one GPU: the same sequences, in the same micro-batches, in bf16.

    python benchmarks/trl_sft_h200.py 7B [--lora 16] [--liger] [--steps 5]

Needs trl, and flash-attn for attention that stays within sequences. A micro-batch is one row without padding, whose position_ids
begin anew with every sequence, as TRL recommends; no recomputation. --lora: peft's adapters of this rank on all linear layers, the
rest frozen. Prints a line of the Markdown table of sft_h200.py, with the same count of FLOPs.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.sft_h200 import make_batch
from benchmarks.shapes import SHAPES, make_model
from config import load
from data.batching.packing import pack
from engines.base import Engine
from engines.fsdp.transforms import build_model
from engines.heads import Head
from engines.model.flops import count_flops
from engines.model.hf import read_hf_config
from engines.parallel import device

WARM, MICRO_BATCHES, TOKENS = 3, 4, 16384


class Clock(TrainerCallback):
    """Seconds from the end of one optimizer step to the end of the next."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, *_, **__):
        self.ends.append(device.synchronize())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/rankwise-models"))
    arguments = parser.parse_args()
    path = make_model(arguments.shape, arguments.models)
    hf_config, rows, lengths = read_hf_config(path), [], []
    for step in range(WARM + arguments.steps):
        batch = make_batch(1000 * (step % 3), TOKENS, MICRO_BATCHES, hf_config.vocab_size)
        lengths.append(batch.lengths)
        for indices in pack(batch.lengths, TOKENS):
            part = batch.select(indices)
            ids = part.input_ids.tolist()
            rows.append({"input_ids": ids, "labels": ids, "seq_lengths": part.lengths})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(
            models.WordLevel({"w": 0, "<eos>": hf_config.vocab_size - 1}, unk_token="w")
        ),
        eos_token="<eos>",
        pad_token="<eos>",
        unk_token="w",
    )
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, attn_implementation="flash_attention_2", device_map={"": 0}
    )
    adapters = LoraConfig(
        r=arguments.lora, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = SFTTrainer(
            model=model,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(rows),
            callbacks=[clock],
            peft_config=adapters if arguments.lora else None,
            args=SFTConfig(
                output_dir=scratch,
                max_steps=WARM + arguments.steps,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=MICRO_BATCHES,
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
                max_length=TOKENS,
            ),
        )
        # TRL's own collator of packed rows, without TRL's packing.
        trainer.data_collator.padding_free = trainer.padding_free = True
        trainer._signature_columns = ["input_ids", "labels", "seq_lengths"]
        starts = []
        hook = model.register_forward_pre_hook(
            lambda _, __, given: starts.append(int((given["position_ids"] == 0).sum())),
            with_kwargs=True,
        )
        trainer.train()
        hook.remove()
    assert sum(starts[:MICRO_BATCHES]) == len(lengths[0]), "attention would cross sequences"
    seconds = median(
        after - before for before, after in zip(clock.ends[WARM - 1 :], clock.ends[WARM:])
    )
    settings = load(
        "sft.yaml",
        [f"model.path={path}", "data.train_files=none", f"model.lora.rank={arguments.lora}"],
    )
    numbers = SimpleNamespace(
        _flops=count_flops(build_model(settings, Head.LOG_PROBS)[0], hf_config)
    )
    flops = sum(Engine.flops(numbers, lengths[step]) for step in range(3)) / 3
    num_tokens = sum(map(sum, lengths)) / len(lengths)
    name = f"TRL{', Liger' * arguments.liger}{f', peft of rank {arguments.lora}' * (arguments.lora > 0)}"
    print(
        f"| {arguments.shape} | 1 | {TOKENS} | {name} | {num_tokens / seconds:,.0f} | "
        f"{flops / seconds / device.peak_flops(torch.device('cuda')):.1%} | {torch.cuda.max_memory_allocated() / 2**30:.1f} | "
        f"{seconds:.3f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
