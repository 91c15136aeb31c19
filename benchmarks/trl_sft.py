"""The other side of the SFT benchmark: TRL's SFTTrainer, one JSON line about its steps. Needs an environment of its own:

    pip install torch==2.13.0 transformers==5.19.0 trl==1.16.0 accelerate==1.15.0 datasets==5.2.0

    python benchmarks/trl_sft.py --model DIR/model --data DIR/train.jsonl --steps 12 --batch-size 32 --micro-batch-size 8
    torchrun --nproc-per-node 2 benchmarks/trl_sft.py ...                        data parallel: DDP, gloo on a CPU

fp32, AdamW, constant learning rate, no gradient checkpointing. Rows are taken in the order of the file where the variant
allows it.

--variant default   padded micro-batches, TRL's own choice
          grouped   the same, with rows of similar length in one micro-batch: less padding, random order
          packing   rows of --max-length tokens filled with whole sequences (best fit decreasing); attention stays within
                    a sequence. TRL warns that this needs FlashAttention: with sdpa, transformers builds the same mask from
                    position_ids, and computes the masked part too. Shuffled, because TRL packs the longest rows first. A
                    step has as many packed rows as hold about --batch-size sequences, in whole micro-batches
                    (--micro-batch-size counts packed rows then).

The loss is on the answers by default (prompt/completion rows). With a loss on everything (--loss all) TRL takes as long on a
CPU, where it scores all positions, padding too; on a GPU it scores only the labelled ones. Both use TRL's fused head, its
only path.
"""

import argparse
import json
import os
import tempfile
import time

import torch
from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

SAMPLING = {"default": "sequential", "grouped": "group_by_length", "packing": "random"}


class Clock(TrainerCallback):
    """Seconds from the end of one optimizer step to the end of the next: data, forward, backward, update, metrics."""

    def __init__(self):
        self.seconds, self.loss, self.tokens = [], [], []

    def on_train_begin(self, *arguments, **more):
        self.since = time.perf_counter()

    def on_step_end(self, args, state, control, **more):
        if torch.cuda.is_available() and not args.use_cpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self.since)
        self.since = now

    def on_log(self, args, state, control, logs=None, **more):
        if "loss" in logs:
            self.loss.append(logs["loss"])
            self.tokens.append(logs["num_tokens"])  # of all ranks since the start, without padding


def read(path: str, loss: str):
    """Rows of messages, or of prompt and response (strings), in the form that makes TRL train what --loss says."""

    def split(row):
        messages = row.get("messages") or [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["response"]},
        ]
        if loss == "all":
            return {"messages": messages}
        return {"prompt": messages[:-1], "completion": messages[-1:]}

    rows = load_dataset("json", data_files=path, split="train")
    return rows.map(split, remove_columns=rows.column_names)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="directory in Hugging Face format")
    parser.add_argument("--data", required=True, help="jsonl with messages, or prompt and response")
    parser.add_argument("--variant", choices=("default", "grouped", "packing"), default="default")
    parser.add_argument("--loss", choices=("assistant", "all"), default="assistant")
    parser.add_argument(
        "--steps",
        type=int,
        default=12,
        help="optimizer steps; whoever reads the result leaves out the first",
    )
    parser.add_argument(
        "--batch-size", type=int, default=32, help="sequences per step, over all ranks"
    )
    parser.add_argument(
        "--micro-batch-size", type=int, default=8, help="sequences per forward pass, on one rank"
    )
    parser.add_argument(
        "--max-length",
        type=int,
        default=1024,
        help="tokens of a packed row; longer rows are truncated",
    )
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.95))
    parser.add_argument("--eps", type=float, default=1e-8)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--out", help="file for the JSON line too")
    arguments = parser.parse_args()

    world_size = int(os.environ.get("WORLD_SIZE", 1))
    on_cpu = not torch.cuda.is_available()
    rows = read(arguments.data, arguments.loss)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    batch_size = arguments.batch_size
    if arguments.variant == "packing":
        num_tokens = sum(
            len(
                tokenizer.apply_chat_template(
                    row.get("messages") or row["prompt"] + row["completion"], return_dict=False
                )
            )
            for row in rows
        )
        batch_size = (
            batch_size * num_tokens / len(rows) / arguments.max_length
        )  # packed rows per step
    micro_steps = max(1, round(batch_size / arguments.micro_batch_size / world_size))
    if (
        arguments.variant != "packing"
        and micro_steps * arguments.micro_batch_size * world_size != batch_size
    ):
        parser.error(
            f"--batch-size {batch_size} is no multiple of --micro-batch-size times {world_size} ranks"
        )

    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = SFTTrainer(
            model=arguments.model,
            processing_class=tokenizer,
            train_dataset=rows,
            callbacks=[clock],
            args=SFTConfig(
                output_dir=scratch,
                model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
                use_cpu=on_cpu,
                ddp_backend="gloo" if on_cpu and world_size > 1 else None,
                bf16=False,
                gradient_checkpointing=False,
                max_steps=arguments.steps,
                per_device_train_batch_size=arguments.micro_batch_size,
                gradient_accumulation_steps=micro_steps,
                max_length=arguments.max_length,
                packing=arguments.variant == "packing",
                train_sampling_strategy=SAMPLING[arguments.variant],
                optim="adamw_torch_fused",
                learning_rate=arguments.lr,
                lr_scheduler_type="constant",
                adam_beta1=arguments.betas[0],
                adam_beta2=arguments.betas[1],
                adam_epsilon=arguments.eps,
                weight_decay=arguments.weight_decay,
                max_grad_norm=arguments.clip_grad,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                dataloader_pin_memory=not on_cpu,
            ),
        )
        trainer.train()

    if int(os.environ.get("RANK", 0)) == 0:
        tokens = [int(after - before) for before, after in zip([0, *clock.tokens], clock.tokens)]
        line = json.dumps(
            {
                "trainer": "trl",
                "variant": arguments.variant,
                "loss_on": arguments.loss,
                "num_ranks": world_size,
                "threads": torch.get_num_threads(),
                "micro_steps": micro_steps,
                "step_seconds": clock.seconds,
                "step_tokens": tokens,
                "step_loss": clock.loss,
            }
        )
        print(line)
        if arguments.out:
            with open(arguments.out, "w") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
