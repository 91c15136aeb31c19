"""Convert rows from the formats of other projects: Alpaca, ShareGPT and prompt/completion.

Such a format is called a shape. Shapes are recognized without any setting in the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from config import InputError
from data.messages import ROLES, as_context, parse_json

# ShareGPT's `from` -> role. The value of a function_call is a call, or a list of calls, as JSON.
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
} | {role: role for role in ROLES}


# str() of a list of messages.
CHAT_IN_PYTHON = re.compile(r"\s*\[\s*\{\s*'(?:role|content|from|value)'\s*:")


class Shape(NamedTuple):
    """The format of a row in another project.

    Attributes:
        columns: a description of the columns, for the log.
        reads: the columns that are read, in addition to those that any row may have.
        read: (row, with_response) -> the columns to add, so that the row has `messages`, or
            `prompt` and `response`. None if the row does not have this shape.
    """

    columns: str
    reads: tuple[str, ...]
    read: Callable[[dict, bool], dict | None]


def read_alpaca(row: dict, with_response: bool) -> dict | None:
    """Read the columns instruction, input, output and history, pairs of question and answer.

    A prompt needs no output if it has an input, a context or a history.
    """
    if row.get("prompt") is not None or row.get("instruction") is None:
        return None
    if row.get("output") is not None:
        return alpaca_messages(row, "output")
    belongs_to_prompt = [row.get(key) is not None for key in ("input", "context", "history")]
    is_dolly = row.get("response") is not None and "context" in row
    if with_response or is_dolly or not any(belongs_to_prompt):
        return None
    return alpaca_messages(row | {"output": ""}, "output")


def read_dolly(row: dict, with_response: bool) -> dict | None:
    """Read the columns instruction, context and response."""
    has_columns = all(row.get(key) is not None for key in ("instruction", "response"))
    if row.get("prompt") is not None or not has_columns or "context" not in row:
        return None
    return alpaca_messages(row, "response")


def alpaca_messages(row: dict, output_column: str) -> dict:
    """Return {"messages": ...} for an instruction with its input or context, and the answer.

    Raises:
        InputError: a column is not a text, or the history is not a list of pairs of texts.
    """
    for column in ("instruction", "input", "context", output_column):
        if not isinstance(row.get(column), (str, type(None))):
            raise InputError(f'"{column}" must be a text, not {str(row[column])[:40]!r}')
    inputs = [text for text in (row.get("input"), row.get("context")) if text]
    if len(inputs) > 1:
        raise InputError(
            'a row with "instruction" may have "input" or "context", and this one has both: join '
            "the two, or rename the one that the model must not see"
        )
    question = "\n\n".join([row["instruction"], *inputs])
    messages = []
    for pair in [*read_history(row.get("history")), (question, row[output_column])]:
        for role, text in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": text})
    return {"messages": messages}


def read_history(history) -> list:
    """Return the earlier questions and answers, [question, answer] each.

    Raises:
        InputError: the history is something else.
    """
    if not history:
        return []
    for pair in history if isinstance(history, list) else [history]:
        is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise InputError(
                '"history" must be a list of pairs of texts, [question, answer], not '
                f"{str(pair)[:60]!r}"
            )
    return history


def read_sharegpt(row: dict, with_response: bool) -> dict | None:
    """Read the column conversations. convert_sharegpt() converts its messages later."""
    turns = row.get("conversations")
    if not isinstance(turns, list) or row.get("prompt") is not None:
        return None
    return {"messages": turns}


def read_prompt_completion(row: dict, with_response: bool) -> dict | None:
    """Read the columns prompt and completion, which are strings or lists of messages.

    The messages of the prompt are not learned. This shape is only for fine-tuning.

    Raises:
        InputError: a column is something else.
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
    for column, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, list):
            raise InputError(
                f'"{column}" must be a text or a list of messages, not {str(value)[:40]!r}'
            )
    context = [as_context(message) for message in prompt]
    return {"messages": context + completion}


