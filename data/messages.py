"""Check that the messages of a chat are well-formed."""

from __future__ import annotations

import json
import re

from config import InputError

ROLES = ("system", "developer", "user", "assistant", "tool")
# Keys that decide whether an assistant message is learned. `weight` is OpenAI's name, `training`
# and `train` are axolotl's, `loss` is that of ms-swift.
LOSS_KEYS = ("loss_mask", "weight", "loss", "train", "training", "trainable")
# The key of a message that belongs to a prompt, and is not learned. It is ours, not one of data
# files: data.ignored_fields cannot name it.
CONTEXT_KEY = "belongs to the prompt"
# A value without text under a name like these may be another way to exclude something from the
# loss, such as axolotl's `train_detail`.
LOSS_WORDS = re.compile(r"(?:^|_)(?:mask|loss|train|weight)(?:ed|ing|able|s)?(?:_|$)")
# Columns that may weigh or exclude a whole row, unless their value is an ordinary text.
# Each is mapped to the value that changes nothing.
ROW_LOSS_COLUMNS = dict.fromkeys([*LOSS_KEYS, "weights", "sample_weight", "loss_weight"], 1) | {
    "mask": 0,
    "masked": 0,
}
# Keys of a tool call's function besides its arguments.
CALL_KEYS = ("name", "id", "type", "index", "function", "description")
# Cells of CSV files are texts.
BOOLEAN_TEXTS = {"true": 1.0, "false": 0.0}


def check_message(message, name: str) -> None:
    """Raise InputError for a malformed message.

    `name` is the message's path in the row, e.g. messages[2].
    """
    if not isinstance(message, dict):
        raise InputError(f'"{name}" must be an object, not {type(message).__name__}')
    if message.get("role") not in ROLES:
        raise InputError(
            f'"{name}.role" is {message.get("role")!r}: must be one of {", ".join(ROLES)}'
        )
    check_content(message, name)
    check_tool_calls(message, name)
    check_loss_keys(message, name)


def check_content(message: dict, name: str) -> None:
    """Raise InputError if a message has no content, or content of a wrong type."""
    content = message.get("content")
    if content is None:
        is_call = message["role"] == "assistant" and message.get("tool_calls")
        if not is_call and message.get("function_call"):
            raise InputError(
                f'"{name}.function_call" is OpenAI\'s old format: write it as "tool_calls": '
                '[{"type": "function", "function": {"name": ..., "arguments": ...}}], and the role '
                "function as tool"
            )
        if not is_call:
            keys = ", ".join(key for key, value in message.items() if value is not None)
            raise InputError(f'"{name}.content" is missing; the message has {keys}')
    elif not isinstance(content, (str, list)):
        raise InputError(f'"{name}.content" must be a string, not {type_name(content)}')


def type_name(value) -> str:
    return "object" if isinstance(value, dict) else type(value).__name__


def check_tool_calls(message: dict, name: str) -> None:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(map(is_tool_call, calls)):
        raise InputError(f'"{name}.tool_calls" must be a list of objects with a function')
    for i, call in enumerate(calls):
        check_function(call.get("function") or call, f"{name}.tool_calls[{i}]")


def check_function(function: dict, name: str) -> None:
    """Raise InputError if a call has no name, or its arguments have another name."""
    if not isinstance(function.get("name"), str) or not function["name"].strip():
        raise InputError(f'"{name}" has no function name')
    unknown = [key for key, value in function.items() if key not in CALL_KEYS and value is not None]
    if function.get("arguments") is None and unknown:
        raise InputError(
            f'"{name}" has no "arguments", only {", ".join(unknown)}: name them "arguments", or '
            'write "arguments": {}'
        )


def check_call_arguments(message: dict, name: str) -> None:
    """Raise InputError for arguments of a call as JSON text that would not be learned as written.

    An object with a key twice would lose one of the values, and any other JSON than an object would
    become a text. Text that is not JSON is checked when the chat is rendered.
    """
    for i, call in enumerate(message.get("tool_calls") or ()):
        arguments = (call.get("function") or call).get("arguments")
        if not isinstance(arguments, str) or not arguments.strip():
            continue
        place = f'"{name}.tool_calls[{i}].arguments"'
        try:
            value = parse_json(arguments)
        except InputError as error:
            raise InputError(f"{place}: {error}") from None
        except ValueError:
            continue
        if not isinstance(value, dict):
            raise InputError(
                f"{place} is {arguments[:40]!r}: the arguments of tool calls must be an object, or "
                "an object as JSON text. A call without arguments has {}"
            )


