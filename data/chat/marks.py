"""Where the texts of messages stand in a rendered chat.

Templates trim, quote, move, merge and drop what they are given, so a text cannot be searched for by its header or its
words. Instead the chat is rendered a second time with marks inside the texts. When this differs from the chat in its marks
alone, each mark tells of one place which text it comes from. Texts that occur once, as long ones do, need no second time.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable
from typing import NamedTuple

from config import InputError

WORD = "qZx"  # letters only, so that templates which trim, escape or dump JSON leave it alone
STEERING = {
    "role",
    "type",
    "id",
    "name",
    "tool_call_id",
}  # templates branch on these, they do not print text from them
# The first word, and the last letter, outside of tags: templates look for <think>.
FIRST = re.compile(r"(?:<[^<>\s]*>|[\W_])*+[^\W_]+")
LAST = re.compile(r"[^\W_](?=(?:<[^<>\s]*>|[\W_])*+\Z)")
SURE = 16  # characters that no template repeats by chance
REACH = 60  # characters at the end of a text in which LAST is looked for first
# At the edge where two texts begin to differ, the rest of a word, and what is no letter.
PARTIAL_START, PARTIAL_END = re.compile(r"^(\S*\s)?[\W_]*"), re.compile(r"[\W_]*(\s\S*)?$")


class Text(NamedTuple):
    """String number `number` of the messages, in message number `message`. spoken: it is what this message says; not so the
    results of tools that some formats keep in the assistant's message."""

    number: int
    message: int
    spoken: bool
    text: str


class Piece(NamedTuple):
    """The characters start:end of a rendered chat, which come from one Text."""

    start: int
    end: int
    source: Text


def replaced(messages: list[dict], replace: Callable[[Text], str]) -> list[dict]:
    """The messages with replace(text) for each of their texts, which are numbered in this order."""
    count = 0

    def inside(value, message: int, spoken: bool, kept: set[str] = STEERING):
        nonlocal count
        if isinstance(value, str):
            if value and not value.isspace():
                value = replace(Text(count, message, spoken, value))
                count += 1
            return value
        if isinstance(value, list):
            return [inside(v, message, spoken, kept) for v in value]
        if isinstance(value, dict):  # of a tool call its function's name and all arguments
            return {
                k: v
                if k in kept
                else inside(v, message, spoken, set() if k == "arguments" else kept)
                for k, v in value.items()
            }
        return value

    return [
        {
            key: value
            if key in STEERING
            else inside(
                value,
                i,
                isinstance(value, str) or key in ("content", "tool_calls"),
                STEERING - {"name"} if key == "tool_calls" else STEERING,
            )
            for key, value in message.items()
        }
        for i, message in enumerate(messages)
    ]


def texts_of(messages: list[dict]) -> list[Text]:
    texts: list[Text] = []
    replaced(messages, lambda text: texts.append(text) or text.text)
    return texts


def mark(
    messages: list[dict], texts: list[Text], places: list[list[int]], word: str = WORD
) -> list[dict]:
    """The messages with marks at these places of their texts."""

    def marked(text: Text) -> str:
        parts = [0, *places[text.number], len(text.text)]
        marks = [f"{word}{text.number}y{j}Zq" for j in range(len(parts) - 2)]
        return "".join(text.text[a:b] + m for a, b, m in zip(parts, parts[1:], [*marks, ""]))

    return replaced(messages, marked)


