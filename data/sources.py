"""Where the rows of a data set come from: the names in data.train_files, and their rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.files import find_files

FILE_ROWS = "file_rows.json"


def write_file_rows(folder: Path, tables: list) -> None:
    """Write file_rows.json: the number of used rows in each file, in order.

    Args:
        tables: see data.tokenization.tokenize_files().
    """
    counts = []
    for table in tables:
        lengths = [chunk.value_lengths().to_numpy() for chunk in table["input_ids"].chunks]
        counts.append(int((np.concatenate(lengths) > 0).sum()))
    (folder / FILE_ROWS).write_text(json.dumps(counts))


def read_file_rows(folder: Path) -> list[int]:
    """Return the number of used rows in each file; see write_file_rows()."""
    return json.loads((folder / FILE_ROWS).read_text())


def source_sizes(files: str | Sequence[str], file_rows: list[int]) -> list[int]:
    """Return the number of rows of each name in data.train_files. For rank 0 only.

    A name may be a pattern or a directory, and so stand for several files.

    Args:
        file_rows: see read_file_rows().
    """
    names = [files] if isinstance(files, str) else files
    sizes = []
    first = 0
    for name in names:
        num_files = len(find_files(name, reports=False))
        sizes.append(sum(file_rows[first : first + num_files]))
        first += num_files
    return sizes
