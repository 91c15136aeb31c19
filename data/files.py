"""Files of data: which there are, and their rows."""

from __future__ import annotations

import csv
import glob
import gzip
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from config import InputError

SUFFIXES = (
    ".jsonl",
    ".json",
    ".parquet",
    ".csv",
)  # each may end in .gz, except parquet, which compresses by itself


def suffix_of(path: Path) -> str:
    """ ".jsonl" of a.jsonl and of a.jsonl.gz."""
    return Path(path.stem).suffix + ".gz" if path.suffix == ".gz" else path.suffix


def is_json(path: Path) -> bool:
    """Whether read_rows gives each row as JSON."""
    return path.is_file() and suffix_of(path).removesuffix(".gz") in (".jsonl", ".json")


def find_files(files: str | Sequence[str]) -> list[Path]:
    """The files and saved data sets that these names stand for, patterns (*.jsonl) and directories of files in the order of
    their names. Raises InputError for what is not there, is empty, or of an unknown kind."""
    names, paths = [files] if isinstance(files, str) else files, []
    for name in names:
        found = (
            [Path(name)]
            if Path(name).exists()
            else [Path(p) for p in sorted(glob.glob(name, recursive=True))]
        )
        if not found:
            raise InputError(f"{name}: no such file or directory")
        paths += [path for one in found for path in expand(one)]
    for path in paths:
        if path.is_file() and suffix_of(path).removesuffix(".gz") not in SUFFIXES:
            raise InputError(
                f"{path}: unknown suffix {path.suffix!r}: must be {', '.join(SUFFIXES)} (or one of these and .gz), "
                "or a directory"
            )
        if path.is_file() and not path.stat().st_size:
            raise InputError(f"{path}: the file is empty")
    return paths


def expand(path: Path) -> list[Path]:
    """A file, a data set that was saved, or the files of a directory."""
    if path.is_file() or (path / "dataset_info.json").exists():
        return [path]
    if (path / "dataset_dict.json").exists():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        if len(splits) == 1:
            return [path / splits[0]]
        raise InputError(
            f"{path} holds the splits {', '.join(splits)}: choose one, e.g. {path / splits[0]}"
        )
    found = sorted(
        file for file in path.iterdir() if suffix_of(file).removesuffix(".gz") in SUFFIXES
    )
    if not found:
        raise InputError(
            f"{path}: no file in it ends in {', '.join(SUFFIXES)}, nor was it written by save_to_disk of datasets"
        )
    return found


def read_rows(path: Path, work: Path):
    """A datasets.Dataset, mapped from files in `work`, with one example a row; those of .jsonl and .json have the row's JSON in
    a column "text".

    Arrow never parses JSON here: it would give the arguments of every tool call the keys of all others. Nor does pandas
    guess at CSV cells: 007 and NA are text.
    """
    import datasets

    work.mkdir(parents=True, exist_ok=True)
    source, cache, suffix = path, str(work), suffix_of(path).removesuffix(".gz")
    try:
        if path.is_dir():
            return undecoded(datasets.load_from_disk(str(path)))
        if path.suffix == ".gz":
            source = work / path.stem
            with gzip.open(path) as packed, source.open("wb") as plain:
                shutil.copyfileobj(packed, plain)
        if suffix == ".parquet":
            return undecoded(datasets.Dataset.from_parquet(str(source), cache_dir=cache))
        if suffix == ".csv":
            with source.open(encoding="utf-8-sig", newline="") as file:
                columns = next(csv.reader(file))
            strings = datasets.Features({column: datasets.Value("string") for column in columns})
            return datasets.Dataset.from_csv(
                str(source),
                features=strings,
                cache_dir=cache,
                keep_default_na=False,
                encoding="utf-8-sig",
            )
        if suffix == ".json" and starts_an_array(source):
            with (
                source.open(encoding="utf-8-sig") as file,
                (work / "rows.jsonl").open("w", encoding="utf-8") as lines,
            ):
                lines.writelines(json.dumps(row) + "\n" for row in json.load(file))
            source = work / "rows.jsonl"
        return datasets.Dataset.from_text(str(source), cache_dir=cache, encoding="utf-8-sig")
    except (
        datasets.exceptions.DatasetGenerationError,
        OSError,
        EOFError,
        StopIteration,
        ValueError,
    ) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise InputError(f"{path}: cannot be read, or has no rows: {reason}") from error


def undecoded(rows):
    """The data set, with images as {bytes, path}: to decode one that is bad would end more than its row."""
    from datasets import Image

    def plain(feature):
        if isinstance(feature, Image):
            return Image(decode=False)
        if isinstance(feature, dict):
            return type(feature)({name: plain(inner) for name, inner in feature.items()})
        return (
            replace(feature, feature=plain(feature.feature))
            if "feature" in vars(feature)
            else feature
        )

    rows.info.features = plain(rows.features)
    return rows


def starts_an_array(path: Path) -> bool:
    with path.open(encoding="utf-8-sig") as file:
        return file.read(4096).lstrip().startswith("[")
