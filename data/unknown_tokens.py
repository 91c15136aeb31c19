"""Report text for which a tokenizer has only its unknown token.

A single unknown token, for a rare sign, is normal. A row that consists mostly of them is an error,
like characters that the tokenizer drops (data/chat/coverage.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from common.counting import count_of
from data.chat.tokenizer import ChatTokenizer

COUNT = "rows_with_unknown_tokens"  # in stats.json


def problem(ids: Sequence[int], chat: ChatTokenizer) -> str | None:
    """Return why a row with these tokens cannot be used if most are unknown, else None."""
    num_unknown = ids.count(chat.unknown_id)
    if 2 * num_unknown <= len(ids):
        return None
    return (
        f"{num_unknown} of {len(ids)} tokens are {chat.tokenizer.unk_token!r}, which the tokenizer "
        f"({type(chat.tokenizer).__name__}) writes for text that it cannot represent: use the "
        "tokenizer that belongs to the model, or change the text"
    )


def count_rows(ids: np.ndarray, cu_seqlens: np.ndarray, unknown_id: int | None) -> dict[str, int]:
    """Return the number of rows that have unknown tokens as {COUNT: number}, or {} for none.

    Args:
        ids: [T], the tokens of n rows, laid end to end.
        cu_seqlens: [n+1].
        unknown_id: None if the tokenizer has no unknown token.
    """
    if unknown_id is None:
        return {}
    positions = np.flatnonzero(ids == unknown_id)
    num_rows = len(np.unique(np.searchsorted(cu_seqlens, positions, side="right")))
    return {COUNT: num_rows} if num_rows else {}


def report_lines(stats: dict, chat: ChatTokenizer) -> Iterator[str]:
    """Yield a line that tells a user in how many rows there are unknown tokens, if there are any.

    Args:
        stats: the numbers of rows, from stats.json.
    """
    num_rows = stats.get(COUNT)
    if num_rows:
        unknown = chat.tokenizer.unk_token
        rows = count_of(num_rows, "row")
        yield f"the tokenizer writes {unknown!r} for text that it cannot represent: {rows}"
