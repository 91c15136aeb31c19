"""Limit the number of tokens of a row: truncate or drop longer rows, or report them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from config import InputError

NUM_LISTED_ROWS = 5  # at most, in an error message


class LengthLimit(NamedTuple):
    """The limit on the number of tokens in a row.

    Attributes:
        key: its name in `data`.
        tokens: the limit; None: no limit.
        truncation: what to do with longer rows: error, drop, left or right.
    """

    key: str
    tokens: int | None
    truncation: str

    def is_exceeded(self, lengths: np.ndarray) -> np.ndarray:
        return lengths > (self.tokens or np.inf)


def kept_tokens(length: int, limit: int | None, truncation: str) -> slice:
    """Return the slice of its tokens that a row of `length` tokens keeps.

    If truncation is error or drop, a row that is longer than the limit keeps none.
    """
    if limit is None or length <= limit:
        return slice(None)
    if truncation == "left":
        return slice(length - limit, None)
    if truncation == "right":
        return slice(limit)
    return slice(0)


def check_lengths(paths: list[Path], tables: list, limit: LengthLimit) -> None:
    """Raise InputError, which lists a few rows, if truncation is error and rows are too long."""
    if limit.truncation != "error" or limit.tokens is None:
        return
    num_rows = 0
    too_long = []
    for path, table in zip(paths, tables):
        lengths = table["length"].to_numpy()
        num_rows += np.count_nonzero(lengths)
        too_long += [
            f"{path}:{row + 1} ({lengths[row]} tokens)"
            for row in np.flatnonzero(limit.is_exceeded(lengths))
        ]
    if too_long:
        listed = ", ".join(too_long[:NUM_LISTED_ROWS])
        if len(too_long) > NUM_LISTED_ROWS:
            listed += ", ..."
        raise InputError(
            f"{len(too_long)} of {num_rows} rows are longer than data.{limit.key}={limit.tokens}: "
            f"{listed}; raise it, or set data.truncation to left, right or drop"
        )
