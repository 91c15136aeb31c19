"""From data files to three memory-mapped arrays, tokenized once and kept under the hash of all that they depend on.

Reading a cache needs numpy and torch alone: only rank 0, and only on a miss, imports Hugging Face datasets.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from config import InputError
from data.cache import cache_key, cached
from data.chat import Steps, encode, in_step
from data.files import find_files, is_json, read_rows
from data.packing import Batch
from data.rows import SHAPES, read_shape
from data.tokens import ChatTokenizer

FORMAT = 4                  # of the cache; raise it when encode() or the files of a cache change
OPTIONS = ("messages_key", "prompt_key", "response_key", "tools_key", "template_kwargs_key", "train_on", "max_length",
           "truncation", "special_tokens_in_text")
# A row without a trained token. length: before truncation; shape: the name of the one it was read as.
UNUSED = {"input_ids": [], "loss_mask": [], "length": 0, "shape": ""}
BATCH_ROWS = 100            # of a call of tokenize_rows
SERIAL_ROWS = 2000          # fewer rows are tokenized before worker processes have started
PR_SET_PDEATHSIG = 1        # linux/prctl.h

FORKS_DIE: list[bool] = []  # not empty while map() forks processes, which nobody would end when this one is killed
LIBC = ctypes.CDLL(None)
os.register_at_fork(after_in_child=lambda: FORKS_DIE and LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))


def tokenize(files: str | Sequence[str], tokenizer, options, cache_dir: Path, tokenizer_dir: Path | str) -> Path:
    """The cache folder for these files, written if there is none: input_ids.npy int32 [T], loss_mask.npy uint8 [T],
    cu_seqlens.npy int64 [n+1], stats.json. For rank 0 alone.

    Raises InputError for a missing, unreadable or empty file, for the first malformed row (as file:line), for rows
    longer than options.max_length when options.truncation is error, and when no row is left.
    """
    return tokenized(files, ChatTokenizer.load(tokenizer, Path(tokenizer_dir)), options, Path(cache_dir), Path(tokenizer_dir),
                     (FORMAT, OPTIONS, UNUSED, "max_length"), tokenize_row, write_arrays)


def tokenized(files: str | Sequence[str], chat: ChatTokenizer, options, cache_dir: Path, tokenizer_dir: Path, kind: tuple,
              tokenize_row: Callable, write_arrays: Callable) -> Path:
    """The cache folder, for tokenize() and tokenize_prompts(). kind: FORMAT, OPTIONS, UNUSED and the name of the length limit."""
    paths, (version, names, unused, limit) = find_files(files), kind

    def write(folder: Path) -> None:
        tables = tokenize_files(paths, tokenize_row, unused, chat, options, folder / "datasets")
        check_lengths(paths, tables, options.truncation, limit, getattr(options, limit))
        write_arrays(folder, tables, options)
    folder = cached(cache_dir / cache_key(paths, chat, tokenizer_dir, version, [getattr(options, name) for name in names]), write)
    stats = json.loads((folder / "stats.json").read_text())
    for name in SHAPES.keys() & stats.keys():
        print(f"data: {stats[name]:,} rows have the shape of {name}: {SHAPES[name].__doc__.split(chr(10))[0]}", flush=True)
    return folder


def tokenize_files(paths: list[Path], tokenize_row: Callable, unused: dict, chat: ChatTokenizer, options, work: Path) -> list:
    """A pyarrow.Table for each file, mapped from files in `work`, with a row for each row or line: unused, in which
    tokenize_row(row, chat, options) has replaced what it returns. An empty line stays as it is.

    Raises InputError for a file without rows, and for the first row for which tokenize_row does, as file:line.
    """
    from datasets import Features, List, Value
    types = {"input_ids": List(Value("int32")), "loss_mask": List(Value("uint8")), "length": Value("int64"),
             "record": Value("string"), "shape": Value("string"), "error": Value("string")}
    # OmegaConf takes microseconds to look up a key.
    options = SimpleNamespace(**options) if isinstance(options, Mapping) else options
    tables = []
    gc.freeze()         # a million objects of imported modules, which the collector would go through again and again
    FORKS_DIE.append(True)
    try:
        for i, path in enumerate(paths):
            rows = read_rows(path, work / str(i))
            if not len(rows):
                raise InputError(f"{path}: the file has no rows")
            num_proc = options.num_proc or (min(8, len(os.sched_getaffinity(0))) if len(rows) >= SERIAL_ROWS else 1)
            tokens = rows.map(
                tokenize_rows, batched=True, batch_size=BATCH_ROWS, with_indices=True, remove_columns=rows.column_names,
                fn_kwargs={"name": str(path), "is_json": is_json(path), "tokenize_row": tokenize_row,
                           "unused": unused | {"error": None}, "chat": chat, "options": options},
                features=Features({name: types[name] for name in (*unused, "error")}), desc=f"tokenizing {path.name}",
                num_proc=min(num_proc, len(rows)) if num_proc > 1 else None,
                new_fingerprint="tokens", cache_file_name=str(work / str(i) / "tokens.arrow"), load_from_cache_file=False)
            tables.append(tokens.with_format("arrow")[:])
    finally:
        FORKS_DIE.clear()
        gc.unfreeze()
    for table in tables:
        if table["error"].null_count < len(table):
            raise InputError(table["error"].drop_null()[0].as_py())
    return tables


def tokenize_rows(columns: dict[str, list], indices: list[int], name: str, is_json: bool, tokenize_row: Callable, unused: dict,
                  chat: ChatTokenizer, options) -> dict[str, list]:
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
        return (yield from tokenize_row(row, chat, options))
    results = in_step([steps(values) for values in zip(*columns.values(), strict=True)])
    results = [unused | ({"error": f"{name}:{index + 1}: {result}"} if isinstance(result, InputError) else result)
               for index, result in zip(indices, results, strict=True)]
    return {key: [result[key] for result in results] for key in unused}


def tokenize_row(row: dict, chat: ChatTokenizer, options) -> Steps[dict]:
    row, shape = read_shape(row, options, with_response=True)
    ids, mask = yield from encode(row, chat, options)
    kept = kept_tokens(len(ids), options.max_length, options.truncation)
    result = {"length": len(ids), "shape": shape}
    ids, mask = ids[kept], [0, *mask[kept][1:]]         # nothing predicts the first token
    return result | {"input_ids": ids, "loss_mask": mask} if any(mask) else result


def kept_tokens(length: int, limit: int | None, truncation: str) -> slice:
    """The tokens to keep of a row of this length: none of one that is too long where truncation is error or drop."""
    if limit is None or length <= limit:
        return slice(None)
    return {"left": slice(length - limit, None), "right": slice(limit)}.get(truncation, slice(0))


def check_lengths(paths: list[Path], tables: list, truncation: str, key: str, limit: int | None) -> None:
    """Raises InputError, with the first few, when truncation is error and rows are longer than limit (data.{key})."""
    if truncation != "error" or limit is None:
        return
    lengths = [table["length"].to_numpy() for table in tables]
    long = [(path, row, n[row]) for path, n in zip(paths, lengths) for row in np.flatnonzero(n > limit)]
    if long:
        shown = ", ".join(f"{path}:{row + 1} ({n} tokens)" for path, row, n in long[:5])
        raise InputError(f"{len(long)} of {sum(map(len, lengths))} rows are longer than data.{key}={limit}: "
                         f"{shown}{', ...' if len(long) > 5 else ''}; raise it, or set data.truncation to left, right "
                         "or drop")


def write_arrays(folder: Path, tables: list, options) -> None:
    """Copy the tokens into .npy files and count them in stats.json."""
    kept, stats = count_rows(tables, options.truncation, options.max_length)
    num_unused = sum(int((table["length"].to_numpy() > 0).sum()) for table in tables) - stats["rows"]
    stats = {"rows": stats.pop("rows"), "dropped_no_loss": num_unused - stats["dropped_long"], **stats}
    if not stats["rows"]:
        raise InputError(f"no row is left to train on: {stats['dropped_no_loss']} rows have no trained token, "
                         f"{stats['dropped_long']} are longer than data.max_length={options.max_length}")
    np.save(folder / "cu_seqlens.npy", np.concatenate([[0], np.cumsum(kept[kept > 0], dtype=np.int64)]))
    write_array(folder, "input_ids", np.int32, tables, stats["tokens"])
    mask = write_array(folder, "loss_mask", np.uint8, tables, stats["tokens"])
    stats["loss_tokens"] = int(mask.sum(dtype=np.int64))
    (folder / "stats.json").write_text(json.dumps(stats, indent=1))


def count_rows(tables: list, truncation: str, limit: int | None) -> tuple[np.ndarray, dict[str, int]]:
    """(tokens kept of each row, 0: not used; counts of rows kept, dropped_long, truncated and kept, tokens, max_length,
    and of the rows of each shape)"""
    lengths = np.concatenate([table["length"].to_numpy() for table in tables])
    kept = np.concatenate([chunk.value_lengths().to_numpy() for table in tables for chunk in table["input_ids"].chunks])
    long = lengths > (limit or np.inf)
    shapes = Counter()
    for found in (found for table in tables for found in table["shape"].value_counts().to_pylist()):
        shapes[found["values"]] += found["counts"]
    return kept, {"rows": int((kept > 0).sum()), "dropped_long": int(long.sum()) if truncation == "drop" else 0,
                  "truncated": int((long & (kept > 0)).sum()), "tokens": int(kept.sum()), "max_length": int(kept.max())} | {
                      name: count for name, count in shapes.items() if name}


def write_array(folder: Path, name: str, dtype, tables: list, num_tokens: int) -> np.ndarray:
    """Copy a column of lists, end to end, into an .npy file [num_tokens], a chunk of some thousand rows at a time."""
    path = folder / f"{name}.npy"
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(num_tokens,))
    with open(path, "r+b") as file:         # a disk that fills up behind a memory map kills the process without a word
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    at = 0
    for chunk in (chunk for table in tables for chunk in table[name].chunks):
        values = chunk.flatten().to_numpy()
        array[at:at + len(values)] = values
        at += len(values)
    array.flush()
    return array


class TokenDataset:
    """n tokenized rows, mapped from a cache folder: nothing is read before it is asked for.

    name: the hash of all that the tokens depend on. lengths: np.int64 [n], tokens of each row.
    stats: rows (kept), dropped_no_loss, dropped_long, truncated (and kept), tokens, loss_tokens, max_length (longest), and
    the rows of each shape, e.g. Alpaca.
    """

    def __init__(self, name: str, input_ids: np.ndarray, loss_mask: np.ndarray, cu_seqlens: np.ndarray, stats: dict):
        self.name = name
        self.input_ids, self.loss_mask, self.cu_seqlens, self.stats = input_ids, loss_mask, cu_seqlens, stats
        self.lengths = np.diff(np.asarray(cu_seqlens))

    @classmethod
    def load(cls, path: Path) -> TokenDataset:
        names = ("input_ids", "loss_mask", "cu_seqlens")
        arrays = [np.load(Path(path) / f"{name}.npy", mmap_mode="r") for name in names]
        return cls(Path(path).name, *arrays, json.loads((Path(path) / "stats.json").read_text()))

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The rows at these indices, in this order. Fields, float32 [T], 0 or 1: loss_mask, the tokens to learn;
        answer_mask, those of the row's last turn, which validation compares with the greedy choice."""
        rows = [slice(self.cu_seqlens[i], self.cu_seqlens[i + 1]) for i in indices]
        masks = [self.loss_mask[row] for row in rows]
        fields = {"loss_mask": joined(masks, np.float32), "answer_mask": joined(map(last_run, masks), np.float32)}
        cu_seqlens = np.cumsum([0, *self.lengths[list(indices)]], dtype=np.int64)
        return Batch(joined([self.input_ids[row] for row in rows], np.int64), torch.from_numpy(cu_seqlens), fields)


def joined(parts, dtype) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *(np.asarray(part, dtype) for part in parts)]))


def last_run(mask: np.ndarray) -> np.ndarray:
    """The mask without all but its last run of ones."""
    ones = np.flatnonzero(mask)
    breaks = np.flatnonzero(np.diff(ones) > 1)
    run = np.zeros_like(mask)
    run[ones[breaks[-1] + 1 if len(breaks) else 0:]] = 1
    return run
