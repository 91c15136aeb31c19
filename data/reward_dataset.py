"""The data set of train_rm.py: rows of two answers to a prompt, or of one answer with a score.

Rows are read and tokenized as for train_dpo.py (preference_dataset.py). In addition, a row has a
target: for a pair, the margin by which the chosen answer is better; else the score of its answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from pathlib import Path

import numpy as np
import torch

from config import InputError
from data import preference_dataset
from data.batching.batch import Batch, make_cu_seqlens
from data.chat.encoding import RowCoroutine
from data.chat.losses import is_empty
from data.chat.tokenizer import ChatTokenizer
from data.images.processor import Processor
from data.messages import number_in_text
from data.preference_dataset import PreferenceDataset, tokenize_answers
from data.preferences import (
    LABELS,
    Preference,
    check_same_label,
    first_filled,
    has_pair,
    read_preference,
    read_single_answer,
)
from data.selection import Selection
from data.tokenization import CacheSpec, tokenize_to_cache

VERSION = "rewards 4"  # of the cache; increase it when read_rewarded() or its files change
OPTIONS = (
    *(name for name in preference_dataset.OPTIONS if name != "label_key"),
    "margin_key",
    "score_key",
)
DEFAULT_SCORE = "score"
UNUSED = preference_dataset.UNUSED | {"target": math.nan}


def tokenize_rewards(
    files: str | Sequence[str] | Selection,
    tokenizer,
    options,
    cache_dir: Path,
    tokenizer_dir: Path | str,
    processor: Processor | None = None,
    with_rows: bool = False,
) -> Path:
    """Return the cache folder for these files. Writes it if there is none. For rank 0 only.

    The folder holds the files of tokenize_preferences(), and target.npy (float64 [n]); the target
    of a pair without a margin is nan.
    """
    spec = SPEC.with_rows() if with_rows else SPEC
    return tokenize_to_cache(spec, files, tokenizer, options, cache_dir, tokenizer_dir, processor)


def read_rewarded(row: dict, options, has_template: bool) -> tuple[Preference, float]:
    """Return the answers of a row, and its target.

    Args:
        options: the section `data` of the configuration.
        has_template: whether the tokenizer has a chat template.

    Raises:
        InputError: the row is malformed.
    """
    score_key = find_score(row, options)
    if score_key and has_pair(row, options):
        raise InputError(
            f'the row has both a pair of answers and "{score_key}": leave out one of them, or set '
            "data.score_key=null, which reads no score"
        )
    if score_key:
        return read_single_answer(row, score_key, options), read_number(row, score_key)
    pair_keys = (options.chosen_key, options.rejected_key)
    if all(row.get(key) is None for key in pair_keys):
        columns = ", ".join(column for column, value in row.items() if value is not None)
        raise InputError(
            f'neither "{options.chosen_key}" and "{options.rejected_key}" nor a score is in the '
            f"row, which has {columns or 'no columns'}: name the columns in data.chosen_key and "
            "data.rejected_key, or the column of a score in data.score_key"
        )
    without_label = copy(options)
    without_label.label_key = None
    preference = read_preference(row, without_label, has_template)
    margin_key = options.margin_key
    if margin_key is None or is_empty(row.get(margin_key)):
        return preference, math.nan
    preference = preference._replace(columns=[*preference.columns, margin_key])
    return preference, read_number(row, margin_key)


def find_score(row: dict, options) -> str | None:
    """Return the column of the row's score, or None. A label stands for a score of 1 or 0."""
    if options.score_key is None:
        return None
    score_key = first_filled(row, [options.score_key])
    if score_key or options.score_key != DEFAULT_SCORE:
        return score_key
    check_same_label(row, "score_key", LABELS)
    return first_filled(row, LABELS)


def read_number(row: dict, key: str) -> float:
    """Return a score or a margin: a finite number; true is 1 and false is 0."""
    number = number_in_text(row[key])
    if not isinstance(number, (int, float)) or not math.isfinite(number):
        raise InputError(f'"{key}" is {str(row[key])[:40]!r}: must be a number, or true or false')
    return float(number)


def tokenize_row(
    row: dict, chat: ChatTokenizer, options, folder: Path = Path()
) -> RowCoroutine[dict]:
    """Return the columns of a row that differ from UNUSED. Run it with encode_together()."""
    preference, target = read_rewarded(row, options, bool(chat.tokenizer.chat_template))
    columns = yield from tokenize_answers(row, preference, chat, options, folder)
    return columns | {"target": target}


SPEC = CacheSpec(VERSION, OPTIONS, "max_length", UNUSED, tokenize_row)


class RewardDataset(PreferenceDataset):
    """Tokenized conversations to score, memory-mapped from a cache folder.

    Attributes:
        targets: float64 [n], the margin of a pair, nan if it has none; else the score of an answer.
    """

    def __init__(self, path: Path, processor: Processor | None = None):
        super().__init__(path, processor)
        self.targets = np.load(path / "target.npy")

    @property
    def num_margins(self) -> int:
        """The number of pairs with a margin."""
        is_pair = (self.answer_lengths > 0).all(1)
        return int((is_pair & ~np.isnan(self.targets)).sum())

    def last_tokens(self) -> set[int]:
        """Return the tokens with which conversations end."""
        ends = np.cumsum(self.answer_lengths.reshape(-1))
        is_present = self.answer_lengths.reshape(-1) > 0
        return set(np.unique(self.input_ids[ends[is_present] - 1]).tolist())

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the conversations of the rows at these indices: chosen, rejected, chosen, ...

        One token is appended to each. An engine computes the value for a token from the state
        before it, so the value for the appended token is the head's output at the conversation's
        own last token: the score.

        The batch has the fields loss_mask, float32 [T], 1 for these additional tokens; answer,
        int64 [T], as in PreferenceDataset.batch(); and target, float32 [T], the row's target
        (0 for a missing margin).
        """
        rows = super().batch(indices)
        answers = rows.fields["answer"][rows.cu_seqlens[:-1]]
        targets = torch.from_numpy(np.nan_to_num(self.targets[list(indices)])).float()
        batch = with_score_tokens(rows.input_ids, rows.lengths)
        lengths = batch.cu_seqlens.diff()
        batch.fields["answer"] = torch.repeat_interleave(answers, lengths)
        batch.fields["target"] = torch.repeat_interleave(targets[answers // 2], lengths)
        return batch


def with_score_tokens(input_ids: torch.Tensor, lengths: Sequence[int]) -> Batch:
    """Return the batch of n conversations with one more token each; see RewardDataset.batch().

    The batch has the field loss_mask.

    Args:
        input_ids: [T] int64, laid end to end.
        lengths: [n], at least 1.
    """
    # Decoders are causal, so no output that is used depends on this token: repeat the last one.
    repeats = torch.ones_like(input_ids)
    cu_seqlens = make_cu_seqlens(torch.tensor(lengths, dtype=torch.int64))
    repeats[cu_seqlens[1:] - 1] = 2
    cu_seqlens = cu_seqlens + torch.arange(len(cu_seqlens))
    loss_mask = torch.zeros(int(cu_seqlens[-1]))
    loss_mask[cu_seqlens[1:] - 1] = 1
    return Batch(input_ids.repeat_interleave(repeats), cu_seqlens, {"loss_mask": loss_mask})
