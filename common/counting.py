"""Counts with their nouns, for messages."""


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun, as "1 rank" or "2,000 ranks"."""
    plural = "" if number == 1 else "s"
    return f"{number:,} {noun}{plural}"
