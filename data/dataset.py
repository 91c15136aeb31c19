"""The SFT dataset: tokenized rows in memory-mapped arrays.

Reading a cache needs only numpy and torch. Hugging Face datasets is imported only on rank 0, and
only if there is no cache yet (tokenization.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from data.batching.batch import Batch
from data.cache import WITH_ROWS, key_of
from data.chat.encoding import RowCoroutine, encode
from data.chat.tokenizer import ChatTokenizer
from data.columns import describe_use
from data.images.processor import ImageStore, Processor
from data.lengths import kept_tokens
from data.records import Records
from data.selection import Selection
from data.shapes import read_shape
from data.sources import read_file_rows
from data.tokenization import CacheSpec, read_uses, tokenize_to_cache

VERSION = 12  # version of the cache; increase it when encode() or the files of a cache change
OPTIONS = (
    "messages_key",
    "prompt_key",
    "response_key",
    "images_key",
    "tools_key",
    "template_kwargs_key",
    "train_on",
    "max_length",
    "truncation",
    "special_tokens_in_text",
    "system_key",
    "lost_fields",
    "ignored_fields",
    "system_prompt",
)
TOKENS_AT_ONCE = 1 << 22  # the number of tokens that are searched at a time
# The columns of a row that is not used, because none of its tokens is trained. length is the number
# of tokens before truncation; shape is the name of the row's format (data/shapes.py); use is a
# data.columns.RowUse as JSON; is_lost tells whether it is dropped because of data.lost_fields.
UNUSED = {
    "input_ids": [],
    "loss_mask": [],
    "length": 0,
    "shape": "",
    "use": "",
    "is_lost": False,
}


def tokenize(
    files: str | Sequence[str] | Selection,
    tokenizer,
    options,
    cache_dir: Path,
    tokenizer_dir: Path | str,
    processor: Processor | None = None,
    with_rows: bool = False,
) -> Path:
    """Return the cache folder for these files. Writes it if there is none. For rank 0 only.

    The folder holds input_ids.npy (int32 [T]), loss_mask.npy (uint8 [T]), cu_seqlens.npy
    (int64 [n+1]), file_rows.json and stats.json. With a processor, it also holds the files of
    StoredImages; with with_rows, those of Records.

    Args:
        files: names of data files, patterns or directories (see data.files.find_files()), or a
            selection of their rows.
        options: the `data` section of the configuration.
        tokenizer_dir: the model's directory or hub name.
        processor: the processor of a vision-language model, else None.
        with_rows: whether to store the complete rows, too.

    Raises:
        InputError: a file is missing, unreadable or empty; a row is malformed (the message names
            the first one, as file:line); rows are longer than options.max_length, and
            options.truncation is error; no row is left.
    """
    spec = SPEC.with_rows() if with_rows else SPEC
    return tokenize_to_cache(spec, files, tokenizer, options, cache_dir, tokenizer_dir, processor)


def tokenize_row(
    row: dict, chat: ChatTokenizer, options, folder: Path = Path()
) -> RowCoroutine[dict]:
    """Return the columns of a row that differ from UNUSED. Run it with encode_together()."""
    standard_row, shape = read_shape(row, options, with_response=True)
    encoded = yield from encode(standard_row, chat, options, folder)
    use = describe_use(row, shape, options, encoded.losses, with_response=True)
    if encoded.is_dropped:
        return {"is_lost": True, "use": use}
    ids, mask, images = encoded[:3]
    kept = kept_tokens(len(ids), options.max_length, options.truncation)
    columns = {"length": len(ids), "shape": shape, "use": use, "image_files": list(images.files)}
    if images.would_be_cut(kept):
        return columns | {"cut": True}
    ids = ids[kept]
    mask = [0, *mask[kept][1:]]  # nothing predicts the first token
    if any(mask):
        columns |= {"input_ids": ids, "loss_mask": mask} | images.columns()
    return columns


SPEC = CacheSpec(VERSION, OPTIONS, "max_length", UNUSED, tokenize_row)


class TokenDataset:
    """Tokenized rows, memory-mapped from a cache folder: a row is read when a batch needs it.

    Args:
        path: the cache folder.
        processor: the processor of a vision-language model, whose batches carry images; else None.

    Attributes:
        name: a hash of everything that the tokens depend on.
        lengths: int64 [n], the number of tokens of each row.
        uses: how the columns of each file are used: data.columns.FileUse as dicts.
        stats: see tokenization.write_arrays().
        file_rows: see sources.write_file_rows().
        rows: the complete rows of the data files, without pixels; None if the cache lacks them.
    """

    def __init__(self, path: Path, processor: Processor | None = None):
        self.name = key_of(path)
        self.stats = json.loads((path / "stats.json").read_text())
        self.uses = read_uses(path)
        self.file_rows = read_file_rows(path)
        self.rows = Records(path) if path.name.endswith(WITH_ROWS) else None
        self.input_ids = np.load(path / "input_ids.npy", mmap_mode="r")
        self.loss_mask = np.load(path / "loss_mask.npy", mmap_mode="r")
        self.cu_seqlens = np.load(path / "cu_seqlens.npy", mmap_mode="r")
        self.lengths = np.diff(np.asarray(self.cu_seqlens))
        self.image_store: ImageStore | None = None
        if processor:
            self.image_store, self.name = ImageStore.load(path, processor)

    @classmethod
    def load(cls, path: Path, processor: Processor | None = None) -> TokenDataset:
        return cls(Path(path), processor)

    def __len__(self) -> int:
        return len(self.lengths)

    def trained_ends(self, candidates: Iterable[int]) -> set[int]:
        """Return the candidates that end a trained part of some row."""
        remaining = {*candidates}
        trained = set()
        for start in range(0, len(self.input_ids), TOKENS_AT_ONCE):
            if not remaining:
                break
            mask = self.loss_mask[start : start + TOKENS_AT_ONCE + 1]
            is_end = (mask > 0) & (np.append(mask[1:], 0) == 0)
            ids = self.input_ids[start : start + TOKENS_AT_ONCE]
            end_ids = np.unique(ids[is_end[: len(ids)]])
            trained |= remaining.intersection(end_ids.tolist())
            remaining -= trained
        return trained

    def sequences(self, index: int) -> list[tuple[str, list[int], list[int]]]:
        """Return (name, ids, mask of the tokens to learn) of each sequence of a row, to show it."""
        row = slice(self.cu_seqlens[index], self.cu_seqlens[index + 1])
        return [(f"row {index + 1}", self.input_ids[row].tolist(), self.loss_mask[row].tolist())]

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the rows at these indices, in this order.

        The batch has two fields, float32 [T] of 0 and 1. loss_mask is 1 for the tokens to learn.
        answer_mask is 1 for the last of these turns in each row: validation checks whether greedy
        decoding would produce it.
        """
        rows = [slice(self.cu_seqlens[i], self.cu_seqlens[i + 1]) for i in indices]
        masks = [self.loss_mask[row] for row in rows]
        cu_seqlens = np.cumsum([0, *self.lengths[list(indices)]], dtype=np.int64)
        return Batch(
            concatenate((self.input_ids[row] for row in rows), np.int64),
            torch.from_numpy(cu_seqlens),
            {
                "loss_mask": concatenate(masks, np.float32),
                "answer_mask": concatenate(map(last_run, masks), np.float32),
            },
            torch.as_tensor(np.asarray(indices)),
            self.image_store,
        )


def concatenate(arrays: Iterable[np.ndarray], dtype) -> torch.Tensor:
    """Concatenate arrays. Without any array, the result is empty."""
    converted = [np.asarray(array, dtype) for array in arrays]
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *converted]))


def last_run(mask: np.ndarray) -> np.ndarray:
    """Return the mask with only its last run of ones."""
    ones = np.flatnonzero(mask)
    gaps = np.flatnonzero(np.diff(ones) > 1)
    start = gaps[-1] + 1 if len(gaps) else 0
    run = np.zeros_like(mask)
    run[ones[start:]] = 1
    return run
