"""The texts and fields of a row that its rendered chat lacks, and the reasons."""

from __future__ import annotations

from typing import NamedTuple

# Kinds of losses.
LOST = "lost"  # a text, or a field that may stand for one
EARLIER = "earlier"  # reasoning that the template prints only in the latest turns
UNREAD = "unread"  # a number or a boolean
UNPRINTED = "unprinted"  # a description within a tool, which templates may shorten
EMPTY = "empty"  # an answer without any text, which is trained


class Loss(NamedTuple):
    """A text or a field that the rendered chat lacks.

    Attributes:
        kind: one of the kinds above.
        field: its name, e.g. "reasoning_content" or "tools".
        message: the index of its message; None for a column of the row.
        excerpt: the beginning of the lost text, or the value.
    """

    kind: str
    field: str
    message: int | None
    excerpt: str


def is_empty(value) -> bool:
    """Return whether a value is None, an empty list or dict, or white space."""
    return value is None or value in ("", [], {}) or (isinstance(value, str) and value.isspace())


def squash(text: str) -> str:
    """Return a text without white space."""
    return "".join(text.split())
