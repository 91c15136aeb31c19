"""Rows in the formats of other projects (Alpaca, ShareGPT, prompt/completion), converted to ours.

Such formats are called shapes. They are recognized without any setting in the configuration.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from config import InputError
from data.messages import ROLES

# ShareGPT's `from` -> our role. The value of a function_call is the call as JSON.
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
} | {role: role for role in ROLES}


class Shape(NamedTuple):
    """A shape of rows.

    Attributes:
        columns: a description of its columns, for the log.
        read: (row, with_response) -> the columns to add to a row of this shape, so that it has
            `messages`, or `prompt` and `response`. None if the row has another shape.
    """

    columns: str
    read: Callable[[dict, bool], dict | None]


def read_alpaca(row: dict, with_response: bool) -> dict | None:
    """Read instruction, input and output. history is a list of (question, answer) pairs."""
    has_texts = all(isinstance(row.get(key), str) for key in ("instruction", "output"))
    if row.get("prompt") is not None or not has_texts:
        return None
    question = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
    messages = system_messages(row)
    for pair in [*(row.get("history") or []), (question, row["output"])]:
        for role, text in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": text})
    return {"messages": messages}


def read_sharegpt(row: dict, with_response: bool) -> dict | None:
    """Read conversations; their messages are converted by convert_sharegpt()."""
    turns = row.get("conversations")
    if not isinstance(turns, list) or row.get("prompt") is not None:
        return None
    return {"messages": system_messages(row) + turns}


def read_prompt_completion(row: dict, with_response: bool) -> dict | None:
    """Read prompt and completion, which are strings or lists of messages.

    The messages of the prompt are not learned. Only rows for fine-tuning have this shape.
    """
    prompt = row.get("prompt")
    completion = row.get("completion")
    if not with_response or prompt is None or completion is None:
        return None
    if row.get("response") is not None:
        return None
    if isinstance(completion, str):
        return {"response": completion}
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    context = [
        message | {"loss_mask": 0} if isinstance(message, dict) else message for message in prompt
    ]
    return {"messages": context + completion}


def system_messages(row: dict) -> list[dict]:
    """Return a list with the message of the column `system`; [] if the row has none."""
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


SHAPES = {
    "Alpaca": Shape(
        "instruction, output, and perhaps input, system, history (a list of pairs of a question "
        "and its answer).",
        read_alpaca,
    ),
    "ShareGPT": Shape(
        "conversations, a list of {from, value} or {role, content}, and perhaps system.",
        read_sharegpt,
    ),
    "prompt/completion": Shape(
        "prompt and completion: two strings, or lists of messages of which only the completion's "
        "are learned.",
        read_prompt_completion,
    ),
}


def read_shape(row: dict, options, with_response: bool) -> tuple[dict, str]:
    """Return (row with the columns that options name, name of the shape that the row had).

    The name is "" for a row that has these columns already. Other shapes are tried only on rows
    without the default columns, and only if options name no other columns.

    Args:
        with_response: whether a row needs a response (fine-tuning) or only a prompt.
    """
    has_default_keys = options.messages_key == "messages" and options.prompt_key == "prompt"
    names_a_response = with_response and options.response_key != "response"
    if has_default_keys and not names_a_response and row.get("messages") is None:
        for name, shape in SHAPES.items():
            columns = shape.read(row, with_response)
            if columns:
                return row | columns, name
    return row, ""


def is_sharegpt_message(message) -> bool:
    return isinstance(message, dict) and "from" in message and "value" in message


def convert_sharegpt(message: dict, name: str) -> dict:
    """Return a message {from, value} as {role, content}. `name` is its place in the row."""
    sender = message["from"]
    value = message["value"]
    role = SHAREGPT_ROLES.get(sender)
    if role is None:
        raise InputError(f'"{name}.from" is {sender!r}: must be one of {", ".join(SHAREGPT_ROLES)}')
    rest = {key: item for key, item in message.items() if key not in ("from", "value")}
    if sender != "function_call":
        return rest | {"role": role, "content": value}
    try:
        calls = json.loads(value)
    except (TypeError, ValueError) as error:
        raise InputError(
            f'"{name}.value" is the function_call {value!r}, which is not JSON'
        ) from error
    if not isinstance(calls, list):
        calls = [calls]
    tool_calls = [{"type": "function", "function": call} for call in calls]
    return rest | {"role": role, "tool_calls": tool_calls}
