"""Convert messages to the forms that different chat templates expect.

Templates disagree on details: one expects the content as a string, another as a list of parts; one
prints the arguments of a tool call unchanged, another encodes them as JSON. A conversation is
rendered in one form after another until the template prints everything correctly.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from data.chat.marks import texts_of


@dataclass(frozen=True)
class Form:
    """One way to write down a conversation.

    Attributes:
        convert_content: a function that is applied to the content of every message with content.
        arguments_as_text: whether the arguments of tool calls are JSON text rather than objects.
        defaults: keys and values to add to messages that lack these keys.
    """

    convert_content: Callable
    arguments_as_text: bool
    defaults: dict

    def apply(self, message: dict) -> dict:
        """Return the message in this form."""
        written = self.defaults | message
        if message.get("content"):
            written["content"] = self.convert_content(message["content"])
        elif message.get("content") == []:
            written["content"] = ""
        if message.get("tool_calls"):
            written["tool_calls"] = [
                with_arguments(call, self.arguments_as_text) for call in message["tool_calls"]
            ]
        return written


def forms(messages: list[dict]) -> Iterator[list[dict]]:
    """Yield the messages in each form that some template expects, the most common one first."""
    contents = [message["content"] for message in messages if "content" in message]
    conversions = [unchanged, as_parts]
    if any(map(is_list_of_texts, contents)) and not any(map(has_image, contents)):
        conversions = [unchanged, joined, as_parts]

    has_calls = any(message.get("tool_calls") for message in messages)
    argument_types = (False, True) if has_calls else (False,)

    is_content_missing = len(contents) < len(messages)
    defaults = ({}, {"content": None}, {"content": ""}) if is_content_missing else ({},)

    for choices in itertools.product(conversions, argument_types, defaults):
        form = Form(*choices)
        yield [form.apply(message) for message in messages]


def unchanged(content):
    return content


def as_parts(content):
    """Return a message's content as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def joined(content):
    """Return a list of texts as one text. A list with parts of other types is unchanged."""
    return text_of(content) if is_list_of_texts(content) else content


def text_of(content: str | list | None) -> str:
    """Return the text of a message's content, without other parts such as images."""
    if not isinstance(content, list):
        return content or ""
    return "\n".join(
        str(part["text"]) for part in content if isinstance(part, dict) and "text" in part
    )


def is_list_of_texts(content) -> bool:
    if not isinstance(content, list):
        return False
    return all(isinstance(part, dict) and "text" in part for part in content)


def has_image(content) -> bool:
    return isinstance(content, list) and {"type": "image"} in content


def as_json(value) -> str:
    return json.dumps(value, ensure_ascii=False)


def with_arguments(call: dict, as_text: bool) -> dict:
    """Return a tool call with its arguments as JSON text (as_text=True) or as an object.

    Missing arguments are {}. Arguments that cannot be converted stay unchanged.
    """
    function = call.get("function", call)
    convert = arguments_to_text if as_text else arguments_to_object
    function = function | {"arguments": convert(function.get("arguments", {}))}
    return call | {"function": function} if "function" in call else function


def arguments_to_text(arguments):
    return as_json(arguments) if isinstance(arguments, dict) else arguments


def arguments_to_object(arguments):
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments or "{}")
    except json.JSONDecodeError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def missing_text(message: dict, text: str) -> str:
    """Return a part of the message that is missing from the text, or "" if there is none.

    Checks only the last line of the message and the names of the functions that it calls, because
    templates may drop earlier thinking.
    """
    answer = text_of(message.get("content")).rpartition("</think>")[2]
    last_line = answer.strip().rpartition("\n")[2]
    names = [
        str(call.get("function", call).get("name", "")) for call in message.get("tool_calls", ())
    ]
    return next((part for part in (last_line, *names) if part not in text), "")


def is_complete(messages: list[dict], text: str) -> bool:
    """Return whether a rendered chat shows the messages of user and assistant: see missing_text."""
    return not any(
        message["role"] in ("user", "assistant") and missing_text(message, text)
        for message in messages
    )


def printed_as_code(messages: list[dict], text: str) -> str:
    """Return a value of the messages that a rendered chat shows in the notation of code, or "".

    A template that expects another form prints objects in Python or JSON notation, or encodes JSON
    text as JSON a second time. The same characters may be written in the messages themselves.
    """
    for message in messages:
        for notation in wrong_notations(message):
            if notation not in text:
                continue
            num_written = sum(source.text.count(notation) for source in texts_of(messages))
            if text.count(notation) > num_written:
                return notation
    return ""


def wrong_notations(message: dict) -> list[str]:
    """Return the texts that a template prints if it expects this message in another form."""
    notations = []
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            notations += [str(part), as_json(part)]
    for call in message.get("tool_calls", ()):
        arguments = call.get("function", call).get("arguments")
        if not arguments:
            continue
        if isinstance(arguments, dict):
            notations.append(str(arguments))
        else:
            encoded_again = as_json(arguments)[1:-1]
            if encoded_again != arguments:
                notations.append(encoded_again)
    return notations
