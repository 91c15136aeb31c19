"""Tokenize data files into a cache folder, once, in worker processes.

dataset.py, prompts.py, preference_dataset.py and reward_dataset.py each have a CacheSpec for this.
Only rank 0 tokenizes. It imports Hugging Face datasets and pyarrow only if there is no cache yet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from config import InputError
from data import unknown_tokens
from data.cache import WITH_ROWS, cache_key, ensure_cached
from data.chat.encoding import RowCoroutine, encode_together
from data.chat.tokenizer import ChatTokenizer
from data.columns import report_lines, unused_row_lines, uses_of_file
from data.files import find_files, is_json, parse_row, read_rows
from data.images import stored
from data.images.processor import Processor
from data.lengths import LengthLimit, check_lengths
from data.records import tokenize_row_and_keep, write_records
from data.selection import Selection, as_selection
from data.shapes import SHAPES
from data.sources import write_file_rows
from data.workers import forking_workers

# The additional columns for a vision-language model, with the values for a row without images.
NO_IMAGES = {"pixels": b"", "image_sizes": [], "image_files": [], "cut": False}
USES = "uses.json"
ROWS_PER_CALL = 100  # of tokenize_rows()
MAX_SERIAL_ROWS = 2000  # for fewer rows, starting worker processes takes longer than tokenizing
MAX_PROCESSES = 8


class CacheSpec(NamedTuple):
    """The contents of a cache: the columns of a row, and how they are computed.

    Attributes:
        version: the version of the cache's files. It is a part of the folder's name.
        options: the keys of `data` that the tokens depend on.
        limit_key: the key of `data` that limits the length of a row.
        unused: all columns, with the values for a row that is not used.
        tokenize_row: (row, chat, options, folder) -> the columns whose values differ from `unused`.
        suffix: the end of the cache folder's name.
    """

    version: int | str
    options: tuple[str, ...]
    limit_key: str
    unused: dict
    tokenize_row: Callable
    suffix: str = ""

    def with_images(self, paths: list[Path], processor: Processor) -> CacheSpec:
        """Return the spec of a cache that also stores images, for a vision-language model."""
        folders = [str(folder_of(path)) for path in paths]
        images = f" with images of {folders} without {sorted(processor.dropped)}"
        return self._replace(version=f"{self.version}{images}", unused=self.unused | NO_IMAGES)

    def with_rows(self) -> CacheSpec:
        """Return the spec of a cache that also stores the rows, without pixels, for a sampler."""
        unused = self.unused | {"record": ""}
        keep = partial(tokenize_row_and_keep, self.tokenize_row)
        return self._replace(unused=unused, tokenize_row=keep, suffix=WITH_ROWS)


class Source(NamedTuple):
    """A data file or a saved data set, and which of its rows are tokenized.

    Attributes:
        path: the file or the directory.
        is_selected: bool [number of rows]; None: all rows are selected.
    """

    path: Path
    is_selected: np.ndarray | None = None

    def selects(self, row: int) -> bool:
        return self.is_selected is None or bool(self.is_selected[row])


def tokenize_to_cache(
    spec: CacheSpec,
    files: str | Sequence[str] | Selection,
    tokenizer,
    options,
    cache_dir: Path,
    tokenizer_dir: Path | str,
    processor: Processor | None,
) -> Path:
    """Return the cache folder for these files. Writes it first if there is none.

    Args:
        files: names of data files, patterns or directories, or a selection of their rows.
        options: the `data` section of the configuration.
        processor: the processor of a vision-language model, else None.

    Raises:
        InputError: see dataset.tokenize().
    """
    if isinstance(options, Mapping):
        options = plain_options(options)
    selection = as_selection(files)
    paths = find_files(selection.files)
    tokenizer_dir = Path(tokenizer_dir)
    chat = ChatTokenizer.load(tokenizer, tokenizer_dir, processor)
    limit = LengthLimit(spec.limit_key, getattr(options, spec.limit_key), options.truncation)
    if processor:
        spec = spec.with_images(paths, processor)

    def write(folder: Path) -> None:
        import pyarrow

        work = folder / "datasets"
        masks = select_rows(paths, selection, work)
        sources = [Source(path, mask) for path, mask in zip(paths, masks, strict=True)]
        tables = tokenize_files(sources, spec, chat, options, work)
        check_lengths(paths, tables, limit)
        write_arrays(folder, pyarrow.concat_tables(tables), limit, chat.unknown_id)
        write_uses(folder, tables)
        write_file_rows(folder, tables)

    values = [getattr(options, name) for name in spec.options] + selection.settings
    key = cache_key(paths, chat, tokenizer_dir, spec.version, values)
    folder = Path(cache_dir) / f"{key}{spec.suffix}"
    folder = ensure_cached(folder, write, stored.are_current)
    stats = json.loads((folder / "stats.json").read_text())
    if processor and not stats["images"]:
        print(f"data: no row in {selection.files} has an image", flush=True)
    if not selection.has_all_rows:
        print(f"data: {selection.describe(stats['rows'])}", flush=True)
    report_shapes(stats)
    is_training = "loss_mask" in spec.unused
    lines = [
        *report_lines(paths, read_uses(folder), is_training),
        *unknown_tokens.report_lines(stats, chat),
        *unused_row_lines(stats, f"data.{limit.key}={limit.tokens}", options.truncation),
    ]
    for line in lines:
        print(f"data: {line}", flush=True)
    return folder


def plain_options(options: Mapping) -> SimpleNamespace:
    """Return the section `data` with plain attributes: OmegaConf takes microseconds per look-up."""
    values = {}
    for key, value in options.items():
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        values[key] = list(value) if is_list else value
    return SimpleNamespace(**values)


def report_shapes(stats: dict) -> None:
    """Print how many rows were converted from each format of another project."""
    for name in SHAPES.keys() & stats.keys():
        columns = SHAPES[name].columns
        print(f"data: {stats[name]:,} rows are in the {name} format: {columns}", flush=True)


# -- rows to tokens --------------------------------------------------------------------------------


def select_rows(paths: list[Path], selection: Selection, work: Path) -> Sequence[np.ndarray | None]:
    """Return which rows of each file are selected: bool [n], or None for all of them.

    Args:
        work: a directory for temporary files.
    """
    if selection.has_all_rows:
        return [None] * len(paths)
    return selection.masks([len(read_rows(path, work / str(i))) for i, path in enumerate(paths)])


def tokenize_files(
    sources: list[Source], spec: CacheSpec, chat: ChatTokenizer, options, work: Path
) -> list:
    """Tokenize all files.

    Args:
        work: the directory that the tables are written to and memory-mapped from.

    Returns:
        One pyarrow.Table per file, with one row for each row or line of the file. Empty lines
        become unused rows.

    Raises:
        InputError: a file has no rows, or a row is malformed (the message names the first one, as
            file:line).
    """
    tables = [
        tokenize_file(source, spec, chat, options, work / str(i))
        for i, source in enumerate(sources)
    ]
    for table in tables:
        if table["error"].null_count < len(table):
            raise InputError(table["error"].drop_null()[0].as_py())
    return tables


def tokenize_file(source: Source, spec: CacheSpec, chat: ChatTokenizer, options, work: Path):
    """Return a file's rows as a pyarrow.Table with the columns of `spec.unused`, and `error`."""
    from datasets import Features

    rows = read_rows(source.path, work)
    if not len(rows):
        raise InputError(f"{source.path}: the file has no rows")
    types = column_types()
    num_processes = min(options.num_proc or default_processes(len(rows)), len(rows))
    has_workers = num_processes > 1
    with forking_workers() if has_workers else nullcontext():
        tokens = rows.map(
            tokenize_rows,
            batched=True,
            batch_size=ROWS_PER_CALL,
            with_indices=True,
            remove_columns=rows.column_names,
            fn_kwargs={
                "source": source,
                "spec": spec,
                "chat": chat,
                "options": options,
            },
            features=Features({name: types[name] for name in [*spec.unused, "error"]}),
            desc=f"tokenizing {source.path.name}",
            num_proc=num_processes if has_workers else None,
            new_fingerprint="tokens",
            cache_file_name=str(work / "tokens.arrow"),
            load_from_cache_file=False,
        )
    return tokens.with_format("arrow")[:]


