"""Insert marks into the texts of messages, to see where these texts appear in a rendered chat.

A mark contains the number of its text and its own number. "Hello there" with two marks becomes
"HelloqZx0y0Zq thereqZx0y1Zq": marks 0 and 1 of text 0. data/chat/pieces.py renders such messages.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable
from typing import NamedTuple

from data.chat.tokens import Span

# Only letters, which stay the same when a template trims or escapes a text, or dumps it as JSON.
MARK_WORD = "qZx"

# Templates read the values of these keys but do not print them.
CONTROL_KEYS = frozenset({"role", "type", "id", "name", "tool_call_id"})
# In a tool call, "name" is the name of the function, which is printed.
CONTROL_KEYS_OF_CALLS = CONTROL_KEYS - {"name"}

# The beginning of a text, including tags and punctuation, up to the end of its first word:
# "<think>\nOkay" in "<think>\nOkay, so". A mark must not break a tag that templates look for.
FIRST_WORD = re.compile(r"(?:<[^<>\s]*>|[\W_])*+[^\W_]+")
# The last letter of a text that is not in a tag: "y" in "why?</b>".
LAST_LETTER = re.compile(r"[^\W_](?=(?:<[^<>\s]*>|[\W_])*+\Z)")
# To save time, LAST_LETTER is first searched for in this many characters at the end of a text.
LAST_LETTER_REACH = 60
# For agreement(): a partial word at the start of a text and the punctuation after it, e.g. "lo, "
# in "lo, dear reader"; and a partial word at the end of a text, e.g. " wor" in "hello wor".
PARTIAL_START = re.compile(r"^(\S*\s)?[\W_]*")
PARTIAL_END = re.compile(r"[\W_]*(\s\S*)?$")


class Text(NamedTuple):
    """One string within the messages.

    Attributes:
        number: the index among all strings of the conversation.
        message: the index of the message.
        is_own: whether the author of the message wrote the string. False for tool results, which
            some formats store in the assistant's message.
        text: the string itself.
        key: the message's key that holds it, e.g. "content".
    """

    number: int
    message: int
    is_own: bool
    text: str
    key: str


class Piece(NamedTuple):
    """The characters start:end of a rendered chat, all of which come from the same Text."""

    start: int
    end: int
    source: Text


class TextReplacer:
    """Copies messages with every printed string replaced, and counts these strings."""

    def __init__(self, replace: Callable[[Text], str]):
        self.replace = replace
        self.count = 0
        self.key = ""

    def copy_message(self, index: int, message: dict) -> dict:
        copy = {}
        for key, value in message.items():
            if key in CONTROL_KEYS:
                copy[key] = value
                continue
            self.key = key
            is_own = isinstance(value, str) or key in ("content", "tool_calls")
            control_keys = CONTROL_KEYS_OF_CALLS if key == "tool_calls" else CONTROL_KEYS
            copy[key] = self.copy_value(value, index, is_own, control_keys)
        return copy

    def copy_value(self, value, message: int, is_own: bool, control_keys: frozenset[str]):
        if isinstance(value, str):
            if not value or value.isspace():
                return value
            text = Text(self.count, message, is_own, value, self.key)
            self.count += 1
            return self.replace(text)
        if isinstance(value, list):
            return [self.copy_value(item, message, is_own, control_keys) for item in value]
        if isinstance(value, dict):
            return {
                key: self.copy_entry(key, item, message, is_own, control_keys)
                for key, item in value.items()
            }
        return value

    def copy_entry(self, key: str, value, message: int, is_own: bool, control_keys: frozenset[str]):
        if key in control_keys:
            return value
        if key == "arguments":  # all arguments of a tool call are printed, whatever their names
            control_keys = frozenset()
        return self.copy_value(value, message, is_own, control_keys)


def replace_texts(messages: list[dict], replace: Callable[[Text], str]) -> list[dict]:
    """Return the messages with each text replaced by replace(text).

    Texts are numbered in the order in which they occur.
    """
    replacer = TextReplacer(replace)
    return [replacer.copy_message(index, message) for index, message in enumerate(messages)]


def texts_of(messages: list[dict]) -> list[Text]:
    """Return all texts of the messages, in order."""
    texts: list[Text] = []

    def collect(text: Text) -> str:
        texts.append(text)
        return text.text

    replace_texts(messages, collect)
    return texts


def mark_offsets(text: str, special_tokens: list[Span]) -> list[int]:
    """Return the offsets of the marks in a text, in ascending order.

    One mark is after the first word and one is after the last letter, so that most of the text is
    between them. Each special token that is written in the text also gets a mark inside it.
    """
    first = FIRST_WORD.match(text)
    last = LAST_LETTER.search(text, max(0, len(text) - LAST_LETTER_REACH))
    if last is None:
        last = LAST_LETTER.search(text)
    offsets = {match.end() for match in (first, last) if match}
    if not offsets:
        offsets = {len(text.rstrip())}
    offsets |= {(start + end) // 2 for start, end in special_tokens}
    return sorted(offsets)


def mark_messages(
    messages: list[dict], offsets: list[list[int]], word: str = MARK_WORD
) -> list[dict]:
    """Insert marks into messages. offsets[n] are the offsets of the marks in text n."""

    def mark(text: Text) -> str:
        marked = ""
        start = 0
        for index, offset in enumerate(offsets[text.number]):
            marked += text.text[start:offset] + f"{word}{text.number}y{index}Zq"
            start = offset
        return marked + text.text[start:]

    return replace_texts(messages, mark)


def read_marks(
    marked: str, texts: list[Text], offsets: list[list[int]], word: str = MARK_WORD
) -> tuple[str, list[Piece]]:
    """Remove the marks from a rendered chat; return the chat and the pieces that had marks."""
    # [text, number, index, text, number, index, ..., text]
    parts = re.split(rf"{word}(\d+)y(\d+)Zq", marked)
    plain = "".join(parts[::3])
    numbers = map(int, parts[1::3])
    indices = map(int, parts[2::3])

    pieces: list[Piece] = []
    position = 0
    previous_number = -1
    previous_index = -1
    for before, number, index in zip(parts[::3], numbers, indices):
        position += len(before)
        source = texts[number]
        start, end = agreement(plain, position, source.text, offsets[number][index])
        if number == previous_number and index > previous_index:  # the same text continues
            start = pieces.pop().start
        previous_end = pieces[-1].end if pieces else 0
        pieces.append(Piece(max(start, previous_end), end, source))
        previous_number = number
        previous_index = index
    return plain, pieces


def agreement(plain: str, position: int, text: str, offset: int) -> Span:
    """Return the span of `plain` around `position` that agrees with `text` around `offset`.

    The span is limited to whole words, without white space at its edges: further characters that
    happen to agree may come from the template.
    """
    before = text[:offset]
    after = text[offset:]
    is_complete = offset <= position and plain.startswith(text, position - offset)
    if not is_complete:
        plain_before = plain[max(0, position - offset) : position]
        before = PARTIAL_START.sub("", common_suffix(before, plain_before))
        plain_after = plain[position : position + len(after)]
        after = PARTIAL_END.sub("", os.path.commonprefix([after, plain_after]))
    return Span(position - len(before.lstrip()), position + len(after.rstrip()))


def common_suffix(first: str, second: str) -> str:
    return os.path.commonprefix([first[::-1], second[::-1]])[::-1]
