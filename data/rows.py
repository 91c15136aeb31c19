"""Read the columns of a row: its messages, its tools, and arguments for the chat template."""

from __future__ import annotations

from dataclasses import dataclass

from config import InputError
from data.chat.forms import is_list_of_texts, text_of
from data.messages import (
    BOOLEAN_TEXTS,
    as_context,
    check_call_arguments,
    check_context,
    check_message,
    check_other_loss_keys,
    check_parts_without_loss_keys,
    check_row_loss_columns,
    number_in_text,
    parse_json,
    without_none,
)
from data.shapes import SHAREGPT_ROLES, convert_sharegpt, is_chat, is_sharegpt_message

# Likely names of a column, the likeliest first; suggested when the expected column is missing.
PROMPT_COLUMNS = ("prompt", "question", "instruction", "problem", "query", "input", "text")
RESPONSE_COLUMNS = (
    "response",
    "completion",
    "output",
    "answer",
    "solution",
    "target",
    "chosen",
    "text",
)


@dataclass(frozen=True)
class TemplateInputs:
    """The inputs of the chat template that a row provides besides its messages.

    Attributes:
        tools: the JSON schemas of the tools, or None.
        arguments: keyword arguments, e.g. enable_thinking.
    """

    tools: list | None
    arguments: dict


def training_messages(row: dict, has_template: bool, options) -> list[dict] | None:
    """Check and return the messages of a row for fine-tuning, without None values.

    Returns None if the row is a prompt and a response, and the model has no chat template.

    Raises:
        InputError: the row is malformed.
    """
    check_row_loss_columns(row, options)
    response = row.get(options.response_key)
    is_pair = has_prompt_column(row, options)
    if is_pair and response is None:
        hint = hint_at_columns(row, options, with_response=True)
        raise InputError(f'"{options.response_key}" is missing{hint}')
    if is_pair and not isinstance(response, str):
        raise InputError(
            f'"{options.response_key}" must be a text, not {str(response)[:60]}. (A list of '
            'messages is read from "completion", together with "prompt".)'
        )
    messages = read_messages(row, has_template, options, with_response=True)
    if is_pair and messages is not None:
        context = [as_context(message) for message in messages]
        messages = [*context, {"role": "assistant", "content": response}]
    for i, message in enumerate(messages or ()):
        check_context(message, f"message {i}")
        check_other_loss_keys(message, f"message {i}")
        check_parts_without_loss_keys(message, f"message {i}")
    return messages


def has_prompt_column(row: dict, options) -> bool:
    """Return whether the row has a prompt instead of messages."""
    return row.get(options.messages_key) is None and row.get(options.prompt_key) is not None


def read_messages(
    row: dict, has_template: bool, options, with_response: bool = False
) -> list[dict] | None:
    """Check and return the messages of a row, or of its prompt, without None values.

    Returns None if the prompt is a string, and the model has no chat template.

    Args:
        with_response: whether the row needs a response. This only affects error messages.

    Raises:
        InputError: the row is malformed.
    """
    is_prompt = has_prompt_column(row, options)
    key = options.prompt_key if is_prompt else options.messages_key
    messages = row.get(key)
    if messages is None:
        missing = f'"{key}" is missing'
        if not with_response:
            missing = f'both "{options.prompt_key}" and "{key}" are missing'
        raise InputError(missing + hint_at_columns(row, options, with_response))
    if is_prompt and isinstance(messages, str):
        if not has_template:
            check_no_system_prompt(options)
            return None
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not messages:
        raise InputError(f'"{key}" must be a list of messages, not {str(messages)[:40]!r}')
    checked = [
        read_message(message, f"{key}[{i}]", options.ignored_fields)
        for i, message in enumerate(messages)
    ]
    return with_system_message(without_none(checked), row, options)


def read_message(message, name: str, ignored_fields) -> dict:
    """Return a checked message without ignored fields, as {role, content, ...}.

    `name` is its place in the row, e.g. messages[2].
    """
    if ignored_fields and isinstance(message, dict):
        message = without_fields(message, ignored_fields)
        if isinstance(message.get("content"), list):
            parts = [without_fields(part, ignored_fields) for part in message["content"]]
            message = message | {"content": parts}
    if is_sharegpt_message(message):
        message = convert_sharegpt(message, name)
    check_message(message, name)
    check_call_arguments(message, name)
    return message


def without_fields(value, names):
    """Return an object without the fields with these names; other values are returned unchanged."""
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if key not in names}


def system_column(row: dict, options) -> str:
    """Return the system message that a row has in a column of its own, or "".

    Raises:
        InputError: the column is a list or an object, but not a list of texts.
    """
    system = row.get(options.system_key) if options.system_key else None
    if system and is_list_of_texts(system):
        system = text_of(system)
    if isinstance(system, (list, dict)) and system:
        raise InputError(
            f'the column "{options.system_key}" must be a text, not {str(system)[:60]}: write it '
            "as a text, or set data.system_key=null, which does not read the column"
        )
    return system if isinstance(system, str) and system.strip() else ""


def check_no_system_prompt(options) -> None:
    """Raise InputError for data.system_prompt, which a prompt of plain text cannot hold."""
    if options.system_prompt:
        raise InputError(
            "data.system_prompt needs a chat template, which the tokenizer lacks: set "
            "data.chat_template, or write the text into the prompts"
        )


