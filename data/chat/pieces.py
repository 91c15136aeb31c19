"""Find out which message each part of a rendered chat comes from.

Templates trim, quote, move, merge and drop texts, so the header before a text does not reveal its
message. Searching for the text itself fails if it is short: "yes" may occur anywhere. Instead, the
chat is rendered a second time with marks inside the texts (data/chat/marks.py). If the two
renderings differ only by the marks, every mark shows where its text is. If every text is long and
occurs only once, the second rendering is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from config import InputError
from data.chat.marks import MARK_WORD, Piece, Text, mark_messages, mark_offsets, read_marks
from data.chat.tokens import Span

# A text of this many characters does not occur in a template by chance.
UNMISTAKABLE_LENGTH = 16


@dataclass(frozen=True)
class RenderedChat:
    """A rendered chat, with the means to render it again.

    Attributes:
        text: the rendered chat.
        messages: the messages, in the form that was passed to the template.
        texts: all texts of the messages.
        render: renders modified messages with the same settings; returns None if the template
            rejects them.
    """

    text: str
    messages: list[dict]
    texts: list[Text]
    render: Callable[[list[dict]], str | None]

    def pieces_by_marks(self, offsets: list[list[int]], word: str) -> list[Piece] | None:
        """Return the pieces that contain marks at these offsets; None if marks change the chat."""
        marked = self.render(mark_messages(self.messages, offsets, word)) or ""
        plain, pieces = read_marks(marked, self.texts, offsets, word)
        return pieces if plain == self.text else None


def find_pieces(
    chat: RenderedChat, find_special_tokens: Callable[[str], list[Span]]
) -> list[Piece]:
    """Return the pieces of a rendered chat, in order.

    Args:
        find_special_tokens: returns the spans of the special tokens that are written in a text.

    Raises:
        InputError: a text cannot be located because every mark in it changes the chat.
    """
    pieces = find_unmistakable_texts(chat.text, chat.texts)
    if pieces is not None:
        return pieces
    word = MARK_WORD
    while word in chat.text:
        word += "x"
    offsets = [mark_offsets(text.text, find_special_tokens(text.text)) for text in chat.texts]
    pieces = chat.pieces_by_marks(offsets, word)
    if pieces is not None:
        return pieces
    return find_one_by_one(chat, offsets, word)


def find_unmistakable_texts(rendered: str, texts: list[Text]) -> list[Piece] | None:
    """Return the pieces if every text is long and occurs exactly once, in order; else None.

    A template would not leave out such a text and write the same one itself.
    """
    pieces = []
    reached = 0
    for source in texts:
        text = source.text.strip()
        start = rendered.find(text, reached)
        if len(text) < UNMISTAKABLE_LENGTH or start < 0 or rendered.count(text) > 1:
            return None
        reached = start + len(text)
        pieces.append(Piece(start, reached, source))
    return pieces


def find_one_by_one(chat: RenderedChat, offsets: list[list[int]], word: str) -> list[Piece]:
    """Mark one text at a time, because marks in some of the texts change the chat.

    For example, a template may compare a text with a fixed word, or shorten it. If every mark in a
    text changes the chat, the text itself is searched for. It is found if it occurs once, and not
    inside another text.
    """
    pieces: list[Piece] = []
    unmarked = []
    for source in chat.texts:
        pieces_of_text = find_text_by_marks(chat, source, offsets[source.number], word)
        if pieces_of_text is None:
            unmarked.append(source)
        else:
            pieces += pieces_of_text
    for source in unmarked:
        text = source.text.strip()
        start = chat.text.find(text)
        end = start + len(text)
        if chat.text.count(text) > 1:
            raise InputError(
                f"cannot locate the text of message {source.message} in the rendered chat: "
                f"{text[:40]!r} occurs several times"
            )
        is_inside_another = any(piece.start < end and start < piece.end for piece in pieces)
        if start >= 0 and not is_inside_another:
            pieces.append(Piece(start, end, source))
    return sorted(pieces)


def find_text_by_marks(
    chat: RenderedChat, source: Text, offsets: list[int], word: str
) -> list[Piece] | None:
    """Return the pieces of one text, using only marks that do not change the chat.

    Returns None if every mark changes the chat.
    """

    def pieces_with(chosen: list[int]) -> list[Piece] | None:
        chosen_offsets: list[list[int]] = [[] for _ in chat.texts]
        chosen_offsets[source.number] = chosen
        return chat.pieces_by_marks(chosen_offsets, word)

    pieces = pieces_with(offsets)
    if pieces is not None:
        return pieces
    harmless = [offset for offset in offsets if pieces_with([offset]) is not None]
    return pieces_with(harmless) if harmless else None