def default_processes(num_rows: int) -> int:
    if num_rows < MAX_SERIAL_ROWS:
        return 1
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0)))


def column_types() -> dict:
    """Return the type of every column that a table of tokens may have."""
    from datasets import List, Value

    return {
        "input_ids": List(Value("int32")),
        "loss_mask": List(Value("uint8")),
        "length": Value("int64"),
        "record": Value("string"),
        "shape": Value("string"),
        "error": Value("string"),
        "use": Value("string"),
        "is_lost": Value("bool"),
        "is_identical": Value("bool"),
        "chosen_tokens": Value("int32"),
        "target": Value("float64"),
        "cut": Value("bool"),
        "pixels": Value("large_binary"),
        "image_sizes": List(List(Value("int32"))),
        "image_files": List(Value("string")),
    }


def tokenize_rows(
    columns: dict[str, list],
    indices: list[int],
    source: Source,
    spec: CacheSpec,
    chat: ChatTokenizer,
    options,
) -> dict[str, list]:
    """Tokenize some rows of a file. For the map() of Hugging Face datasets.

    Args:
        columns: {name: values of these rows}.
        indices: the indices of the rows in the file, from 0.
        source: the file, and which of its rows are selected.

    Returns:
        The columns of `spec.unused`, and `error`, which is a message with file and line for a row
        that is malformed.
    """
    folder = folder_of(source.path)
    holds_json = is_json(source.path)
    unused = spec.unused | {"error": None}

    def encode_row(index: int, values: tuple) -> RowCoroutine[dict]:
        if not source.selects(index):
            return {}
        row = dict(zip(columns, values, strict=True))
        if holds_json:
            if not row["text"].strip():
                return {}
            row = parse_row(row["text"])
        if not isinstance(row, dict):
            raise InputError(f"the row must be an object, not {type(row).__name__}")
        return (yield from spec.tokenize_row(row, chat, options, folder))

    results = []
    rows = zip(indices, zip(*columns.values(), strict=True), strict=True)
    tokenized_rows = encode_together([encode_row(index, values) for index, values in rows])
    for index, result in zip(indices, tokenized_rows, strict=True):
        problem = result
        if not isinstance(result, InputError):
            problem = unknown_tokens.problem(result.get("input_ids", []), chat)
        if problem:
            result = {"error": f"{source.path}:{index + 1}: {problem}"}
        results.append(unused | result)
    tokens = {}
    for key in unused:
        tokens[key] = [result[key] for result in results]
    return tokens


