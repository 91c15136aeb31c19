"""Find the texts and fields of a row that do not reach its tokens.

Templates leave out what they do not know: the reasoning of the last turn, tools, the system
message. No list of names decides what is lost. The rendered chat does: for nearly all rows,
`conversation.pieces` already shows every text in full. For the others, the texts in question are
rendered again with a mark after every word, and each missing mark shows a lost part. Values without
text are removed from the row: if the rendered chat stays the same, they were lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from config import InputError
from data.chat.conversation import Conversation
from data.chat.forms import as_json
from data.chat.losses import EARLIER, EMPTY, LOST, UNREAD, Loss, is_empty, squash
from data.chat.lost_inputs import (
    lost_descriptions,
    lost_template_arguments,
    lost_tools,
)
from data.chat.marks import MARK_WORD, Piece, Text, mark_messages
from data.chat.pieces import UNMISTAKABLE_LENGTH

# Tags are not marked, because templates look for them.
WORD_OR_TAG = re.compile(r"<[^<>\s]*>|\[/?[A-Z_]+\]|([^\W_]+)")
CLOSING_TAG = re.compile(r"</[^<>\s]*>|\[/[A-Z_]+\]|<\|END[^<>\s]*\|>")
MAX_MARKS = 100  # per text
# Fields that every template knows, and those that only link messages to each other.
ORDINARY_FIELDS = frozenset({"role", "content", "tool_calls", "type", "id", "tool_call_id"})


def find_losses(conversation: Conversation) -> list[Loss]:
    """Return the texts and fields of a row that its rendered chat lacks."""
    return [
        *TextCheck(conversation).losses(),
        *lost_fields(conversation),
        *lost_call_arguments(conversation),
        *lost_tools(conversation),
        *lost_descriptions(conversation),
        *lost_template_arguments(conversation),
    ]


def must_be_dropped(losses: list[Loss], policy: str, messages: list[dict] = ()) -> bool:
    """Return whether a row with these losses must be dropped.

    Args:
        policy: the value of data.lost_fields.
        messages: the messages of the row, for the error.

    Raises:
        InputError: the policy is "error", and something is lost.
    """
    lost = [loss for loss in losses if loss.kind == LOST]
    if not lost or policy == "ignore":
        return False
    if policy == "drop":
        return True
    loss = lost[0]
    if not messages:
        raise InputError(
            f'it has "{loss.field}", and the tokenizer has no chat template: give '
            "data.chat_template, remove it from the row, or set data.lost_fields to drop or ignore"
        )
    place = ""
    if loss.message is not None:
        place = f" of message {loss.message} ({messages[loss.message]['role']})"
    remedies = ["remove it from the row"]
    fields = list(dict.fromkeys(loss.field for loss in lost))
    further_fields = f" (and {', '.join(fields[1:])})" if len(fields) > 1 else ""
    ignorable = [field for field in fields if field not in ("content", "tool_calls", "tools")]
    if loss.field in ignorable:
        names = ",".join(ignorable)
        remedies.append(f"set data.ignored_fields=[{names}] if the model must not see this")
    raise InputError(
        f"the chat template leaves out {loss.field}{place}: {loss.excerpt!r}{further_fields}. "
        f"Name a template that prints it in data.chat_template, {', '.join(remedies)}, or set "
        "data.lost_fields to drop or ignore"
    )


# -- texts of messages -----------------------------------------------------------------------------


@dataclass
class TextCheck:
    """Finds the texts of messages that a rendered chat lacks."""

    conversation: Conversation

    def losses(self) -> Iterator[Loss]:
        """Yield the texts that the rendered chat lacks, wholly or in part."""
        suspects = []
        for text in self.texts_not_located():
            if self.lacks_earlier_thinking(text):
                yield Loss(EARLIER, text.key, text.message, text.text[:60])
            elif not self.is_verbatim(text):
                suspects.append(text)
        if not suspects:
            return
        arrived = self.arrived_marks(suspects, self.conversation.messages)
        for text in suspects:
            missing = self.missing_marks(text) if arrived is None else lacking(text, arrived)
            if not missing or self.is_repeated(text):
                continue
            offsets = word_ends(text.text)
            start = offsets[missing[0] - 1] if missing[0] else 0
            excerpt = text.text[start : offsets[missing[-1]]].strip()[:60]
            kind = EARLIER if self.is_dropped_by_design(text, missing) else LOST
            yield Loss(kind, text.key, text.message, excerpt)

    @cached_property
    def pieces_of_texts(self) -> dict[int, list[Piece]]:
        """The pieces of the rendered chat by the number of their text."""
        pieces: dict[int, list[Piece]] = {}
        for piece in located_pieces(self.conversation):
            pieces.setdefault(piece.source.number, []).append(piece)
        return pieces

    def texts_not_located(self) -> list[Text]:
        """Return the texts that conversation.pieces does not show in full."""
        return [text for text in self.conversation.texts if not self.is_located(text, text.text)]

    def is_located(self, text: Text, part: str) -> bool:
        """Return whether a piece of the text begins or ends with this part of it."""
        part = part.strip()
        rendered = self.conversation.text
        return any(
            rendered.startswith(part, piece.start) or rendered.endswith(part, 0, piece.end)
            for piece in self.pieces_of_texts.get(text.number, ())
        )

    def lacks_earlier_thinking(self, text: Text) -> bool:
        """Return whether only the thinking before a closing tag is missing in an earlier answer."""
        message = self.conversation.messages[text.message]
        if message["role"] != "assistant" or text.message > self.last_user_message:
            return False
        *_, closing_tag = [None, *CLOSING_TAG.finditer(text.text)]
        rest = text.text[closing_tag.end() :] if closing_tag else ""
        return bool(rest.strip()) and self.is_located(text, rest)

    @cached_property
    def last_user_message(self) -> int:
        messages = self.conversation.messages
        users = (i for i, message in enumerate(messages) if message["role"] == "user")
        return max(users, default=-1)

    @cached_property
    def squashed(self) -> str:
        return squash(self.conversation.text)

    def is_verbatim(self, text: Text) -> bool:
        """Return whether a long text appears in the chat, apart from white space and escapes.

        It must appear as often as in the messages.
        """
        for written in (text.text, as_json(text.text)[1:-1]):
            squashed = squash(written)
            if len(squashed) < UNMISTAKABLE_LENGTH or squashed not in self.squashed:
                continue
            copies = [other for other in self.conversation.texts if text.text in other.text]
            if self.squashed.count(squashed) >= len(copies):
                return True
        return False

    def arrived_marks(
        self, texts: list[Text], messages: list[dict], **options
    ) -> set[tuple[int, int]] | None:
        """Return (text, mark) for each mark in the rendered chat; None if marks cannot tell.

        They cannot if the template rejects them, or if they change the rest of the chat.

        Args:
            texts: the texts that get a mark after every word.
            messages: the conversation's messages, or only the first of them.
            options: replace the conversation's options.
        """
        conversation = self.conversation
        offsets: list[list[int]] = [[] for _ in conversation.texts]
        for text in texts:
            offsets[text.number] = word_ends(text.text)
        word = unused_word(conversation.text)
        marked_messages = mark_messages(messages, offsets, word)
        marked = conversation.try_render(marked_messages, **(conversation.options | options))
        if marked is None:
            return None
        mark = re.compile(rf"{word}(\d+)y(\d+)Zq")
        if messages is conversation.messages and mark.sub("", marked) != conversation.text:
            return None
        return {(int(number), int(index)) for number, index in mark.findall(marked)}

    def missing_marks(self, text: Text) -> list[int]:
        """Return the indices of the words in a text that the rendered chat lacks.

        If marks cannot tell, for example because the template compares the text with a fixed word,
        the words are searched for.
        """
        arrived = self.arrived_marks([text], self.conversation.messages)
        if arrived is None:
            return self.words_not_found(text)
        return lacking(text, arrived)

    def words_not_found(self, text: Text) -> list[int]:
        """Return the indices of the words that the rendered chat does not contain in this order."""
        missing = []
        reached = 0
        start = 0
        for index, end in enumerate(word_ends(text.text)):
            words = text.text[start:end].split() or [""]
            start = end
            position = self.conversation.text.find(words[-1], reached)
            if position < 0:
                missing.append(index)
            else:
                reached = position + len(words[-1])
        return missing

    def is_repeated(self, text: Text) -> bool:
        """Return whether the same message has this text a second time, and it is printed there."""
        copies = [
            other
            for other in self.conversation.texts
            if other.message == text.message
            and other.number != text.number
            and squash(other.text) == squash(text.text)
        ]
        return any(not self.missing_marks(copy) for copy in copies)

    def is_dropped_by_design(self, text: Text, missing: list[int]) -> bool:
        """Return whether the template prints this text of the assistant in the latest turn only.

        This is true if it prints the text when the chat ends with this message. It is also true for
        reasoning before a closing tag, in an answer before the last user message.
        """
        messages = self.conversation.messages
        is_last = text.message == len(messages) - 1
        if messages[text.message]["role"] != "assistant" or is_last:
            return False
        return self.is_printed_if_last(text) or self.is_earlier_thinking(text, missing)

    def is_printed_if_last(self, text: Text) -> bool:
        """Return whether the template prints this text if the chat ends with its message.

        The result is cached if it does, for other messages with the same keys.
        """
        conversation = self.conversation
        shortened = conversation.messages[: text.message + 1]
        printed_if_last = conversation.chat.printed_if_last
        key = (text.key, *shortened[-1], str(conversation.inputs.arguments))
        if key not in printed_if_last:
            arrived = self.arrived_marks([text], shortened, add_generation_prompt=False)
            if arrived is None or lacking(text, arrived):
                return False
            printed_if_last.add(key)
        return True

    def is_earlier_thinking(self, text: Text, missing: list[int]) -> bool:
        """Return whether these words are the thinking before a closing tag in an earlier answer."""
        if text.message > self.last_user_message or missing != list(range(len(missing))):
            return False
        ends = [*word_ends(text.text), len(text.text)]
        rest_start = ends[missing[-1]]
        rest_end = ends[len(missing)]
        return bool(CLOSING_TAG.search(text.text, rest_start, rest_end))


def located_pieces(conversation: Conversation) -> list[Piece]:
    """Return conversation.pieces, or [] if a text cannot be located for certain."""
    try:
        return conversation.pieces
    except InputError:
        return []


def word_ends(text: str) -> list[int]:
    """Return where the words of a text end, for at most about MAX_MARKS words of a long text."""
    ends = [match.end() for match in WORD_OR_TAG.finditer(text) if match[1]]
    if not ends:
        return [len(text.rstrip())]
    step = 1 + len(ends) // MAX_MARKS
    return [*ends[:-1:step], ends[-1]]


def lacking(text: Text, arrived: set[tuple[int, int]]) -> list[int]:
    """Return the indices of a text's marks that did not arrive."""
    num_marks = len(word_ends(text.text))
    return [index for index in range(num_marks) if (text.number, index) not in arrived]


