"""The tokens of a text, and the characters that each token covers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection
from typing import NamedTuple


class Span(NamedTuple):
    """The characters start:end of a text."""

    start: int
    end: int


class Tokens:
    """The token ids of a text, in order, and the characters that each token covers.

    Args:
        ids: [T] token ids.
        span_of: span_of(t) returns the (start, end) of token t in the text. It is called only when
            a span is needed, because computing all spans of a long text is slow.
    """

    def __init__(self, ids: list[int], span_of: Callable[[int], tuple[int, int]]):
        self.ids = ids
        self.span_of = span_of

    def start(self, index: int) -> int:
        """Return the start of token number `index` in the text."""
        return self.span_of(index)[0]

    def end(self, index: int) -> int:
        """Return the end of token number `index` in the text."""
        return self.span_of(index)[1]

    def mask(self, spans: list[Span]) -> list[int]:
        """Return T values: 1 for tokens that share a character with one of the spans, else 0."""
        mask = [0] * len(self.ids)
        indices = range(len(self.ids))
        for start, end in spans:
            first = bisect_right(indices, start, key=self.end)
            last = bisect_left(indices, end, lo=first, key=self.start)
            mask[first:last] = [1] * (last - first)
        return mask

    def between(self, start: int, end: int) -> Tokens:
        """Return the tokens that lie within the characters start:end."""
        indices = range(len(self.ids))
        first = bisect_left(indices, start, key=self.start)
        last = bisect_right(indices, end, lo=first, key=self.end)
        return self.part(first, last)

    def part(self, first: int, last: int) -> Tokens:
        """Return the tokens first:last. Their spans still refer to the whole text."""
        return Tokens(self.ids[first:last], lambda index: self.span_of(first + index))

    def first(self, ids: Collection[int]) -> int | None:
        """Return the index of the first token whose id is in `ids`, or None."""
        for index, token in enumerate(self.ids):
            if token in ids:
                return index
        return None
