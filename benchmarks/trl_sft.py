"""TRL's half of the SFT benchmark: print one JSON line about SFTTrainer's steps.

    python benchmarks/trl_sft.py --model DIR/model --data DIR/train.jsonl --steps 12 \\
        --batch-size 32 --micro-batch-size 8
    torchrun --nproc-per-node 2 benchmarks/trl_sft.py ...      data parallel: DDP, gloo on a CPU

requirements-cpu.txt has TRL. An environment of its own takes

    pip install torch==2.13.0 transformers==5.19.0 trl==1.16.0 accelerate==1.15.0 datasets==5.2.0

fp32, AdamW, constant learning rate, no gradient checkpointing. Rows are taken in the order of the
file where the variant allows it.

--variant default   padded micro-batches, TRL's own choice
          grouped   the same, with rows of similar length in one micro-batch: less padding, in a
                    random order
          packing   rows of --max-length tokens filled with whole sequences (best fit decreasing);
                    attention stays within a sequence. TRL warns that this needs FlashAttention:
                    with sdpa, transformers builds the same mask from position_ids, and computes
                    the masked part too. Shuffled, because TRL packs the longest rows first. A step
                    has as many packed rows as hold about --batch-size sequences, in whole
                    micro-batches (--micro-batch-size then counts packed rows).

By default the loss is on the answers (prompt and completion). On a CPU a loss on everything
(--loss all) takes TRL as long, since it scores all positions there, padding included; on a GPU it
scores only the labelled ones. Both use TRL's fused head, its only path.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.harness import make_parser
from benchmarks.trl_peer import add_optimizer_options, report, trainer_settings, world_size

SAMPLING = {"default": "sequential", "grouped": "group_by_length", "packing": "random"}


class Clock(TrainerCallback):
    """Seconds between the ends of optimizer steps: data, forward, backward, update and metrics.

    Attributes:
        seconds, loss: the time and the loss of each step.
        tokens: running total over all ranks, without padding, after each step.
    """

    def __init__(self):
        self.seconds: list[float] = []
        self.loss: list[float] = []
        self.tokens: list[float] = []

    def on_train_begin(self, *_, **__):
        self.last_end = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        if torch.cuda.is_available() and not args.use_cpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self.last_end)
        self.last_end = now

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            self.loss.append(logs["loss"])
            self.tokens.append(logs["num_tokens"])

    def step_tokens(self) -> list[int]:
        """Return the tokens of each step."""
        return [int(after - before) for before, after in zip([0, *self.tokens], self.tokens)]


# ---- data ----


def read_rows(path: str, loss: str) -> Dataset:
    """Return the chats of a file in the form with which TRL trains the tokens that --loss names.

    The file has rows of messages, or of prompt and response as strings.
    """

    def trl_row(row: dict) -> dict:
        messages = row.get("messages") or [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["response"]},
        ]
        if loss == "all":
            return {"messages": messages}
        return {"prompt": messages[:-1], "completion": messages[-1:]}

    rows = load_dataset("json", data_files=path, split="train")
    return rows.map(trl_row, remove_columns=rows.column_names)


def mean_length(rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> float:
    """Return the mean number of tokens of a chat."""
    num_tokens = 0
    for row in rows:
        messages = row.get("messages") or row["prompt"] + row["completion"]
        num_tokens += len(tokenizer.apply_chat_template(messages, return_dict=False))
    return num_tokens / len(rows)


# ---- the run ----


def count_micro_steps(
    arguments: argparse.Namespace, rows: Dataset, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Return the number of micro-batches per rank and step.

    Exits if they do not make up --batch-size. A packed batch may hold a few rows more or less.
    """
    rows_per_pass = arguments.micro_batch_size * world_size()
    if arguments.variant == "packing":
        num_packed_rows = arguments.batch_size * mean_length(rows, tokenizer) / arguments.max_length
        return max(1, round(num_packed_rows / rows_per_pass))
    if arguments.batch_size % rows_per_pass:
        print(
            f"error: --batch-size {arguments.batch_size} is not a multiple of --micro-batch-size "
            f"{arguments.micro_batch_size} times {world_size()} ranks: change one of them",
            file=sys.stderr,
        )
        sys.exit(2)
    return arguments.batch_size // rows_per_pass


def train(
    arguments: argparse.Namespace,
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    micro_steps: int,
) -> Clock:
    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        settings = SFTConfig(
            **trainer_settings(arguments, scratch),
            model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
            bf16=False,
            per_device_train_batch_size=arguments.micro_batch_size,
            gradient_accumulation_steps=micro_steps,
            max_length=arguments.max_length,
            packing=arguments.variant == "packing",
            train_sampling_strategy=SAMPLING[arguments.variant],
        )
        trainer = SFTTrainer(
            model=arguments.model,
            processing_class=tokenizer,
            train_dataset=rows,
            callbacks=[clock],
            args=settings,
        )
        trainer.train()
    return clock


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", required=True, help="directory in Hugging Face format")
    parser.add_argument("--data", required=True, help="jsonl with messages, or prompt and response")
    parser.add_argument("--variant", choices=SAMPLING, default="default")
    parser.add_argument("--loss", choices=("assistant", "all"), default="assistant")
    parser.add_argument(
        "--steps", type=int, default=12, help="optimizer steps, of which the first warms up"
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
    add_optimizer_options(parser, lr=1e-4, weight_decay=0.1)
    parser.add_argument("--out", type=Path, help="file for the JSON line too")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    rows = read_rows(arguments.data, arguments.loss)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    micro_steps = count_micro_steps(arguments, rows, tokenizer)
    clock = train(arguments, rows, tokenizer, micro_steps)
    result = {
        "trainer": "trl",
        "variant": arguments.variant,
        "loss_on": arguments.loss,
        "num_ranks": world_size(),
        "threads": torch.get_num_threads(),
        "micro_steps": micro_steps,
        "step_seconds": clock.seconds,
        "step_tokens": clock.step_tokens(),
        "step_loss": clock.loss,
    }
    report(result, arguments.out)


if __name__ == "__main__":
    main()
