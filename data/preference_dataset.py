"""The data set of train_dpo.py: rows of two answers to a prompt, or of one answer with a label.

A row's tokens are its chosen answer with the prompt, and then its rejected answer with the prompt.
One of the two is empty in a row with a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from data import dataset
from data.batching.batch import Batch, make_cu_seqlens
from data.chat.encoding import EncodedRow, RowCoroutine, encode
from data.chat.tokenizer import ChatTokenizer
from data.columns import describe_use
from data.dataset import TokenDataset, concatenate
from data.images.processor import Processor
from data.lengths import kept_tokens
from data.preferences import Preference, read_preference
from data.selection import Selection
from data.tokenization import CacheSpec, tokenize_to_cache

VERSION = "preferences 4"  # of the cache; increase it when read_preference() or its files change
OPTIONS = (
    *(name for name in dataset.OPTIONS if name != "train_on"),
    "chosen_key",
    "rejected_key",
    "label_key",
)
UNUSED = dataset.UNUSED | {"chosen_tokens": 0, "is_identical": False}


def tokenize_preferences(
    files: str | Sequence[str] | Selection,
    tokenizer,
    options,
    cache_dir: Path,
    tokenizer_dir: Path | str,
    processor: Processor | None = None,
    with_rows: bool = False,
) -> Path:
    """Return the cache folder for these files. Writes it if there is none. For rank 0 only.

    The folder holds the files of data.dataset.tokenize(), and chosen_tokens.npy (int32 [n]), the
    number of tokens of each row that belong to its chosen answer.
    """
    spec = SPEC.with_rows() if with_rows else SPEC
    return tokenize_to_cache(spec, files, tokenizer, options, cache_dir, tokenizer_dir, processor)


def tokenize_row(
    row: dict, chat: ChatTokenizer, options, folder: Path = Path()
) -> RowCoroutine[dict]:
    """Return the columns of a row that differ from UNUSED. Run it with encode_together()."""
    preference = read_preference(row, options, bool(chat.tokenizer.chat_template))
    return (yield from tokenize_answers(row, preference, chat, options, folder))


def tokenize_answers(
    row: dict, preference: Preference, chat: ChatTokenizer, options, folder: Path
) -> RowCoroutine[dict]:
    """Do the same for a row whose answers have been read."""
    answers = {"chosen": preference.chosen, "rejected": preference.rejected}
    losses = []
    encoded: dict[str, EncodedRow] = {}
    if preference.chosen != preference.rejected:
        for name, answer in answers.items():
            if answer is not None:
                encoded[name] = yield from encode(answer, chat, preference.options, folder)
                losses += encoded[name].losses
    use = describe_use(
        row, preference.shape, options, losses, with_response=True, chat_columns=preference.columns
    )
    columns = {"use": use, "shape": preference.shape}
    if not encoded:
        return columns | {"is_identical": True}
    if any(answer.is_dropped for answer in encoded.values()):
        return columns | {"is_lost": True}
    return columns | token_columns(encoded, options)


def token_columns(encoded: dict[str, EncodedRow], options) -> dict:
    """Return the columns with the tokens of a row's answers, each cut to data.max_length.

    The row is not used if an answer has no trained token left, or if its answers have become equal:
    truncation may cut off their difference, or the template may strip white space that was the only
    difference. The row's length is the length of the longer answer.
    """
    columns = {"length": max(len(answer.input_ids) for answer in encoded.values())}
    kept_ids: list[list[int]] = []
    ids: list[int] = []
    mask: list[int] = []
    for name in ("chosen", "rejected"):
        if name in encoded:
            answer = encoded[name]
            kept = kept_tokens(len(answer.input_ids), options.max_length, options.truncation)
            answer_mask = [0, *answer.loss_mask[kept][1:]]  # nothing predicts the first token
            if not any(answer_mask):
                return columns
            kept_ids.append(answer.input_ids[kept])
            ids += kept_ids[-1]
            mask += answer_mask
        if name == "chosen":
            columns["chosen_tokens"] = len(ids)
    if len(kept_ids) == 2 and kept_ids[0] == kept_ids[1]:
        return {"is_identical": True}
    return columns | {"input_ids": ids, "loss_mask": mask}


SPEC = CacheSpec(VERSION, OPTIONS, "max_length", UNUSED, tokenize_row)


class PreferenceDataset(TokenDataset):
    """Tokenized preferences, memory-mapped from a cache folder.

    Attributes:
        answer_lengths: int64 [n, 2], the tokens of each row's chosen and rejected answer, with the
            prompt; 0 for an answer that the row does not have.
        ref_log_probs: float32 [T], the reference's log-probability of every token; None unless
            attach() has been called.
    """

    def __init__(self, path: Path, processor: Processor | None = None):
        super().__init__(path, processor)
        chosen = np.load(path / "chosen_tokens.npy").astype(np.int64)
        self.answer_lengths = np.stack([chosen, self.lengths - chosen], 1)
        self.ref_log_probs: np.ndarray | None = None

    def attach(self, ref_log_probs: np.ndarray) -> None:
        """Add the reference's log-probabilities to all batches, as the field ref_log_probs."""
        assert len(ref_log_probs) == len(self.input_ids)
        self.ref_log_probs = ref_log_probs

    @property
    def num_pairs(self) -> int:
        """The number of rows that have both answers."""
        return int((self.answer_lengths > 0).all(1).sum())

    def longest_parts(self) -> tuple[int, int]:
        """Return the tokens of the longest prompt, and of the longest answer without its prompt."""
        longest_prompt = 0
        longest_answer = 0
        starts = np.cumsum(np.append(0, self.answer_lengths.reshape(-1)))
        for start, end in zip(starts[:-1].tolist(), starts[1:].tolist()):
            if end > start:
                prompt_length = int(self.loss_mask[start:end].argmax())
                longest_prompt = max(longest_prompt, prompt_length)
                longest_answer = max(longest_answer, end - start - prompt_length)
        return longest_prompt, longest_answer

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the answers of the rows at these indices: chosen, rejected, chosen, ...

        The batch has the fields loss_mask, float32 [T], 1 for the tokens of an answer, and answer,
        int64 [T]: 2 * i for the tokens of the chosen sequence of the i-th of these rows, and
        2 * i + 1 for the rejected one. After attach(), it also has ref_log_probs, float32 [T].
        """
        indices = list(indices)
        rows = [slice(self.cu_seqlens[i], self.cu_seqlens[i + 1]) for i in indices]
        lengths = torch.from_numpy(self.answer_lengths[indices].reshape(-1))
        answer = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        fields = {
            "loss_mask": concatenate((self.loss_mask[row] for row in rows), np.float32),
            "answer": answer,
        }
        if self.ref_log_probs is not None:
            fields["ref_log_probs"] = concatenate(
                (self.ref_log_probs[row] for row in rows), np.float32
            )
        input_ids = concatenate((self.input_ids[row] for row in rows), np.int64)
        return Batch(input_ids, make_cu_seqlens(lengths[lengths > 0]), fields)

    def sequences(self, index: int) -> list[tuple[str, list[int], list[int]]]:
        return split_answers(
            f"row {index + 1}",
            self.input_ids[self.cu_seqlens[index] : self.cu_seqlens[index + 1]].tolist(),
            self.loss_mask[self.cu_seqlens[index] : self.cu_seqlens[index + 1]].tolist(),
            int(self.answer_lengths[index, 0]),
        )


def split_answers(
    name: str, ids: list[int], mask: list[int], chosen_tokens: int
) -> list[tuple[str, list[int], list[int]]]:
    """Return (name, ids, mask) of each answer in the tokens of a row."""
    answers = []
    for side, part in (("chosen", slice(chosen_tokens)), ("rejected", slice(chosen_tokens, None))):
        if ids[part]:
            answers.append((f"{name}, {side}", ids[part], mask[part]))
    return answers
