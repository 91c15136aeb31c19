"""From data files to three memory-mapped arrays, tokenized once and kept under the hash of all that they depend on.

Reading a cache needs numpy and torch alone: only rank 0, and only on a miss, imports Hugging Face datasets.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

import disk
from config import InputError
from data.chat import encode
from data.packing import Batch
from data.rows import SHAPES, read_shape

FORMAT = 2                  # of the cache; raise it when encode() or the files of a cache change
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
OPTIONS = ("messages_key", "prompt_key", "response_key", "tools_key", "template_kwargs_key", "train_on", "max_length",
           "truncation")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                   "chat_template.jinja", "chat_template.json")
# A row without a trained token. length: before truncation; shape: the name of the one it was read as.
UNUSED = {"input_ids": [], "loss_mask": [], "length": 0, "shape": ""}
SERIAL_ROWS = 2000          # fewer rows are tokenized before worker processes have started


def tokenize(files: str | Sequence[str], tokenizer, options, cache_dir: Path, tokenizer_dir: Path | str) -> Path:
    """The cache folder for these files, written if there is none: input_ids.npy int32 [T], loss_mask.npy uint8 [T],
    cu_seqlens.npy int64 [n+1], stats.json. For rank 0 alone.

    Raises InputError for a missing, unreadable or empty file, for the first malformed row (as file:line), for rows
    longer than options.max_length when options.truncation is error, and when no row is left.
    """
    paths = check_files(files)

    def write(folder: Path) -> None:
        tables = tokenize_files(paths, tokenize_row, UNUSED, tokenizer, options, folder / "datasets")
        check_lengths(paths, tables, options.truncation, "max_length", options.max_length)
        write_arrays(folder, tables, options)
    values = [getattr(options, name) for name in OPTIONS]
    return say_shapes(cached(Path(cache_dir) / cache_key(paths, tokenizer, Path(tokenizer_dir), FORMAT, values), write))


def say_shapes(folder: Path) -> Path:
    """The folder, after a line for each shape that its rows were read as."""
    stats = json.loads((folder / "stats.json").read_text())
    for name in SHAPES.keys() & stats.keys():
        print(f"data: {stats[name]:,} rows have the shape of {name}: {SHAPES[name].__doc__.split(chr(10))[0]}", flush=True)
    return folder


def cached(folder: Path, write: Callable[[Path], None]) -> Path:
    """The folder; if there is none, write(work) first fills another one, which then gets this name, without the folder
    datasets in it, which is for files that nobody needs afterwards."""
    if folder.exists():
        return folder
    work = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"data.cache_dir={folder.parent} cannot be written: {error.strerror}") from error
    try:
        with disk.writing(work):
            write(work)
        shutil.rmtree(work / "datasets")
        if not folder.exists():     # another run may have been faster
            work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def check_files(files: str | Sequence[str]) -> list[Path]:
    paths = [Path(f) for f in ([files] if isinstance(files, str) else files)]
    for path in paths:
        if not path.exists():
            raise InputError(f"{path}: no such file or directory")
        if path.is_dir() and not (path / "dataset_info.json").exists():
            raise InputError(f"{path}: not a directory written by datasets.Dataset.save_to_disk (of one split)")
        if path.is_file() and path.suffix not in SUFFIXES:
            raise InputError(f"{path}: unknown suffix {path.suffix!r}: must be {', '.join(SUFFIXES)}, or a directory")
        if path.is_file() and not path.stat().st_size:
            raise InputError(f"{path}: the file is empty")
    return paths


def cache_key(paths: list[Path], tokenizer, tokenizer_dir: Path, version: int | str, options: list) -> str:
    """sha256 in hexadecimal over the contents of data and tokenizer files, the template in use, the version of what
    is written, and the values of the options."""
    parts = [part for path in paths for part in ([path] if path.is_file() else sorted(path.rglob("*")))]
    parts = [part for part in [*parts, *(tokenizer_dir / name for name in TOKENIZER_FILES)] if part.is_file()]
    settings = [version, tokenizer.chat_template, tokenizer.eos_token, *options]
    if not tokenizer_dir.is_dir() and tokenizer.is_fast:        # a hub name: no files to read
        settings.append(tokenizer.backend_tokenizer.to_str())
    digest = hashlib.sha256(json.dumps(settings).encode())
    for path in parts:
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read_rows(path: Path, cache_dir: Path):
    """A datasets.Dataset with one example a row; those of .jsonl and .json have the row's JSON in a column "text".

    Arrow never parses JSON here: it would give the arguments of every tool call the keys of all others. Nor does pandas
    guess at CSV cells: 007 and NA are text.
    """
    import datasets
    cache = str(cache_dir)
    try:
        if path.is_dir():
            return datasets.load_from_disk(str(path))
        if path.suffix == ".parquet":
            return datasets.Dataset.from_parquet(str(path), cache_dir=cache)
        if path.suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as file:
                columns = next(csv.reader(file))
            strings = datasets.Features({column: datasets.Value("string") for column in columns})
            return datasets.Dataset.from_csv(str(path), features=strings, cache_dir=cache, keep_default_na=False)
        if path.suffix == ".json":
            with path.open(encoding="utf-8") as file:
                if file.read(4096).lstrip().startswith("["):
                    file.seek(0)
                    return datasets.Dataset.from_dict({"text": [json.dumps(row) for row in json.load(file)]})
        return datasets.Dataset.from_text(str(path), cache_dir=cache)
    except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise InputError(f"{path}: cannot be read, or has no rows: {reason}") from error


def tokenize_files(paths: list[Path], tokenize_row: Callable, unused: dict, tokenizer, options,
                   cache_dir: Path) -> list:
    """A pyarrow.Table for each file, mapped, with a row for each row or line: unused, in which
    tokenize_row(row, tokenizer, options) has replaced what it returns. An empty line stays as it is.

    Raises InputError for a file without rows, and for the first row for which tokenize_row does, as file:line.
    """
    tables = [tokenize_file(path, tokenize_row, unused, tokenizer, options, cache_dir / str(i))
              for i, path in enumerate(paths)]
    for table in tables:
        if table["error"].null_count < len(table):
            raise InputError(table["error"].drop_null()[0].as_py())
    return tables


def tokenize_file(path: Path, tokenize_row: Callable, unused: dict, tokenizer, options, cache_dir: Path):
    from datasets import Features, List, Value
    types = {"input_ids": List(Value("int32")), "loss_mask": List(Value("uint8")), "length": Value("int64"),
             "record": Value("string"), "shape": Value("string"), "error": Value("string")}
    rows = read_rows(path, cache_dir)
    if not len(rows):
        raise InputError(f"{path}: the file has no rows")
    num_proc = options.num_proc or (min(8, len(os.sched_getaffinity(0))) if len(rows) >= SERIAL_ROWS else 1)
    cache_dir.mkdir(parents=True, exist_ok=True)
    tokens = rows.map(
        tokenize_line, with_indices=True, remove_columns=rows.column_names, desc=f"tokenizing {path.name}",
        fn_kwargs={"name": str(path), "is_json": path.suffix in (".jsonl", ".json"), "tokenize_row": tokenize_row,
                   "unused": unused | {"error": None}, "tokenizer": tokenizer, "options": options},
        features=Features({name: types[name] for name in (*unused, "error")}),
        num_proc=min(num_proc, len(rows)) if num_proc > 1 else None,
        new_fingerprint="tokens", cache_file_name=str(cache_dir / "tokens.arrow"), load_from_cache_file=False)
    return tokens.with_format("arrow")[:]


def tokenize_line(row: dict, index: int, name: str, is_json: bool, tokenize_row: Callable, unused: dict, tokenizer,
                  options) -> dict:
    try:
        if is_json:
            if not row["text"].strip():
                return unused
            row = json.loads(row["text"])
            if not isinstance(row, dict):
                raise InputError(f"the row must be an object, not {type(row).__name__}")
        return unused | tokenize_row(dict(row), tokenizer, options)
    except json.JSONDecodeError as error:
        return unused | {"error": f"{name}:{index + 1}: not JSON: {error.msg} at column {error.colno}"}
    except InputError as error:
        return unused | {"error": f"{name}:{index + 1}: {error}"}


def tokenize_row(row: dict, tokenizer, options) -> dict:
    row, shape = read_shape(row, options, with_response=True)
    ids, mask = encode(row, tokenizer, options)
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
