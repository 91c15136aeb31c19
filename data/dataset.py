"""From data files to three memory-mapped arrays, tokenized once and kept under the hash of all that they depend on.

Reading a cache needs numpy and torch alone: only rank 0, and only on a miss, imports Hugging Face datasets.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

from config import InputError, die_with
from data.batching.batch import Batch
from data.cache import cache_key, cached
from data.chat.conversation import Steps, encode, in_step
from data.chat.tokens import ChatTokenizer
from data.files import find_files, is_json, read_rows
from data.images import sources as images
from data.images.processor import Pictures, Reader
from data.rows import SHAPES, read_shape

FORMAT = 6  # of the cache; raise it when encode() or the files of a cache change
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
)
# A row without a trained token. length: before truncation; shape: the name of the one it was read as.
UNUSED = {"input_ids": [], "loss_mask": [], "length": 0, "shape": ""}
NO_IMAGES = {"pixels": b"", "image_sizes": [], "image_files": [], "cut": False}
BATCH_ROWS = 100  # of a call of tokenize_rows
SERIAL_ROWS = 2000  # fewer rows are tokenized before worker processes have started
FORKS_DIE: list[
    int
] = []  # this process while map() forks others, which nobody would end when this one is killed
os.register_at_fork(after_in_child=lambda: [die_with(parent) for parent in FORKS_DIE])


class Kind(NamedTuple):
    """What a cache holds of each row.

    format: a part of the cache's name. options: the keys of `data` that the tokens depend on; limit: that of the greatest length.
    tokenize_row: row, chat, options -> what it replaces in unused, the columns of a row that is not used.
    """

    format: int | str
    options: tuple[str, ...]
    limit: str
    unused: dict
    tokenize_row: Callable


def tokenize(
    files: str | Sequence[str],
    tokenizer,
    options,
    cache_dir: Path,
    tokenizer_dir: Path | str,
    reader: Reader | None = None,
) -> Path:
    """The cache folder for these files, written if there is none: input_ids.npy int32 [T], loss_mask.npy uint8 [T],
    cu_seqlens.npy int64 [n+1], stats.json, and with a reader the files of StoredImages. For rank 0 alone.

    Raises InputError for a missing, unreadable or empty file, for the first malformed row (as file:line), for rows
    longer than options.max_length when options.truncation is error, and when no row is left.
    """
    return tokenized(
        Kind(FORMAT, OPTIONS, "max_length", UNUSED, tokenize_row),
        files,
        tokenizer,
        options,
        cache_dir,
        tokenizer_dir,
        reader,
    )


def tokenized(
    kind: Kind,
    files: str | Sequence[str],
    tokenizer,
    options,
    cache_dir: Path,
    tokenizer_dir: Path | str,
    reader: Reader | None,
) -> Path:
    """The cache folder, for tokenize() and tokenize_prompts()."""
    paths, tokenizer_dir = find_files(files), Path(tokenizer_dir)
    chat, limit = ChatTokenizer.load(tokenizer, tokenizer_dir, reader), getattr(options, kind.limit)
    if reader:
        folders = [str(folder_of(path)) for path in paths]
        of_images = f" with images of {folders} without {sorted(reader.dropped)}"
        kind = kind._replace(format=f"{kind.format}{of_images}", unused=kind.unused | NO_IMAGES)

    def write(folder: Path) -> None:
        import pyarrow

        tables = tokenize_files(paths, kind, chat, options, folder / "datasets")
        check_lengths(paths, tables, options.truncation, kind.limit, limit)
        write_arrays(folder, pyarrow.concat_tables(tables), options.truncation, kind.limit, limit)

    key = cache_key(
        paths, chat, tokenizer_dir, kind.format, [getattr(options, name) for name in kind.options]
    )
    folder = cached(Path(cache_dir) / key, write, images.are_current)
    stats = json.loads((folder / "stats.json").read_text())
    if reader and not stats["images"]:
        print(f"data: no row of {files} has an image", flush=True)
    for name in SHAPES.keys() & stats.keys():
        print(
            f"data: {stats[name]:,} rows have the shape of {name}: {SHAPES[name].__doc__.split(chr(10))[0]}",
            flush=True,
        )
    return folder


def tokenize_files(paths: list[Path], kind: Kind, chat: ChatTokenizer, options, work: Path) -> list:
    """A pyarrow.Table for each file, mapped from files in `work`, with a row for each row or line. An empty line is not used.

    Raises InputError for a file without rows, and for the first row for which kind.tokenize_row does, as file:line.
    """
    from datasets import Features, List, Value

    types = {
        "input_ids": List(Value("int32")),
        "loss_mask": List(Value("uint8")),
        "length": Value("int64"),
        "record": Value("string"),
        "shape": Value("string"),
        "error": Value("string"),
        "cut": Value("bool"),
        "pixels": Value("large_binary"),
        "image_sizes": List(List(Value("int32"))),
        "image_files": List(Value("string")),
    }
    # OmegaConf takes microseconds to look up a key.
    options = SimpleNamespace(**options) if isinstance(options, Mapping) else options
    unused, tables = kind.unused | {"error": None}, []
    gc.freeze()  # a million objects of imported modules, which the collector would go through again and again
    FORKS_DIE.append(os.getpid())
    try:
        for i, path in enumerate(paths):
            rows = read_rows(path, work / str(i))
            if not len(rows):
                raise InputError(f"{path}: the file has no rows")
            num_proc = options.num_proc or (
                min(8, len(os.sched_getaffinity(0))) if len(rows) >= SERIAL_ROWS else 1
            )
            tokens = rows.map(
                tokenize_rows,
                batched=True,
                batch_size=BATCH_ROWS,
                with_indices=True,
                remove_columns=rows.column_names,
                fn_kwargs={
                    "name": str(path),
                    "is_json": is_json(path),
                    "tokenize_row": kind.tokenize_row,
                    "unused": unused,
                    "chat": chat,
                    "options": options,
                },
                features=Features({name: types[name] for name in unused}),
                desc=f"tokenizing {path.name}",
                num_proc=min(num_proc, len(rows)) if num_proc > 1 else None,
                new_fingerprint="tokens",
                cache_file_name=str(work / str(i) / "tokens.arrow"),
                load_from_cache_file=False,
            )
            tables.append(tokens.with_format("arrow")[:])
    finally:
        FORKS_DIE.clear()
        gc.unfreeze()
    for table in tables:
        if table["error"].null_count < len(table):
            raise InputError(table["error"].drop_null()[0].as_py())
    return tables


def tokenize_rows(
    columns: dict[str, list],
    indices: list[int],
    name: str,
    is_json: bool,
    tokenize_row: Callable,
    unused: dict,
    chat: ChatTokenizer,
    options,
) -> dict[str, list]:
    def steps(values: tuple) -> Steps[dict]:
        row = dict(zip(columns, values, strict=True))
        if is_json and not row["text"].strip():
            return {}
        try:
            row = json.loads(row["text"]) if is_json else row
        except json.JSONDecodeError as error:
            raise InputError(f"not JSON: {error.msg} at column {error.colno}") from None
        if not isinstance(row, dict):
            raise InputError(f"the row must be an object, not {type(row).__name__}")
        return (yield from tokenize_row(row, chat, options, folder))

    folder = folder_of(Path(name))
    results = in_step([steps(values) for values in zip(*columns.values(), strict=True)])
    results = [
        unused
        | ({"error": f"{name}:{index + 1}: {result}"} if isinstance(result, InputError) else result)
        for index, result in zip(indices, results, strict=True)
    ]
    return {key: [result[key] for result in results] for key in unused}


def folder_of(path: Path) -> Path:
    """Where paths in a file, or in a saved data set, begin."""
    return (path if path.is_dir() else path.parent).resolve()


def tokenize_row(row: dict, chat: ChatTokenizer, options, folder: Path = Path()) -> Steps[dict]:
    row, shape = read_shape(row, options, with_response=True)
    ids, mask, seen = yield from encode(row, chat, options, folder)
    kept = kept_tokens(len(ids), options.max_length, options.truncation)
    result = {"length": len(ids), "shape": shape, "image_files": list(seen.files)}
    if seen.would_be_cut(kept):
        return result | {"cut": True}
    ids, mask = ids[kept], [0, *mask[kept][1:]]  # nothing predicts the first token
    return result | {"input_ids": ids, "loss_mask": mask} | seen.columns() if any(mask) else result


def kept_tokens(length: int, limit: int | None, truncation: str) -> slice:
    """The tokens to keep of a row of this length: none of one that is too long where truncation is error or drop."""
    if limit is None or length <= limit:
        return slice(None)
    return {"left": slice(length - limit, None), "right": slice(limit)}.get(truncation, slice(0))


def check_lengths(
    paths: list[Path], tables: list, truncation: str, key: str, limit: int | None
) -> None:
    """Raises InputError, with the first few, when truncation is error and rows are longer than limit (data.{key})."""
    if truncation != "error" or limit is None:
        return
    lengths = [table["length"].to_numpy() for table in tables]
    long = [
        (path, row, n[row]) for path, n in zip(paths, lengths) for row in np.flatnonzero(n > limit)
    ]
    if long:
        shown = ", ".join(f"{path}:{row + 1} ({n} tokens)" for path, row, n in long[:5])
        raise InputError(
            f"{len(long)} of {sum(map(len, lengths))} rows are longer than data.{key}={limit}: "
            f"{shown}{', ...' if len(long) > 5 else ''}; raise it, or set data.truncation to left, right "
            "or drop"
        )


def write_arrays(folder: Path, table, truncation: str, key: str, limit: int | None) -> None:
    """Copy the tokens, and what else the table has, into files, and count in stats.json: rows (kept), dropped_no_loss,
    dropped_long, truncated (and kept), tokens, loss_tokens, max_length (longest), and the rows of each shape, e.g. Alpaca. With
    images: their number, and dropped_images, rows that truncation would cut within the tokens of an image.
    Raises InputError when no row is left."""
    lengths = table["length"].to_numpy()
    kept = np.concatenate([chunk.value_lengths().to_numpy() for chunk in table["input_ids"].chunks])
    long, used = lengths > (limit or np.inf), kept > 0
    num_cut = (
        sum(table["cut"].to_pylist()) if "cut" in table.column_names and truncation != "drop" else 0
    )
    num_dropped = int(long.sum()) if truncation == "drop" else 0
    num_untrained = int((lengths > 0).sum() - used.sum()) - num_dropped - num_cut
    if not used.any():
        raise InputError(
            f"no row is left: {num_dropped + num_cut} rows are longer than data.{key}={limit}"
            + f", {num_untrained} have no trained token" * (num_untrained > 0)
        )
    stats = {
        "rows": int(used.sum()),
        "dropped_long": num_dropped,
        "truncated": int((long & used).sum()),
        "tokens": int(kept.sum()),
        "max_length": int(kept.max()),
    }
    np.save(folder / "cu_seqlens.npy", np.concatenate([[0], np.cumsum(kept[used], dtype=np.int64)]))
    write_array(folder, "input_ids", np.int32, table, stats["tokens"])
    if "loss_mask" in table.column_names:
        mask = write_array(folder, "loss_mask", np.uint8, table, stats["tokens"])
        stats |= {"dropped_no_loss": num_untrained, "loss_tokens": int(mask.sum(dtype=np.int64))}
    else:
        write_records(folder, table)
    if "pixels" in table.column_names:
        stats |= {"dropped_images": num_cut} | images.write(folder, table, used)
    stats |= {
        shape["values"]: shape["counts"]
        for shape in table["shape"].value_counts().to_pylist()
        if shape["values"]
    }
    (folder / "stats.json").write_text(json.dumps(stats, indent=1))


def write_records(folder: Path, table) -> None:
    """The lines of records.jsonl, and in record_ends.npy int64 [n] where each ends [bytes]."""
    lengths = []
    with open(folder / "records.jsonl", "wb") as file:
        for chunk in table["record"].chunks:
            lengths += [
                file.write(record.encode() + b"\n") for record in chunk.to_pylist() if record
            ]
    np.save(folder / "record_ends.npy", np.cumsum(lengths, dtype=np.int64))


def write_array(folder: Path, name: str, dtype, table, num_tokens: int) -> np.ndarray:
    """Copy a column of lists, end to end, into an .npy file [num_tokens], a chunk of some thousand rows at a time."""
    path = folder / f"{name}.npy"
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(num_tokens,))
    with open(
        path, "r+b"
    ) as file:  # a disk that fills up behind a memory map kills the process without a word
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    at = 0
    for chunk in table[name].chunks:
        values = chunk.flatten().to_numpy()
        array[at : at + len(values)] = values
        at += len(values)
    array.flush()
    return array


class TokenDataset:
    """n tokenized rows, mapped from a cache folder: nothing is read before it is asked for.

    name: the hash of all that the tokens depend on. lengths: np.int64 [n], tokens of each row. stats: see write_arrays().
    reader: for rows with images, which batches then carry.
    """

    def __init__(self, path: Path, reader: Reader | None = None):
        self.name, self.stats = path.name, json.loads((path / "stats.json").read_text())
        self.input_ids, self.loss_mask, self.cu_seqlens = (
            np.load(path / f"{name}.npy", mmap_mode="r")
            for name in ("input_ids", "loss_mask", "cu_seqlens")
        )
        self.lengths = np.diff(np.asarray(self.cu_seqlens))
        self.pictures, self.name = Pictures.load(path, reader) if reader else (None, self.name)

    @classmethod
    def load(cls, path: Path, reader: Reader | None = None) -> TokenDataset:
        return cls(Path(path), reader)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The rows at these indices, in this order. Fields, float32 [T], 0 or 1: loss_mask, the tokens to learn;
        answer_mask, those of the row's last turn, which validation compares with the greedy choice."""
        rows = [slice(self.cu_seqlens[i], self.cu_seqlens[i + 1]) for i in indices]
        masks = [self.loss_mask[row] for row in rows]
        fields = {
            "loss_mask": joined(masks, np.float32),
            "answer_mask": joined(map(last_run, masks), np.float32),
        }
        cu_seqlens = np.cumsum([0, *self.lengths[list(indices)]], dtype=np.int64)
        return Batch(
            joined([self.input_ids[row] for row in rows], np.int64),
            torch.from_numpy(cu_seqlens),
            fields,
            torch.as_tensor(np.asarray(indices)),
            self.pictures,
        )


def joined(parts, dtype) -> torch.Tensor:
    return torch.from_numpy(
        np.concatenate([np.empty(0, dtype), *(np.asarray(part, dtype) for part in parts)])
    )


def last_run(mask: np.ndarray) -> np.ndarray:
    """The mask without all but its last run of ones."""
    ones = np.flatnonzero(mask)
    breaks = np.flatnonzero(np.diff(ones) > 1)
    run = np.zeros_like(mask)
    run[ones[breaks[-1] + 1 if len(breaks) else 0 :]] = 1
    return run
