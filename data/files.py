"""Find data files, and read their rows."""

from __future__ import annotations

import csv
import glob
import gzip
import itertools
import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from common.json_files import read_object
from config import InputError
from data.messages import parse_json

# All but .parquet, which is compressed already, may be followed by .gz.
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
# How many files of a directory's subdirectories are looked at. They may hold a million images.
MAX_LISTED = 10_000


def suffix_of(path: Path) -> str:
    """Return the suffix of a file, including .gz: ".jsonl.gz" for a.jsonl.gz."""
    if path.suffix == ".gz":
        return Path(path.stem).suffix + ".gz"
    return path.suffix


def format_of(path: Path) -> str:
    """Return the suffix of a file without .gz: ".jsonl" for a.jsonl and for a.jsonl.gz."""
    return suffix_of(path).removesuffix(".gz")


def is_json(path: Path) -> bool:
    """Return whether read_rows() returns the rows of this file as JSON text."""
    return path.is_file() and format_of(path) in (".jsonl", ".json")


def find_files(files: str | Sequence[str], reports: bool = True) -> list[Path]:
    """Return the files and saved data sets with these names.

    Names may be patterns (*.jsonl) or directories, which are replaced by their files, in
    alphabetical order.

    Args:
        reports: whether to print that files in subdirectories are not read.

    Raises:
        InputError: a file is missing or empty, or has an unknown suffix.
    """
    names = [files] if isinstance(files, str) else files
    paths = []
    for name in names:
        matches = [Path(name)]
        if not Path(name).exists():
            matches = [Path(match) for match in sorted(glob.glob(name, recursive=True))]
        if not matches:
            raise InputError(f"{name}: no such file or directory{hub_advice(name)}")
        for match in matches:
            paths += expand(match, reports)
    for path in paths:
        check_file(path)
    return paths


def hub_advice(name: str) -> str:
    """Return the advice for a name that may be a data set on the hub, or ""."""
    is_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).suffix
    if not is_hub_name:
        return ""
    return (
        '. If it is a data set on the hub, save it first: python -c "from datasets import '
        f"load_dataset; load_dataset('{name}').save_to_disk('data')\", and name a split of it, "
        "such as data/train"
    )


def check_file(path: Path) -> None:
    """Raise InputError if a file is empty or has an unknown suffix."""
    if not path.is_file():
        return
    if format_of(path) not in SUFFIXES:
        raise InputError(
            f"{path}: unknown suffix {path.suffix!r}: must be one of {', '.join(SUFFIXES)}, with "
            "or without .gz, or a directory"
        )
    if not path.stat().st_size:
        raise InputError(f"{path}: the file is empty")


def expand(path: Path, reports: bool) -> list[Path]:
    """Return the path itself if it is a file or a saved data set; else the directory's files."""
    if path.is_file() or (path / "dataset_info.json").exists():
        return [path]
    splits_file = path / "dataset_dict.json"
    if splits_file.exists():
        splits = read_object(splits_file).get("splits")
        if not splits or not isinstance(splits, list):
            raise InputError(f"{splits_file} names no splits: save the data set again")
        if len(splits) == 1:
            return [path / splits[0]]
        raise InputError(
            f"{path} holds the splits {', '.join(splits)}: choose one, e.g. {path / splits[0]}"
        )
    files = sorted(file for file in path.iterdir() if format_of(file) in SUFFIXES)
    if reports:
        report_subdirectories(path)
    if not files:
        raise InputError(
            f"{path}: the directory has no file that ends in {', '.join(SUFFIXES)}, and it was "
            "not written by save_to_disk() of Hugging Face datasets"
        )
    return files


def report_subdirectories(path: Path) -> None:
    """Print a line if subdirectories of a directory contain data files, which are not read."""
    for file in itertools.islice(path.glob("*/**/*"), MAX_LISTED):
        if format_of(file) in SUFFIXES:
            print(f"data: files in subdirectories are not read, such as {file}", flush=True)
            return


def read_rows(path: Path, work: Path):
    """Return the rows as a datasets.Dataset, memory-mapped from files in `work`.

    For .jsonl and .json files it has one column, "text", with each row as JSON. Arrow must not
    parse the JSON: it would give every tool call the argument names of all tool calls. The cells of
    .csv files stay text, so that 007 and NA are unchanged.

    Raises:
        InputError: the file cannot be read or has no rows.
    """
    import datasets

    work.mkdir(parents=True, exist_ok=True)
    try:
        return load_dataset(path, work)
    except (
        datasets.exceptions.DatasetGenerationError,
        OSError,
        EOFError,
        StopIteration,
        ValueError,
    ) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise InputError(f"{path}: the file cannot be read, or has no rows: {reason}") from error


