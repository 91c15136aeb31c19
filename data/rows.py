"""What a row of data says: its messages, tools and template arguments, checked."""

from __future__ import annotations

import inspect

from config import InputError

ROLES = ("system", "developer", "user", "assistant", "tool")


def conversation_of(row: dict, tokenizer, options) -> list[dict] | None:
    """The checked messages of a row, without None values; None for a prompt and a response of plain text."""
    paired, response = is_paired(row, options), row.get(options.response_key)
    if paired and not isinstance(response, str):
        raise InputError(f'"{options.response_key}" is missing or not a string')
    messages = messages_of(row, tokenizer, options)
    if paired and messages is not None:
        messages = [*({"loss_mask": 0} | m for m in messages), {"role": "assistant", "content": response}]
    return messages


def is_paired(row: dict, options) -> bool:
    """Whether the row has no messages, but a prompt."""
    return row.get(options.messages_key) is None and row.get(options.prompt_key) is not None


def messages_of(row: dict, tokenizer, options) -> list[dict] | None:
    """The checked messages of a row's messages, else of its prompt, without None values; None for a plain prompt."""
    key = options.prompt_key if is_paired(row, options) else options.messages_key
    messages = row.get(key)
    if messages is None:
        raise InputError(f'"{key}" is missing')
    if is_paired(row, options) and isinstance(messages, str):
        if not tokenizer.chat_template:
            return None
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not messages:
        raise InputError(f'"{key}" must be a list of messages, not {str(messages)[:40]!r}')
    for i, message in enumerate(messages):
        check_message(message, f"{key}[{i}]")
    return without_none(messages)


def check_message(message, name: str) -> None:
    if not isinstance(message, dict):
        raise InputError(f'"{name}" must be an object, not {type(message).__name__}')
    role, content, mask = message.get("role"), message.get("content"), message.get("loss_mask")
    if role not in ROLES:
        raise InputError(f'"{name}.role" is {role!r}: must be one of {", ".join(ROLES)}')
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        raise InputError(f'"{name}.content" is missing')
    if not isinstance(content, (str, list, type(None))):
        raise InputError(f'"{name}.content" must be a string, not {type(content).__name__}')
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(c, dict) and isinstance(c.get("function") or c, dict)
                                              for c in calls):
        raise InputError(f'"{name}.tool_calls" must be a list of objects with a function')
    if mask is not None and mask not in (0, 1):
        raise InputError(f'"{name}.loss_mask" is {mask!r}: must be 0 or 1')
    if mask and role != "assistant":
        raise InputError(f'"{name}.loss_mask" is 1 on role {role}: only assistant messages can be trained')


def template_arguments(row: dict, tokenizer, options) -> tuple[list | None, dict]:
    """(tools, keyword arguments of the template). A column enable_thinking counts as an argument."""
    tools, arguments = row.get(options.tools_key), row.get(options.template_kwargs_key)
    if not isinstance(tools, (list, type(None))):
        raise InputError(f'"{options.tools_key}" must be a list, not {type(tools).__name__}')
    if not isinstance(arguments, (dict, type(None))):
        raise InputError(f'"{options.template_kwargs_key}" must be an object, not {type(arguments).__name__}')
    arguments = without_none({"enable_thinking": row.get("enable_thinking")} | without_none(arguments or {}))
    if not isinstance(arguments.get("enable_thinking", True), bool):      # the string "false" is true in a template
        raise InputError(f'"enable_thinking" is {arguments["enable_thinking"]!r}: must be true or false')
    if taken := arguments.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys():
        raise InputError(f'"{options.template_kwargs_key}.{min(taken)}" is not a template argument')
    return without_none(tools) or None, arguments


def without_none(value):
    """Arrow gives every row the keys of all rows, with None for those that it lacks; templates would see them."""
    if isinstance(value, dict):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    return [without_none(v) for v in value] if isinstance(value, list) else value
