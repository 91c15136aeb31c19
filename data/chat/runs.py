"""Runs: the parts of a rendered chat that are the text of one message."""

from __future__ import annotations

from dataclasses import dataclass

from config import InputError
from data.chat.marks import Piece

ADVICE = (
    'set "loss_mask": 0 in this message to exclude it from the loss, or set data.chat_template to '
    "another template"
)


@dataclass(frozen=True)
class Run:
    """The characters start:end of a rendered chat, from the first to the last text of a message.

    A run contains no text of another message. If a template puts another text into a turn, for
    example a tool result, the message of this turn has several runs.

    Attributes:
        message: the index of the message; None for text that the message's author did not write,
            such as tool results that are stored in the assistant's message.
        start, end: the positions. For a turn without text, both are the end of its header.
    """

    message: int | None
    start: int
    end: int

    @property
    def is_empty(self) -> bool:
        return self.start >= self.end


# Stands for the run before the first one.
CHAT_START = Run(None, 0, 0)


def runs_of_pieces(pieces: list[Piece]) -> list[Run]:
    """Return the runs of all messages with text, in the order of the rendered chat.

    If a template prints a text twice, only the first piece counts: gpt-oss repeats a function's
    name before the function's result.
    """
    runs: list[Run] = []
    seen = set()
    for piece in pieces:
        source = piece.source
        if source.number in seen:
            continue
        seen.add(source.number)
        message = source.message if source.is_own else None
        start = piece.start
        if runs and runs[-1].message == message:
            start = runs.pop().start
        runs.append(Run(message, start, piece.end))
    return runs


def turn_not_found(message: int, reason: str) -> InputError:
    """Return the error for an assistant turn that cannot be located."""
    return InputError(
        f"cannot locate the assistant turn of message {message} in the rendered chat: {reason}. "
        f"Either {ADVICE}"
    )
