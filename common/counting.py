"""Counts and lists, for messages."""

from collections.abc import Iterable


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun, as "1 rank" or "2,000 ranks"."""
    plural = "" if number == 1 else "s"
    return f"{number:,} {noun}{plural}"


def shortened(items: Iterable) -> str:
    """Return the first eight items, separated by commas."""
    texts = [str(item) for item in items]
    return ", ".join(texts[:8]) + (", ..." if len(texts) > 8 else "")
