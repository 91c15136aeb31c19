"""What the requests of one batch have generated, in arrays: no token becomes a Python object."""

import mmap
import warnings
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from data.batching.packing import Batch

MAP_NORESERVE = 0x4000  # linux/mman.h


class Responses:
    """tokens int32 and log_probs fp32 [n, max_tokens], of which the first lengths[i] of each row count; lengths [n] int64;
    words int32 [n, max_tokens, 1 + num_kept]: the drawn token and the words that it was drawn from, -1 for none, where
    num_kept > 0."""

    def __init__(self, n: int, max_tokens: int, num_kept: int):
        self.tokens, self.log_probs = (
            unwritten((n, max_tokens), np.int32),
            unwritten((n, max_tokens), np.float32),
        )
        self.words = unwritten((n, max_tokens, 1 + num_kept), np.int32) if num_kept else None
        self.lengths = np.zeros(n, np.int64)

    def append(self, rows: np.ndarray, token_ids: np.ndarray, log_probs: np.ndarray) -> None:
        """One more token for each of these different rows. token_ids, log_probs [len(rows), 1 + num_kept]: vLLM lists the
        token that was drawn, then the num_kept likeliest ones."""
        self._write((rows, self.lengths[rows]), token_ids, log_probs)
        self.lengths[rows] += 1

    def set(self, row: int, token_ids: np.ndarray, log_probs: np.ndarray) -> None:
        """A whole response, [tokens, 1 + num_kept]."""
        self._write((row, slice(len(token_ids))), token_ids, log_probs)
        self.lengths[row] = len(token_ids)

    def _write(self, place: tuple, token_ids: np.ndarray, log_probs: np.ndarray) -> None:
        self.tokens[place], self.log_probs[place] = token_ids[:, 0], log_probs[:, 0]
        if self.words is not None:
            if (np.exp(log_probs[:, 1:]).sum(1) < 0.99).any():
                warnings.warn(
                    f"some tokens were drawn from more than {token_ids.shape[1] - 1} words of equal probability: the "
                    "trainer knows the first of them alone; lower rollout.top_p, or raise top_k",
                    stacklevel=2,
                )
            self.words[place] = np.where(np.isinf(log_probs), -1, token_ids)

    def batch(self, prompts: Sequence[list[int]]) -> Batch:
        """Prompts and responses end to end, with the fields that Rollout.generate() names."""
        prompt_lengths = np.fromiter(map(len, prompts), np.int64, len(prompts))
        cu_seqlens = np.concatenate([[0], np.cumsum(prompt_lengths + self.lengths)])
        # Where a response's tokens lie here, and where they go.
        rows = np.repeat(np.arange(len(prompts)), self.lengths)
        places = np.arange(len(rows)) - np.repeat(
            np.cumsum(self.lengths) - self.lengths, self.lengths
        )
        to = places + np.repeat(cu_seqlens[:-1] + prompt_lengths, self.lengths)
        ids, mask = np.empty(cu_seqlens[-1], np.int64), np.zeros(cu_seqlens[-1], np.float32)
        mask[to] = 1
        ids[to] = self.tokens[rows, places]
        ids[mask == 0] = np.fromiter(chain.from_iterable(prompts), np.int64, prompt_lengths.sum())
        log_probs = np.zeros_like(mask)
        log_probs[to] = self.log_probs[rows, places]
        fields = {"loss_mask": mask, "rollout_log_probs": log_probs}
        if self.words is not None:
            fields["kept_words"] = np.full((len(ids), self.words.shape[2]), -1, np.int32)
            fields["kept_words"][to] = self.words[rows, places]
        return Batch(
            torch.from_numpy(ids),
            torch.from_numpy(cu_seqlens),
            {k: torch.from_numpy(x) for k, x in fields.items()},
        )


def unwritten(shape: tuple[int, ...], dtype) -> np.ndarray:
    """An array of zeros that takes memory only where it is written: few responses are as long as they may be."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = mmap.mmap(
        -1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    )
    return np.frombuffer(memory, dtype, int(np.prod(shape))).reshape(shape)