def is_tool_call(call) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function") or call, dict)


def check_loss_keys(message: dict, name: str) -> None:
    """Raise InputError for a wrong value of a key in LOSS_KEYS, or one in a wrong role."""
    for key in LOSS_KEYS:
        value = message.get(key)
        if value is None:
            continue
        if value not in (0, 1):
            raise InputError(f'"{name}.{key}" is {value!r}: must be true or false, or 1 or 0')
        if value and message["role"] != "assistant":
            raise InputError(
                f'"{name}.{key}" is 1, but the role is {message["role"]}: only assistant messages '
                "can be trained"
            )


def as_context(message):
    """Return a message of a prompt, which is not learned."""
    return message | {CONTEXT_KEY: True} if isinstance(message, dict) else message


def check_context(message: dict, name: str) -> None:
    """Raise InputError for a message of a prompt that is to be learned according to its keys."""
    for key in LOSS_KEYS:
        if message.get(CONTEXT_KEY) and message.get(key):
            raise InputError(
                f'"{name}.{key}" is 1, but the message belongs to the prompt, and only answers are '
                f'trained: leave out {key}, or set data.ignored_fields=["{key}"]'
            )


def check_other_loss_keys(message: dict, name: str) -> None:
    """Raise InputError for a value that seems to control the loss in a way that is not read."""
    for key, value in message.items():
        if key in LOSS_KEYS or isinstance(value, (str, type(None))):
            continue
        if LOSS_WORDS.search(key):
            raise InputError(
                f'"{name}.{key}" is {str(value)[:40]}, and nothing reads it: use loss_mask (0 or '
                f"1), or name it in data.ignored_fields if it is not about the loss"
            )


def check_parts_without_loss_keys(message: dict, name: str) -> None:
    """Raise InputError if a part of a message excludes itself from the loss."""
    content = message.get("content")
    for i, part in enumerate(content if isinstance(content, list) else ()):
        for key, value in part.items() if isinstance(part, dict) else ():
            is_about_loss = key in LOSS_KEYS or LOSS_WORDS.search(key)
            if is_about_loss and value not in (None, 1) and not isinstance(value, str):
                raise InputError(
                    f'"{name}.content[{i}].{key}" is {str(value)[:40]}, and a part of a message '
                    "cannot be excluded from the loss: split the message in two, with loss_mask 0 "
                    f'in the first, or set data.ignored_fields=["{key}"]'
                )


def check_row_loss_columns(row: dict, options) -> None:
    """Raise InputError if a column seems to weigh or exclude the row."""
    for column, usual_value in ROW_LOSS_COLUMNS.items():
        value = number_in_text(row.get(column))
        if isinstance(value, (str, type(None))) or column in options.ignored_fields:
            continue
        if value != usual_value:
            raise InputError(
                f'the column "{column}" is {str(value)[:40]}, and rows have no weight or mask: '
                "use loss_mask (0 or 1) in messages, leave out the row, or name the column in "
                "data.ignored_fields if it is not about the loss"
            )


def number_in_text(value):
    """Return the number or boolean that a text stands for; other values are returned unchanged."""
    if not isinstance(value, str):
        return value
    if value.lower() in BOOLEAN_TEXTS:
        return BOOLEAN_TEXTS[value.lower()]
    try:
        return float(value)
    except ValueError:
        return value


def without_none(value):
    """Remove the entries that are None from all dicts in a value, at any depth.

    Arrow gives every row the keys of all rows, with None for those that the row lacks. A template
    might print them, or test whether they exist. In the arguments and parameters of functions that
    were read from JSON, null is a value.
    """
    if isinstance(value, dict):
        kept = {}
        for key, item in value.items():
            is_written = key in ("arguments", "parameters") and isinstance(item, JsonObject)
            if item is not None:
                kept[key] = item if is_written else without_none(item)
        return kept
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value


class JsonObject(dict):
    """An object that was read from JSON, in which every null was written by the user."""


def parse_json(text: str):
    """Parse JSON. Its objects are JsonObjects.

    Raises:
        InputError: an object has a key twice.
        ValueError: the text is not JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RecursionError:
        raise ValueError("too many nested brackets") from None


def unique_keys(pairs: list[tuple[str, object]]) -> JsonObject:
    """Return the object of these pairs; raise InputError for a repeated key.

    json itself would keep the last value of such a key.
    """
    unique = JsonObject(pairs)
    if len(unique) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InputError(f'the key "{key}" occurs twice in one object: keep one of the two')
            seen.add(key)
    return unique