def with_system_message(messages: list[dict], row: dict, options) -> list[dict]:
    """Return the messages, beginning with the row's system message or with data.system_prompt.

    The system message of a row is in its messages or in a column. data.system_prompt is only for
    rows that have none.

    Raises:
        InputError: the column and the messages differ.
    """
    column = system_column(row, options)
    own = next((m for m in messages if m["role"] in ("system", "developer")), None)
    system = column or options.system_prompt
    if not system or (own and not column):
        return messages
    if own is None:
        return [{"role": "system", "content": system}, *messages]
    if text_of(own.get("content")).strip() == column.strip():
        return messages
    raise InputError(
        f'the column "{options.system_key}" is {column[:40]!r}, and the messages have another '
        f"{own['role']} message: leave one of them out, or set data.system_key=null, which does "
        "not read the column"
    )


def hint_at_columns(row: dict, options, with_response: bool) -> str:
    """Return the end of an error about a missing column: the row's columns, and settings to try."""
    columns = [column for column, value in row.items() if value is not None]
    hint = f"; the row has {', '.join(columns) or 'no columns'}"
    keys = likely_columns(row, columns, options, with_response)
    if None not in keys.values():
        settings = [
            f"data.{key}={column}"
            for key, column in keys.items()
            if getattr(options, key) != column
        ]
        return f"{hint}: set {' '.join(settings)}"
    if with_response:
        hint += (
            ": name the column of messages in data.messages_key, or the columns of prompt and "
            "response in data.prompt_key and data.response_key"
        )
    return hint


def likely_columns(
    row: dict, columns: list[str], options, with_response: bool
) -> dict[str, str | None]:
    """Return settings under which this row could be read, as {configuration key: column}.

    The column is None where the row has no suitable one.
    """
    chats = {column: row[column] for column in columns if is_chat(row[column])}
    complete = [column for column, chat in chats.items() if is_question_and_answer(chat)]
    prompt = options.prompt_key
    if row.get(prompt) is None:
        if complete or (chats and not with_response):
            return {"messages_key": (complete or list(chats))[0]}
        prompt = pick_column(PROMPT_COLUMNS, [*chats, *text_columns_of(row, columns)])
    keys = {"prompt_key": prompt}
    if with_response:
        candidates = [column for column in text_columns_of(row, columns) if column != prompt]
        keys["response_key"] = pick_column(RESPONSE_COLUMNS, candidates)
    return keys


def text_columns_of(row: dict, columns: list[str]) -> list[str]:
    return [column for column in columns if isinstance(row[column], str)]


def is_question_and_answer(chat: list[dict]) -> bool:
    """Return whether a chat has turns of the assistant and of another role."""
    roles = {SHAREGPT_ROLES.get(message.get("role", message.get("from"))) for message in chat}
    return "assistant" in roles and len(roles) > 1


def pick_column(likely_names: tuple[str, ...], columns: list[str]) -> str | None:
    """Return the first of the likely names that is a column, in any case; else None."""
    for name in likely_names:
        for column in columns:
            if column.strip().lower() == name:
                return column
    return None


def template_inputs(row: dict, reserved, options) -> TemplateInputs:
    """Return the inputs of the chat template that a row provides besides its messages.

    A column `enable_thinking` becomes an argument of the template.

    Args:
        reserved: names that the template's arguments must not have.

    Raises:
        InputError: a column has the wrong type.
    """
    tools = read_tools(row, options)
    arguments = row.get(options.template_kwargs_key)
    if not isinstance(arguments, (dict, type(None))):
        raise InputError(
            f'"{options.template_kwargs_key}" must be an object, not {type(arguments).__name__}'
        )
    thinking = {"enable_thinking": boolean_in_text(row.get("enable_thinking"))}
    arguments = without_none(thinking | without_none(arguments or {}))
    for name in options.ignored_fields:
        arguments.pop(name, None)
    # The string "false" would be true in a template.
    if not isinstance(arguments.get("enable_thinking", True), bool):
        raise InputError(
            f'"enable_thinking" is {arguments["enable_thinking"]!r}: must be true or false'
        )
    taken = arguments.keys() & reserved
    if taken:
        raise InputError(f'"{options.template_kwargs_key}.{min(taken)}" is not a template argument')
    return TemplateInputs(without_none(tools) or None, arguments)


def boolean_in_text(value):
    """Return the boolean that a cell of a CSV file stands for; other values are unchanged."""
    is_boolean = isinstance(value, str) and value.lower() in BOOLEAN_TEXTS
    return bool(number_in_text(value)) if is_boolean else value


def read_tools(row: dict, options) -> list | None:
    """Return the tools of a row. In data sets with typed columns, they are JSON in a string."""
    tools = row.get(options.tools_key)
    if isinstance(tools, str) and not tools.strip():
        return None  # an empty cell of a CSV file
    if isinstance(tools, str) and tools.lstrip().startswith("["):
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise InputError(f'"{options.tools_key}" is not JSON: {error}') from error
    if not isinstance(tools, (list, type(None))):
        raise InputError(
            f'"{options.tools_key}" must be a list of JSON schemas, or such a list as JSON text, '
            f"not {str(tools)[:40]!r}"
        )
    return tools