def unused_word(text: str) -> str:
    """Return a word for marks that does not occur in the text."""
    word = MARK_WORD
    while word in text:
        word += "x"
    return word


# -- values without text ---------------------------------------------------------------------------


def plain_row_losses(row: dict, options) -> list[Loss]:
    """Return the columns of a plain-text row that only a chat template could print."""
    columns = [options.tools_key, options.template_kwargs_key, "enable_thinking"]
    if isinstance(row.get(options.system_key), str):
        columns.append(options.system_key)
    return [
        Loss(LOST, column, None, str(row[column])[:60])
        for column in columns
        if not is_empty(row.get(column))
    ]


def lost_fields(conversation: Conversation) -> Iterator[Loss]:
    """Yield the fields of messages that have no text to mark, and no effect on the rendered chat.

    `name` counts as one: it is never marked, since templates may compare it. In a tool's result, it
    only links the result to its call.
    """
    if all(message.keys() <= ORDINARY_FIELDS for message in conversation.messages):
        return
    with_text = {(text.message, text.key) for text in conversation.texts}
    fields = []
    for i, message in enumerate(conversation.messages):
        for key, value in message.items():
            is_link = key in ORDINARY_FIELDS or (key == "name" and message["role"] == "tool")
            if not is_link and not is_empty(value) and (i, key) not in with_text:
                fields.append((i, key))
    if fields and has_effect(conversation, fields):
        fields = [field for field in fields if not has_effect(conversation, [field])]
    for i, key in fields:
        value = conversation.messages[i][key]
        kind = UNREAD if isinstance(value, (bool, int, float)) else LOST
        yield Loss(kind, key, i, str(value)[:60])


