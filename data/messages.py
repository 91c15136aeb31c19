"""Check that the messages of a chat are well-formed."""

from __future__ import annotations

from config import InputError

ROLES = ("system", "developer", "user", "assistant", "tool")
# Keys that decide whether an assistant message is learned; `weight` is OpenAI's name.
LOSS_KEYS = ("loss_mask", "weight")


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
    content = message.get("content")
    if content is None:
        is_call = message["role"] == "assistant" and message.get("tool_calls")
        if not is_call:
            raise InputError(f'"{name}.content" is missing')
    elif not isinstance(content, (str, list)):
        raise InputError(f'"{name}.content" must be a string, not {type(content).__name__}')


def check_tool_calls(message: dict, name: str) -> None:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(map(is_tool_call, calls)):
        raise InputError(f'"{name}.tool_calls" must be a list of objects with a function')


def is_tool_call(call) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function") or call, dict)


def check_loss_keys(message: dict, name: str) -> None:
    for key in LOSS_KEYS:
        value = message.get(key)
        if value is None:
            continue
        if value not in (0, 1):
            raise InputError(f'"{name}.{key}" is {value!r}: must be 0 or 1')
        if value and message["role"] != "assistant":
            raise InputError(
                f'"{name}.{key}" is 1, but the role is {message["role"]}: only assistant messages '
                "can be trained"
            )


def without_none(value):
    """Remove the entries that are None from all dicts in a value, at any depth.

    Arrow gives every row the keys of all rows, with None for those that the row lacks. A template
    might print them, or test whether they exist.
    """
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value
