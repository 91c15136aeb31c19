"""Rows as JSON in a cache folder: written once, memory-mapped, read one at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from config import InputError
from data.chat.encoding import RowCoroutine
from data.chat.tokenizer import ChatTokenizer
from data.images.sources import without_pixels


def write_records(folder: Path, records: Iterable[str]) -> None:
    """Write records.jsonl, and record_ends.npy, int64 [n]: the byte offset of each line's end.

    Args:
        records: objects as JSON; empty ones are left out.
    """
    line_lengths = []
    with open(folder / "records.jsonl", "wb") as file:
        for record in records:
            if record:
                line_lengths.append(file.write(record.encode() + b"\n"))
    np.save(folder / "record_ends.npy", np.cumsum(line_lengths, dtype=np.int64))


def tokenize_row_and_keep(
    tokenize_row: Callable, row: dict, chat: ChatTokenizer, options, folder: Path = Path()
) -> RowCoroutine[dict]:
    """Return the columns of tokenize_row() and, if the row is used, the row itself as JSON."""
    record = {}
    columns = yield from tokenize_row(row, chat, options, folder)
    if columns.get("input_ids"):
        record = {"record": row_as_json(row, options.images_key, "sampler")}
    return columns | record


def row_as_json(row: dict, images_key: str, reader: str) -> str:
    """Return a row as JSON, without the pixels of images.

    Args:
        images_key: the column of images.
        reader: the function that needs the row, for the error message.

    Raises:
        InputError: a value of the row cannot be written as JSON.
    """
    try:
        return json.dumps(without_pixels(row, images_key))
    except TypeError as error:
        raise InputError(f"the row cannot be passed to a {reader} as JSON: {error}") from error


class Records(Sequence):
    """The n objects that write_records() has written; each is parsed when it is read."""

    def __init__(self, folder: Path):
        self.ends = np.load(folder / "record_ends.npy", mmap_mode="r")
        self.text = np.memmap(folder / "records.jsonl", dtype=np.uint8, mode="r")

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int):
        row = range(len(self))[index]  # negative indices count from the end
        start = self.ends[row - 1] if row else 0
        return json.loads(self.text[start : self.ends[row]].tobytes())