def places_of(text: str, literals: list[tuple[int, int]]) -> list[int]:
    """Offsets in a text for its marks: in the first and the last word, so that most of it lies between, and inside each
    special token that is written in it."""
    first, last = (
        FIRST.match(text),
        LAST.search(text, max(0, len(text) - REACH)) or LAST.search(text),
    )
    words = [m.end() for m in (first, last) if m] or [len(text.rstrip())]
    return sorted({*words, *((a + b) // 2 for a, b in literals)})


def unmark(
    marked: str, texts: list[Text], places: list[list[int]], word: str = WORD
) -> tuple[str, list[Piece]]:
    """(the text without the marks, the pieces between and around them), in order."""
    parts = re.split(rf"{word}(\d+)y(\d+)Zq", marked)
    plain, pieces, at, last = "".join(parts[::3]), [], 0, (-1, -1)
    for before, k, j in zip(parts[::3], parts[1::3], parts[2::3]):
        at += len(before)
        source, now = texts[int(k)], (int(k), int(j))
        start, end = extent(plain, at, source.text, places[now[0]][now[1]])
        if now[0] == last[0] and now[1] > last[1]:  # the same text goes on
            start = pieces.pop().start
        pieces.append(Piece(max(start, pieces[-1].end if pieces else 0), end, source))
        last = now
    return plain, pieces


def extent(plain: str, at: int, text: str, place: int) -> tuple[int, int]:
    """Where plain agrees with text in whole words, around `at` in plain and `place` in text, without white space at the edges:
    that may be the template's, and so may a letter that happens to be the same."""
    before, after = text[:place], text[place:]
    if at < place or not plain.startswith(text, at - place):
        before = PARTIAL_START.sub(
            "", os.path.commonprefix([before[::-1], plain[max(0, at - place) : at][::-1]])[::-1]
        )
        after = PARTIAL_END.sub("", os.path.commonprefix([after, plain[at : at + len(after)]]))
    return at - len(before.lstrip()), at + len(after.rstrip())


def find_pieces(
    text: str,
    messages: list[dict],
    texts: list[Text],
    render: Callable[[list[dict]], str | None],
    literals: Callable[[str], list[tuple[int, int]]],
) -> list[Piece]:
    """The pieces of text, which is what render gives for the messages with these texts, in order; render gives None for what a
    template refuses, literals the places of special tokens in a text.

    Raises InputError for a text that cannot be located, because each mark in it changes what the template makes of it.
    """
    if (pieces := search(text, texts)) is not None:
        return pieces
    word, places = WORD, [places_of(source.text, literals(source.text)) for source in texts]
    while word in text:
        word += "x"

    def attempt(places: list[list[int]]) -> list[Piece] | None:
        plain, pieces = unmark(
            render(mark(messages, texts, places, word)) or "", texts, places, word
        )
        return pieces if plain == text else None

    if (pieces := attempt(places)) is not None:
        return pieces
    found, unmarked = [], []
    for k, source in enumerate(
        texts
    ):  # each text by itself, with those of its marks that change nothing else

        def only(chosen: list[int], k: int = k) -> list[Piece] | None:
            return attempt([chosen if i == k else [] for i in range(len(texts))])

        if (pieces := only(places[k])) is None and (
            kept := [place for place in places[k] if only([place]) is not None]
        ):
            pieces = only(kept)
        found += pieces or []
        if pieces is None:
            unmarked.append(source)
    for source in unmarked:  # a text that is in the chat once is there, or in another text
        said = source.text.strip()
        at = text.find(said)
        if text.count(said) > 1:
            raise InputError(
                f"cannot locate what message {source.message} says in the rendered chat template: {said[:40]!r}"
            )
        if at >= 0 and not any(piece.start < at + len(said) and at < piece.end for piece in found):
            found.append(Piece(at, at + len(said), source))
    return sorted(found)


def search(text: str, texts: list[Text]) -> list[Piece] | None:
    """The pieces without a mark, if each text is long, is in the chat once and whole, and they are in order: it cannot be that a
    template leaves such a text out and writes the same in its place. None otherwise."""
    pieces, reached = [], 0
    for source in texts:
        said = source.text.strip()
        at = text.find(said, reached)
        if len(said) < SURE or at < 0 or text.count(said) > 1:
            return None
        reached = at + len(said)
        pieces.append(Piece(at, reached, source))
    return pieces
