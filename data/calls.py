"""Tool calls in the form that a chat template wants them in."""

from __future__ import annotations

import json


def forms(messages: list[dict]):
    """The messages in the ways in which templates want tool calls, the commonest first: arguments as an object or as JSON
    text; beside them a content that was null left out, null, or empty."""
    calling = [m for m in messages if m.get("tool_calls")]
    contents = ({}, {"content": None}, {"content": ""}) if any("content" not in m for m in calling) else ({},)
    for as_text in (False, True) if calling else (False,):
        for content in contents:
            yield [content | m | {"tool_calls": [with_arguments(call, as_text) for call in m["tool_calls"]]}
                   if m.get("tool_calls") else m for m in messages]


def with_arguments(call: dict, as_text: bool) -> dict:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if as_text and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except json.JSONDecodeError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    function = function | ({"arguments": arguments} if "arguments" in function else {})
    return call | {"function": function} if "function" in call else function


def prints_calls(messages: list[dict], text: str) -> bool:
    """Whether a template that gives this text has written the arguments of all calls as they were meant: no object as Python
    prints it, and no JSON text encoded as JSON once more."""
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        arguments = call.get("function", call).get("arguments")
        wrong = str(arguments) if isinstance(arguments, dict) else json.dumps(arguments, ensure_ascii=False)[1:-1]
        if arguments and wrong != arguments and wrong in text:
            return False
    return True