def has_effect(conversation: Conversation, fields: list[tuple[int, str]]) -> bool:
    """Return whether the rendered chat changes without these fields, (message, key) each."""
    shortened = []
    for i, message in enumerate(conversation.messages):
        kept = {key: value for key, value in message.items() if (i, key) not in fields}
        shortened.append(kept)
    return conversation.try_render(shortened, **conversation.options) != conversation.text


def empty_answers(conversation: Conversation, turns: list[int]) -> Iterator[Loss]:
    """Yield a loss for each assistant message in `turns` that has no text at all."""
    with_text = {text.message for text in conversation.texts}
    for i in turns:
        if i not in with_text:
            yield Loss(EMPTY, "content", i, "")


def lost_call_arguments(conversation: Conversation) -> Iterator[Loss]:
    """Yield the arguments of tool calls that contain no text, only numbers, and are not printed."""
    for i, message in enumerate(conversation.messages):
        calls = message.get("tool_calls") or ()
        for index, call in enumerate(calls):
            arguments = call.get("function", call).get("arguments")
            values = list(leaves(arguments))
            has_text = any(isinstance(value, str) and value for value in values)
            if not values or has_text:
                continue
            if all(as_json(value) in conversation.text for value in values):
                continue
            shortened = list(conversation.messages)
            shortened[i] = message | {"tool_calls": without_arguments(calls, index)}
            if conversation.try_render(shortened, **conversation.options) == conversation.text:
                yield Loss(LOST, "tool_calls", i, str(arguments)[:60])


def without_arguments(calls: list[dict], index: int) -> list[dict]:
    """Return the tool calls, without the arguments of the one with this index."""
    call = calls[index]
    emptied = call.get("function", call) | {"arguments": {}}
    shortened = list(calls)
    shortened[index] = call | {"function": emptied} if "function" in call else emptied
    return shortened


def leaves(value) -> Iterator:
    """Yield the values in nested dicts and lists, except None."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from leaves(item)
    elif value is not None:
        yield value