def folder_of(path: Path) -> Path:
    """Return the directory for relative paths in a data file or a saved data set."""
    return (path if path.is_dir() else path.parent).resolve()


# -- tokens to arrays ------------------------------------------------------------------------------


def write_arrays(folder: Path, table, limit: LengthLimit, unknown_id: int | None = None) -> None:
    """Copy a table's columns into files, and write stats.json.

    stats.json contains

    * rows, tokens, max_length: the number of kept rows, their tokens, and the longest one's length;
    * dropped_long, truncated: the numbers of rows that were too long;
    * the number of rows of each shape, e.g. Alpaca;
    * loss_tokens, dropped_no_loss (SFT): the number of trained tokens, and of rows without any;
    * images, dropped_images (with images): the number of images, and of rows that are dropped
      because truncation would cut them within an image's tokens;
    * dropped_lost_fields (if there are any): the number of rows that data.lost_fields drops;
    * dropped_identical (preferences): the number of rows whose two answers are the same;
    * rows_with_unknown_tokens (if there are any): the number of kept rows that have them.

    Raises:
        InputError: no row is left.
    """
    counts = count_rows(table, limit)
    num_identical = 0
    if "is_identical" in table.column_names:
        num_identical = sum(table["is_identical"].to_pylist())
    if not counts.is_used.any():
        raise InputError(no_row_left(counts, limit, num_identical))
    used_lengths = counts.kept_lengths[counts.is_used]
    stats = {
        "rows": int(counts.is_used.sum()),
        "dropped_long": counts.num_dropped,
        "truncated": counts.num_truncated,
        "tokens": int(used_lengths.sum()),
        "max_length": int(used_lengths.max()),
    }
    cu_seqlens = np.concatenate([[0], np.cumsum(used_lengths, dtype=np.int64)])
    np.save(folder / "cu_seqlens.npy", cu_seqlens)
    ids = write_array(folder, "input_ids", np.int32, table, stats["tokens"])
    stats |= unknown_tokens.count_rows(ids, cu_seqlens, unknown_id)
    if "loss_mask" in table.column_names:
        loss_mask = write_array(folder, "loss_mask", np.uint8, table, stats["tokens"])
        stats["dropped_no_loss"] = counts.num_untrained
        stats["loss_tokens"] = int(loss_mask.sum(dtype=np.int64))
    if "chosen_tokens" in table.column_names:
        write_numbers(folder, table, counts)
        stats["dropped_identical"] = num_identical
    if "record" in table.column_names:
        write_records(folder, chain.from_iterable(c.to_pylist() for c in table["record"].chunks))
    if "pixels" in table.column_names:
        stats["dropped_images"] = counts.num_cut
        stats["images"] = stored.write(folder, table, counts.is_used)
    if counts.num_lost:
        stats["dropped_lost_fields"] = counts.num_lost
    for shape in table["shape"].value_counts().to_pylist():
        if shape["values"]:
            stats[shape["values"]] = shape["counts"]
    (folder / "stats.json").write_text(json.dumps(stats, indent=1))


