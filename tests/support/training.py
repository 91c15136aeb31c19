"""Settings, batches, a loss and shares of a batch for the engines' test workers.

The numbers are chosen so that a mistake shows: see make_batch().
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast

from data.batching.batch import Batch
from data.batching.packing import partition
from data.batching.plan import MicroBatches
from engines.base import Engine
from engines.context_parallel import has_dynamic_cp

NUM_BATCHES = 4  # number of different batches, which repeat in turn
VOCAB_SIZE = 97
LONGEST = 40  # tokens of the longest sequence in every batch
TOTAL_STEPS = 16
WARMUP_STEPS = 3
PEAK_LR = 2e-3
MIN_LR_RATIO = 0.1
WEIGHT_DECAY = 0.1
CLIP = 0.5
BETAS = (0.9, 0.95)
ENTROPY_BONUS = 0.1
SETTINGS = [
    "data.train_files=unused",
    "engine.compute_dtype=float32",
    "optim.lr_scheduler_type=cosine",
    f"optim.lr={PEAK_LR}",
    f"optim.lr_warmup_steps_ratio={WARMUP_STEPS / TOTAL_STEPS}",
    f"optim.min_lr_ratio={MIN_LR_RATIO}",
    f"optim.weight_decay={WEIGHT_DECAY}",
    f"optim.clip_grad={CLIP}",
    f"optim.betas=[{BETAS[0]}, {BETAS[1]}]",
    "engine.log_prob_chunk_size=29",
]


# -- batches --------------------------------------------------------------------------------------


def make_batch(step: int) -> Batch:
    """Return the 8 sequences of a step. Batches repeat, so that there is something to learn.

    Each batch has a sequence of one token, one with a loss at its end only, one without any loss,
    and first tokens whose loss_mask is 1. In one batch of four, fields["candidate_ids"] limits the
    tokens that sampling could have drawn.
    """
    generator = torch.Generator().manual_seed(step % NUM_BATCHES)
    lengths = [1, LONGEST, 2, *torch.randint(3, LONGEST, (5,), generator=generator).tolist()]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    num_tokens = sum(lengths)
    ids = torch.randint(3, VOCAB_SIZE, (num_tokens,), generator=generator)
    weight = torch.rand(num_tokens, generator=generator) + 0.5
    mask = (torch.rand(num_tokens, generator=generator) > 0.2).float()
    mask[cu_seqlens[1] : cu_seqlens[1] + LONGEST * 3 // 4] = 0
    mask[cu_seqlens[-2] :] = 0
    mask[cu_seqlens[:-2]] = 1
    fields = {"weight": weight, "loss_mask": mask}
    if step % NUM_BATCHES == 1:
        others = torch.rand(num_tokens, VOCAB_SIZE, generator=generator).argsort(1)[:, :20]
        others = others.where(others != ids[:, None], -1)
        fields["candidate_ids"] = torch.cat([ids[:, None], others], 1).int()
    return Batch(ids, cu_seqlens, fields)


def kept_logits(logits: Tensor, batch: Batch, tokens: slice) -> tuple[Tensor, Tensor]:
    """Return the logits of the tokens that could be drawn, and the index of each drawn token.

    logits: [n, V] for the tokens in a slice of the batch. The indices, [n], are into V or K.
    """
    if "candidate_ids" not in batch.fields:
        return logits, batch.input_ids[tokens]
    kept = batch.candidate_ids[tokens]
    kept_logits = logits.gather(-1, kept.clamp(0)).masked_fill(kept < 0, -1e9)
    return kept_logits, torch.zeros(len(kept), dtype=torch.int64)


def make_loss(num_tokens: int) -> Callable:
    """Return a loss function: the mean weighted negative log-likelihood, with an entropy bonus."""

    def loss_fn(log_probs, entropy, fields):
        weight = fields["weight"] / num_tokens
        loss = -((log_probs + ENTROPY_BONUS * entropy) * weight).sum()
        return loss, {"entropy": (entropy.detach() * weight).sum()}

    return loss_fn


# -- shares ---------------------------------------------------------------------------------------


def divide(lengths: list[int], dp_size: int, uneven: bool) -> list[list[int]]:
    """Return the sequences of each data-parallel rank.

    uneven: the last rank has none, the first has the rest, and those between have one each.
    """
    if not uneven:
        return partition(lengths, dp_size)
    num_first = len(lengths) - (dp_size - 2)
    single = [[i] for i in range(num_first, len(lengths))]
    return [list(range(num_first)), *single, []]


def share_of(
    engine: Engine, lengths: list[int], uneven: bool = False
) -> tuple[list[int], MicroBatches]:
    """Return this rank's sequences of a batch, and their micro-batches."""
    if has_dynamic_cp(engine.config.engine):
        plan = engine.plan(lengths)
        return plan.sequences, plan.micro_batches
    sequences = divide(lengths, engine.dp_size, uneven)[engine.dp_rank]
    return sequences, engine.divide_share([lengths[i] for i in sequences])


# -- ranks ----------------------------------------------------------------------------------------


def gather(value) -> list:
    """Return the values of all ranks, in order, on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def digest(values: dict) -> str:
    """Return a hash, exact to the last bit, of this rank's part of nested tensors and numbers."""

    def plain(value):
        if isinstance(value, dict):
            return {key: plain(item) for key, item in sorted(value.items())}
        local = value.to_local() if isinstance(value, DTensor) else value
        if isinstance(local, Tensor):
            content = local.detach().cpu().reshape(-1).view(torch.uint8).numpy()
            return local.dtype, local.shape, hashlib.sha256(content).hexdigest()
        return local

    return hashlib.sha256(repr(plain(values)).encode()).hexdigest()


# -- files ----------------------------------------------------------------------------------------


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of three words: [UNK], a and b."""
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="a")


def flip_bit(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
