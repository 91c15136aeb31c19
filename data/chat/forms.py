"""Messages in the forms that chat templates want them in."""

from __future__ import annotations

import json


def forms(messages: list[dict]):
    """The messages in each form that some template wants, the commonest first: contents as they are, as one text, or as a
    list of parts; arguments of tool calls as an object or as JSON text; a missing content left out, null, or empty."""
    contents = [m["content"] for m in messages if "content" in m]
    as_text = any(map(is_texts, contents)) and not any(map(has_image, contents))
    shapes = [
        lambda content: content,
        *[text_of] * as_text,
        lambda content: (
            [{"type": "text", "text": content}] if isinstance(content, str) else content
        ),
    ]
    missing = ({}, {"content": None}, {"content": ""}) if len(contents) < len(messages) else ({},)
    for shape in shapes:
        for as_text in (False, True) if any(m.get("tool_calls") for m in messages) else (False,):
            for default in missing:
                yield [
                    default
                    | m
                    | {
                        key: shape(m[key])
                        if key == "content"
                        else [with_arguments(c, as_text) for c in m[key]]
                        for key in ("content", "tool_calls")
                        if m.get(key)
                    }
                    for m in messages
                ]


def is_texts(content) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, dict) and "text" in part for part in content
    )


def has_image(content) -> bool:
    return isinstance(content, list) and {"type": "image"} in content


def text_of(content: str | list | None) -> str:
    """The text of a message's content, which may be a list of parts, images among them."""
    if not isinstance(content, list):
        return content or ""
    return "\n".join(
        str(part["text"]) for part in content if isinstance(part, dict) and "text" in part
    )


def as_json(value) -> str:
    return json.dumps(value, ensure_ascii=False)


def with_arguments(call: dict, as_text: bool) -> dict:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if as_text and isinstance(arguments, dict):
        arguments = as_json(arguments)
    elif not as_text and isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except json.JSONDecodeError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    function = function | ({"arguments": arguments} if "arguments" in function else {})
    return call | {"function": function} if "function" in call else function


def left_out(message: dict, text: str) -> str:
    """What a template that gives this text has left out of what a message says, "" if nothing. Earlier thinking may be."""
    calls = [
        str(call.get("function", call).get("name", "")) for call in message.get("tool_calls", ())
    ]
    last_line = (
        text_of(message.get("content")).rpartition("</think>")[2].strip().rpartition("\n")[2]
    )
    return next((said for said in (last_line, *calls) if said not in text), "")


def prints(messages: list[dict], text: str) -> bool:
    """Whether a template that gives this text writes what user and assistant say, and writes it as it was meant: no object as
    Python or JSON would show it, no JSON text encoded as JSON once more."""
    for message in messages:
        if message["role"] in ("user", "assistant") and left_out(message, text):
            return False
        content = message.get("content")
        wrong = (
            [shown for part in content for shown in (str(part), as_json(part))]
            if isinstance(content, list)
            else []
        )
        for call in message.get("tool_calls", ()):
            arguments = call.get("function", call).get("arguments")
            shown = str(arguments) if isinstance(arguments, dict) else as_json(arguments)[1:-1]
            wrong += [shown] if arguments and shown != arguments else []
        if any(shown in text for shown in wrong):
            return False
    return True