def parse_row(text: str):
    """Return the row that a line of JSON holds.

    Raises:
        InputError: the line is not JSON, or an object in it has a key twice.
    """
    try:
        return parse_json(text)
    except InputError:
        raise
    except ValueError as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg} at column {error.colno}"
        raise InputError(
            f"the row is not JSON: {reason}. Each line must hold one row, unless the whole file is "
            "an array of rows"
        ) from None


def load_dataset(path: Path, work: Path):
    """Return the rows of a file or saved data set: see read_rows()."""
    import datasets

    if path.is_dir():
        return without_decoding(datasets.load_from_disk(str(path)))
    cache = str(work)
    source = unpack(path, work) if path.suffix == ".gz" else path
    file_format = format_of(path)
    if file_format == ".parquet":
        return without_decoding(datasets.Dataset.from_parquet(str(source), cache_dir=cache))
    if file_format == ".csv":
        return load_csv(source, cache)
    if starts_an_array(source):
        source = write_lines(source, work)
    return datasets.Dataset.from_text(str(source), cache_dir=cache, encoding="utf-8-sig")


def unpack(path: Path, work: Path) -> Path:
    """Decompress a .gz file into `work`, and return the new file."""
    unpacked = work / path.stem
    with gzip.open(path) as packed, unpacked.open("wb") as plain:
        shutil.copyfileobj(packed, plain)
    return unpacked


def load_csv(path: Path, cache: str):
    """Return the rows of a .csv file, with all columns as strings.

    Raises:
        ValueError: the file is not a table: see read_header().
    """
    import datasets

    columns = read_header(path)
    return datasets.Dataset.from_csv(
        str(path),
        names=columns,
        header=0,
        features=datasets.Features({column: datasets.Value("string") for column in columns}),
        cache_dir=cache,
        keep_default_na=False,
        encoding="utf-8-sig",
    )


def read_header(path: Path) -> list[str]:
    """Return the columns of a .csv file. A column without a name gets its number as a name.

    The reader of `datasets` would move the cells of rows that are too long into other columns, and
    fill up rows that are too short.

    Raises:
        ValueError: two columns have the same name; a row has more or fewer cells than there are
            columns; quotes are wrong; the cells are not separated by commas.
    """
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        try:
            header = next(rows)
            check_columns(header)
            for row in rows:
                if row and len(row) != len(header):
                    raise ValueError(
                        f"line {rows.line_num} has {len(row)} of {len(header)} cells: put quotes "
                        "around cells that contain commas"
                    )
        except csv.Error as error:
            raise ValueError(
                f"line {rows.line_num}: {error}; a quote within a quoted cell is written twice"
            ) from None
    return [name or f"column {i + 1}" for i, name in enumerate(header)]


def check_columns(header: list[str]) -> None:
    """Raise ValueError if the first line of a .csv file does not look like the names of columns."""
    repeated = [name for i, name in enumerate(header) if name in header[:i]]
    if repeated:
        raise ValueError(f"the header names the column {repeated[0]!r} twice")
    separators = [separator for separator in "\t;|" if separator in header[0]]
    if len(header) == 1 and separators:
        raise ValueError(
            f"the header is {header[0][:60]!r}: separate cells by commas, not by {separators[0]!r}"
        )


def starts_an_array(path: Path) -> bool:
    """Return whether a file holds an array rather than one row per line."""
    with path.open(encoding="utf-8-sig") as file:
        return file.read(4096).lstrip().startswith("[")


def write_lines(path: Path, work: Path) -> Path:
    """Write the rows of a JSON array to a file in `work`, one per line, and return the file.

    Raises:
        ValueError: the file is not one array, or has no rows.
    """
    lines_path = work / "rows.jsonl"
    rows = parse_json(path.read_text(encoding="utf-8-sig"))
    if not rows:
        raise ValueError("the array is empty")
    with lines_path.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
    return lines_path


def without_decoding(rows):
    """Return the data set with its images still encoded, as {bytes, path}.

    Otherwise `datasets` would decode images while it reads rows, and one broken image would make
    the whole file unreadable.
    """
    rows.info.features = undecoded_feature(rows.features)
    return rows


def undecoded_feature(feature):
    """Return a column's type with the decoding of images turned off."""
    from datasets import Image

    if isinstance(feature, Image):
        return Image(decode=False)
    if isinstance(feature, dict):
        inner = {name: undecoded_feature(value) for name, value in feature.items()}
        return type(feature)(inner)
    if "feature" in vars(feature):
        return replace(feature, feature=undecoded_feature(feature.feature))
    return feature
