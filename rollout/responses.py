"""The responses to one batch of requests, as arrays: tokens never become Python objects."""

import mmap
import warnings
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from data.batching.batch import Batch
from engines.model import routes

MAP_NORESERVE = 0x4000  # linux/mman.h
# If the recorded candidates have less total probability than this, the sampler had further ones.
MIN_COVERAGE = 0.99


class Responses:
    """Responses to n requests, to which tokens are appended one at a time.

    tokens      int32 [n, max_tokens]; only the first lengths[i] tokens of row i are valid
    log_probs   fp32 [n, max_tokens]
    lengths     int64 [n]
    candidates  int32 [n, max_tokens, 1 + num_candidates]: the token that was drawn, followed by the
                tokens that it was drawn from, padded with -1; None if num_candidates is 0
    routes      [T, L, k] for the T tokens of all prompts and responses, laid end to end: see
                engines/model/routes.py; None without rollout.routing_replay
    """

    def __init__(self, n: int, max_tokens: int, num_candidates: int):
        self.tokens = lazy_zeros((n, max_tokens), np.int32)
        self.log_probs = lazy_zeros((n, max_tokens), np.float32)
        self.candidates: np.ndarray | None = None
        if num_candidates:
            self.candidates = lazy_zeros((n, max_tokens, 1 + num_candidates), np.int32)
        self.lengths = np.zeros(n, np.int64)
        self.routes: np.ndarray | None = None

    def append(self, rows: np.ndarray, token_ids: np.ndarray, log_probs: np.ndarray) -> None:
        """Append one token to each of these rows. No row may occur twice.

        token_ids, log_probs: [len(rows), 1 + num_candidates]; vLLM lists the token that was drawn
        first, followed by the num_candidates most likely ones.
        """
        self._write((rows, self.lengths[rows]), token_ids, log_probs)
        self.lengths[rows] += 1

    def extend(self, row: int, token_ids: np.ndarray, log_probs: np.ndarray) -> None:
        """Append tokens to one row: token_ids, log_probs [tokens, 1 + num_candidates]."""
        start = self.lengths[row]
        end = start + len(token_ids)
        self._write((row, slice(start, end)), token_ids, log_probs)
        self.lengths[row] = end

    def _write(self, position: tuple, token_ids: np.ndarray, log_probs: np.ndarray) -> None:
        self.tokens[position] = token_ids[:, 0]
        self.log_probs[position] = log_probs[:, 0]
        if self.candidates is not None:
            self.candidates[position] = candidates_of(token_ids, log_probs)

    def row(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return copies of the tokens, log-probabilities and candidates of one response."""
        length = self.lengths[row]
        candidates = None
        if self.candidates is not None:
            candidates = self.candidates[row, :length].copy()
        return self.tokens[row, :length].copy(), self.log_probs[row, :length].copy(), candidates

    def batch(self, prompts: Sequence[list[int]]) -> Batch:
        """Return prompts and responses, packed, with the fields that Rollout.generate() lists."""
        num_prompts = len(prompts)
        prompt_lengths = np.fromiter(map(len, prompts), np.int64, num_prompts)
        cu_seqlens = np.concatenate([[0], np.cumsum(prompt_lengths + self.lengths)])
        num_tokens = cu_seqlens[-1]
        # For each response token: its row and column here, and its target in the packed batch.
        rows = np.repeat(np.arange(num_prompts), self.lengths)
        response_starts = np.cumsum(self.lengths) - self.lengths
        columns = np.arange(len(rows)) - np.repeat(response_starts, self.lengths)
        targets = columns + np.repeat(cu_seqlens[:-1] + prompt_lengths, self.lengths)

        mask = np.zeros(num_tokens, np.float32)
        mask[targets] = 1
        input_ids = np.empty(num_tokens, np.int64)
        input_ids[targets] = self.tokens[rows, columns]
        prompt_ids = chain.from_iterable(prompts)
        input_ids[mask == 0] = np.fromiter(prompt_ids, np.int64, prompt_lengths.sum())
        log_probs = np.zeros_like(mask)
        log_probs[targets] = self.log_probs[rows, columns]
        fields = {"loss_mask": mask, "rollout_log_probs": log_probs}
        if self.candidates is not None:
            candidates = np.full((num_tokens, self.candidates.shape[2]), -1, np.int32)
            candidates[targets] = self.candidates[rows, columns]
            fields["candidate_ids"] = candidates
        if self.routes is not None:
            fields[routes.FIELD] = self.routes
        return Batch(
            torch.from_numpy(input_ids),
            torch.from_numpy(cu_seqlens),
            {name: torch.from_numpy(values) for name, values in fields.items()},
        )


def candidates_of(token_ids: np.ndarray, log_probs: np.ndarray) -> np.ndarray:
    """Return each token, followed by the candidates that it was drawn from, padded with -1.

    Warns if there were further candidates.

    token_ids, log_probs: [tokens, 1 + num_candidates], as Responses.append() gets them.
    """
    num_candidates = token_ids.shape[1] - 1
    if num_candidates and (np.exp(log_probs[:, 1:]).sum(1) < MIN_COVERAGE).any():
        warnings.warn(
            f"some tokens were drawn from more than {num_candidates} candidates, because "
            "several candidates are equally likely, but the trainer knows only the first "
            f"{num_candidates}: lower rollout.top_p, or raise rollout.top_k",
            stacklevel=2,
        )
    return np.where(np.isinf(log_probs), -1, token_ids)


def lazy_zeros(shape: tuple[int, ...], dtype) -> np.ndarray:
    """Return an array of zeros that takes up memory only where it is written to.

    This saves memory, because few responses reach max_tokens.
    """
    num_elements = int(np.prod(shape))
    num_bytes = num_elements * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
    return np.frombuffer(memory, dtype, num_elements).reshape(shape)
