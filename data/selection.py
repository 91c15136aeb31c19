"""Select rows of data files at random: rows to validate, and limited numbers of rows.

    data.val_size             rows of the training files that are validated and not trained on
    data.train_max_samples    the largest number of rows to train on
    data.val_max_samples      the largest number of rows to validate

All rows of all files are put in one random order that depends only on their number, so it is the
same in every run. The first data.val_size rows are validated, and the others are trained on. A
limit keeps the first rows in this order, so a smaller selection is a part of a larger one. Selected
rows stay in the order of the files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.counting import count_of
from config import InputError

ALL = -1
SEED = 0


@dataclass(frozen=True)
class Selection:
    """The rows of data files that are used for one purpose.

    Attributes:
        files: names of data files, patterns or directories: see data.files.find_files().
        max_rows: the largest number of rows; -1: no limit. It is the value of `limit_key`.
        limit_key: the key of `data` that limits the number of rows.
        val_size: the number of rows that are split off for validation; below 1: a share of them.
        is_split_off: whether these are the rows that are split off, instead of the others.
    """

    files: str | Sequence[str]
    max_rows: int = ALL
    limit_key: str = "train_max_samples"
    val_size: float = 0
    is_split_off: bool = False

    @property
    def has_all_rows(self) -> bool:
        return self.max_rows == ALL and self.val_size == 0

    @property
    def settings(self) -> list:
        """The values that the selected rows depend on, besides the files; [] for all rows."""
        if self.has_all_rows:
            return []
        return [self.max_rows, self.val_size, self.is_split_off]

    def mask(self, num_rows: int) -> np.ndarray:
        """Return which of the rows of all files are selected: bool [num_rows].

        Raises:
            InputError: data.val_size leaves no row to train on.
        """
        num_split_off = count_split_off(self.val_size, num_rows)
        if self.val_size and num_split_off >= num_rows:
            raise InputError(
                f"data.val_size={self.val_size} leaves no row to train on: {self.files} has "
                f"{num_rows} rows. Lower it"
            )
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(SEED)).numpy()
        rows = order[:num_split_off] if self.is_split_off else order[num_split_off:]
        if self.max_rows != ALL:
            rows = rows[: self.max_rows]
        is_selected = np.zeros(num_rows, dtype=bool)
        is_selected[rows] = True
        return is_selected

    def masks(self, rows_of_files: Sequence[int]) -> list[np.ndarray]:
        """Return which rows of each file are selected: bool [n].

        Args:
            rows_of_files: the number n of rows of each file.

        Raises:
            InputError: data.val_size leaves no row to train on.
        """
        ends = np.cumsum(rows_of_files)
        return np.split(self.mask(int(ends[-1])), ends[:-1])

    def describe(self, num_rows: int) -> str:
        """Return a sentence about the selected rows.

        Args:
            num_rows: how many of them there are.
        """
        settings = []
        if self.max_rows != ALL:
            settings.append(f"data.{self.limit_key}={self.max_rows}")
        if self.val_size:
            settings.append(f"data.val_size={self.val_size}")
        purpose = "validated" if self.limit_key == "val_max_samples" else "trained on"
        verb = "is" if num_rows == 1 else "are"
        return (
            f"{count_of(num_rows, 'row')} of {self.files} {verb} {purpose}, chosen at random "
            f"({', '.join(settings)})"
        )


def count_split_off(val_size: float, num_rows: int) -> int:
    """Return how many of `num_rows` rows are validated. A share is rounded up."""
    return math.ceil(val_size * num_rows) if val_size < 1 else int(val_size)


def as_selection(files: str | Sequence[str] | Selection) -> Selection:
    """Return all rows of these files, or the selection itself."""
    return files if isinstance(files, Selection) else Selection(files)


def training_rows(options) -> Selection:
    """Return the rows to train on.

    Args:
        options: the section `data` of the configuration.
    """
    return Selection(options.train_files, options.train_max_samples, val_size=options.val_size)


def validation_rows(options) -> Selection | None:
    """Return the rows to validate, or None.

    Args:
        options: the section `data` of the configuration.
    """
    if options.val_files is not None:
        return Selection(options.val_files, options.val_max_samples, "val_max_samples")
    if options.val_size:
        return Selection(
            options.train_files,
            options.val_max_samples,
            "val_max_samples",
            options.val_size,
            is_split_off=True,
        )
    return None