def write_numbers(folder: Path, table, counts: RowCounts) -> None:
    """Write the columns with one number per row that is used."""
    for name in {"chosen_tokens", "target"} & set(table.column_names):
        np.save(folder / f"{name}.npy", table[name].to_numpy()[counts.is_used])


class RowCounts(NamedTuple):
    """The rows of a table, by what happens to them.

    Attributes:
        kept_lengths: [n], the number of tokens that each row keeps.
        is_used: [n] bool, whether a row keeps any token.
        num_dropped: the number of rows dropped because they are too long (truncation: drop).
        num_truncated: the number of rows that are used but were truncated.
        num_cut: the number of rows dropped because truncation would cut an image.
        num_untrained: the number of rows dropped because no remaining token is trained.
        num_lost: the number of rows dropped because of data.lost_fields.
        has_text: whether any line is not blank.
    """

    kept_lengths: np.ndarray
    is_used: np.ndarray
    num_dropped: int
    num_truncated: int
    num_cut: int
    num_untrained: int
    num_lost: int
    has_text: bool


def count_rows(table, limit: LengthLimit) -> RowCounts:
    lengths = table["length"].to_numpy()
    chunks = [chunk.value_lengths().to_numpy() for chunk in table["input_ids"].chunks]
    kept_lengths = np.concatenate(chunks)
    is_used = kept_lengths > 0
    is_long = limit.is_exceeded(lengths)
    num_dropped = 0
    num_cut = 0
    if limit.truncation == "drop":
        num_dropped = int(is_long.sum())
    elif "cut" in table.column_names:
        num_cut = sum(table["cut"].to_pylist())
    num_unused = int((lengths > 0).sum() - is_used.sum())
    return RowCounts(
        kept_lengths,
        is_used,
        num_dropped,
        num_truncated=int((is_long & is_used).sum()),
        num_cut=num_cut,
        num_untrained=num_unused - num_dropped - num_cut,
        num_lost=sum(table["is_lost"].to_pylist()),
        has_text=any(table["use"].to_pylist()),
    )


def no_row_left(counts: RowCounts, limit: LengthLimit, num_identical: int) -> str:
    if not counts.has_text:
        return "no row is left: all lines of the files are blank"
    num_long = counts.num_dropped + counts.num_cut
    message = f"no row is left: {num_long} rows are longer than data.{limit.key}={limit.tokens}"
    if counts.num_untrained > 0:
        message += f", {counts.num_untrained} have no trained token"
    if counts.num_lost:
        message += f", {counts.num_lost} lose text under the chat template (data.lost_fields=drop)"
    if num_identical:
        message += f", {num_identical} have two answers that are the same"
    return message


def write_uses(folder: Path, tables: list) -> None:
    """Write how the columns of each file are used: see data.columns.uses_of_file()."""
    uses = [uses_of_file(table["use"].value_counts().to_pylist()) for table in tables]
    (folder / USES).write_text(json.dumps(uses, indent=1))


def read_uses(folder: Path) -> list[dict]:
    """Return how the columns of each file are used, from a cache folder: FileUse as dicts."""
    return json.loads((folder / USES).read_text())


def write_array(folder: Path, name: str, dtype, table, num_tokens: int) -> np.ndarray:
    """Concatenate the lists of a column in an .npy file [num_tokens], and return the array.

    Copies one chunk of a few thousand rows at a time, to limit the memory in use.
    """
    path = folder / f"{name}.npy"
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(num_tokens,))
    # Reserve the space now: if the disk fills up while a memory map is written, the process is
    # killed without an error message.
    with open(path, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    position = 0
    for chunk in table[name].chunks:
        values = chunk.flatten().to_numpy()
        array[position : position + len(values)] = values
        position += len(values)
    array.flush()
    return array