SHAPES = {
    "Alpaca": Shape(
        "instruction, output, and optionally input (or context), system and history (a list of "
        "pairs of question and answer).",
        ("instruction", "input", "context", "output", "history"),
        read_alpaca,
    ),
    "Dolly": Shape(
        "instruction, context (may be empty), response, and optionally system and history.",
        ("instruction", "input", "context", "response", "history"),
        read_dolly,
    ),
    "ShareGPT": Shape(
        "conversations, a list of {from, value} or {role, content}, and optionally system.",
        ("conversations",),
        read_sharegpt,
    ),
    "prompt/completion": Shape(
        "prompt and completion, two strings or lists of messages. Only the completion is learned.",
        ("prompt", "completion"),
        read_prompt_completion,
    ),
}


def read_shape(row: dict, options, with_response: bool) -> tuple[dict, str]:
    """Return (row with `messages`, or `prompt` and `response`; the name of its shape).

    If no conversion is needed, returns the row as it is, and "" for the name. Shapes are tried only
    for rows without `messages`, and only if the keys for messages, prompt and response in `options`
    have their default values.

    Args:
        with_response: whether a row needs a response (fine-tuning) or only a prompt.
    """
    row = row | chats_in_text(row, options)
    has_default_keys = options.messages_key == "messages" and options.prompt_key == "prompt"
    names_a_response = with_response and options.response_key != "response"
    if has_default_keys and not names_a_response and row.get("messages") is None:
        for name, shape in SHAPES.items():
            columns = shape.read(row, with_response)
            if columns:
                return row | columns, name
    return row, ""


def chats_in_text(row: dict, options) -> dict[str, list]:
    """Return the columns of chats that are JSON text, as in cells of CSV files, as {column: chat}.

    Only columns that usually hold chats are read in this way. A response may be any text, and so
    may a completion if its prompt is a text.

    Raises:
        InputError: a chat is written in Python's notation.
    """
    chats: dict[str, list] = {}
    for column in (options.messages_key, "conversations", options.prompt_key, "completion"):
        value = row.get(column)
        if not isinstance(value, str) or not value.lstrip().startswith("["):
            continue
        is_prompt_text = isinstance(row.get("prompt"), str) and "prompt" not in chats
        if column == "completion" and is_prompt_text:
            continue
        if CHAT_IN_PYTHON.match(value):
            raise InputError(
                f'"{column}" is a chat in the notation of Python, {value[:40]!r}: write it as '
                "JSON, with json.dumps()"
            )
        messages = parse_chat(value)
        if messages is not None:
            chats[column] = messages
    return chats


def parse_chat(text: str) -> list | None:
    """Return the messages that a text holds as JSON, or None if it is another text."""
    try:
        value = parse_json(text)
    except ValueError:
        return None
    return value if is_chat(value) else None


def is_chat(value) -> bool:
    """Return whether a value is a list of messages, in our format or ShareGPT's."""
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return False
    return {"role", "content"} <= value[0].keys() or is_sharegpt_message(value[0])


def is_sharegpt_message(message) -> bool:
    return isinstance(message, dict) and "from" in message and "value" in message


def role_of(message: dict) -> str | None:
    """Return the role of a message, in the roles of chat templates; None if it has none."""
    if is_sharegpt_message(message):
        return SHAREGPT_ROLES.get(message["from"])
    return message.get("role")


def convert_sharegpt(message: dict, name: str) -> dict:
    """Convert a message from {from, value} to {role, content}. `name` is its path in the row."""
    sender = message["from"]
    value = message["value"]
    if message.get("content") is not None:
        raise InputError(f'"{name}" has both "value" and "content": remove one of the two')
    role = SHAREGPT_ROLES.get(sender)
    if role is None:
        raise InputError(f'"{name}.from" is {sender!r}: must be one of {", ".join(SHAREGPT_ROLES)}')
    rest = {key: item for key, item in message.items() if key not in ("from", "value")}
    if sender != "function_call":
        return rest | {"role": role, "content": value}
    try:
        calls = parse_json(value)
    except (TypeError, ValueError) as error:
        raise InputError(
            f'"{name}.value" is the function_call {value!r}, which is not JSON'
        ) from error
    if not isinstance(calls, list):
        calls = [calls]
    tool_calls = [{"type": "function", "function": call} for call in calls]
    return rest | {"role": role, "tool_calls": tool_calls}
