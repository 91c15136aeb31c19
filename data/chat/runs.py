"""Runs: where each message's own text is in a rendered chat."""

from __future__ import annotations

from dataclasses import dataclass

from config import InputError
from data.chat.marks import Piece

ADVICE = (
    "give the message loss_mask 0, which trains without it, or name another template in "
    "data.chat_template"
)


@dataclass(frozen=True)
class Run:
    """The characters start:end of a rendered chat, from the first to the last text of a message.

    A run contains no text of another message. If a template puts other texts into a turn, for
    example the result of a tool, the turn's message has several runs.

    Attributes:
        message: the index of the message; None for text that its author did not write, such as the
            results of tools that are kept in the assistant's message.
        start, end: for a turn without text, both are where its header ends.
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
    """Return the runs of all messages that have text, in the order of the rendered chat.

    Only the first piece of every text counts: gpt-oss repeats the name of a function before the
    function's result.
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
        f"You may {ADVICE}"
    )
