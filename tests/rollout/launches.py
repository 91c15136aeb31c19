"""The launches of rollout_worker.py, and helpers that its cases share."""

import random
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch

from config import InputError, load
from data.batching.batch import Batch

NUM_UPDATES = 2
LONG_PROMPT = 330
MAX_TOKENS = 24
SETTINGS = [
    "data.train_files=unused",
    "data.val_files=unused",
    "engine.compute_dtype=float32",
    "engine.log_prob_chunk_size=29",
    "optim.lr=0.02",
    "optim.weight_decay=0",
    f"data.max_prompt_length={LONG_PROMPT}",
    f"rollout.max_tokens={MAX_TOKENS}",
    f"validation.max_tokens={2 * MAX_TOKENS}",
    "validation.top_k=12",
    "rollout.kv_cache_gib=0.05",
    "data.max_tokens_per_micro_batch=400",
]
SMALL_MICRO_BATCHES = "data.max_tokens_per_micro_batch=70"


@dataclass
class Launch:
    ranks: int
    family: str
    tp: int = 1
    settings: str = ""


LAUNCHES = {
    # vLLM needs its tokenizer for stop strings only: either of the two has to be enough.
    "moe": Launch(1, "moe", settings="rollout.stop=[unused]"),
    "tied": Launch(1, "tied", settings="validation.stop=[unused]"),
    "tied_unsaid": Launch(1, "tied_unsaid"),
    "moe_dp2": Launch(2, "moe"),
    "tied_tp2": Launch(2, "tied", tp=2),
}
ONE_RANK = [name for name, case in LAUNCHES.items() if case.ranks == 1]
ONE_REPLICA_PER_RANK = [name for name, case in LAUNCHES.items() if case.tp == 1]
# "tied_unsaid" differs in the names of its weights, of which a critic has the same.
WITH_CRITIC = [name for name in ONE_REPLICA_PER_RANK if name != "tied_unsaid"]
# (on two ranks, the same on one rank)
PAIRS = [("moe_dp2", "moe"), ("tied_tp2", "tied")]

# The last is config.json's eos_token_id, the others are generation_config.json's.
END_TOKENS = [10, 11, 12, 13, 14, 257]

# Nats, in fp32: between vLLM's log-probabilities and the trainer's; between the trainer's and
# those of transformers.
ROLLOUT_BOUND = 1e-4
LOG_PROB_BOUND = 1e-5

# Parameters that cut distributions; and values with which the likeliest token alone is left.
CUT_TEMPERATURE = 0.7
CUTS = {"top_k": 4, "top_p": 0.5, "min_p": 0.3}
GREEDY_CUTS = {"temperature": 0.0, "top_k": 1, "top_p": 1e-6, "min_p": 1.0}


def make_config(folder: Path, case: Launch, *settings: str):
    return load(
        "ppo.yaml",
        [
            f"model.path={folder / case.family}",
            *SETTINGS,
            *case.settings.split(),
            f"rollout.tensor_parallel_size={case.tp}",
            *settings,
        ],
    )


def make_prompts(count: int, length: int | None = None) -> list[list[int]]:
    """Return fixed prompts of 1 to 12 tokens, or of `length`."""
    rng = random.Random(0)
    prompts = []
    for _ in range(count):
        num_tokens = length or rng.randint(1, 12)
        prompts.append([rng.randrange(3, 250) for _ in range(num_tokens)])
    return prompts


def schedule_asynchronously(rollout) -> None:
    """Schedule each step before the last one's tokens are known, as on an accelerator."""
    core = rollout.llm.llm_engine.engine_core.engine_core
    core.batch_queue_size = 2
    core.batch_queue = deque(maxlen=2)
    core.step_fn = core.step_with_batch_queue


def error_of(action) -> list[str] | None:
    """Return the type and the message of the error that an action raises; None without one."""
    try:
        action()
    except (RuntimeError, InputError) as error:
        return [type(error).__name__, str(error)]


def written(batch: Batch, truncated: torch.Tensor) -> dict:
    """Return a batch as JSON takes it."""
    return {
        "input_ids": batch.input_ids.tolist(),
        "lengths": batch.lengths,
        "truncated": truncated.tolist(),
        **{name: values.tolist() for name, values in batch.fields.items()},
    }


def responses(batch: Batch) -> list[list[int]]:
    sequences = batch.input_ids.split(batch.lengths)
    masks = batch.fields["loss_mask"].split(batch.lengths)
    return [ids[mask > 0].tolist() for ids, mask in zip(sequences, masks)]


def split_written(batch: dict) -> list[tuple]:
    """Return (input_ids, loss_mask, log-probabilities, truncated) of each sequence of written()."""
    names = ("input_ids", "loss_mask", "rollout_log_probs")
    columns = [torch.tensor(batch[name]).split(batch["lengths"]) for name in names]
    return list(zip(*columns, batch["truncated"], strict=True))


def written_responses(batch: dict) -> list[list[int]]:
    """Return the tokens of each response of written()."""
    return [ids[mask > 0].tolist() for ids, mask, _, _ in split_written(batch)]
