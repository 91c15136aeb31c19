"""What a row of data says: its messages, tools and template arguments, whatever shape the row has."""

from __future__ import annotations

import json

from config import InputError

ROLES = ("system", "developer", "user", "assistant", "tool")
# Whom ShareGPT's `from` names. The value of a function_call is the call as JSON.
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
} | {role: role for role in ROLES}
# Columns to propose for one that is missing, the likeliest first.
PROMPTS = ("prompt", "question", "instruction", "problem", "query", "input", "text")
RESPONSES = ("response", "completion", "output", "answer", "solution", "target", "chosen", "text")


def read_shape(row: dict, options, with_response: bool) -> tuple[dict, str]:
    """(row in the columns that options name, name of the shape it was read as: "" where it had these columns).

    SHAPES are tried on rows that lack the default columns, unless options name others: then these are meant.
    with_response: whether a row needs a response (SFT) or only a prompt (RL).
    """
    default = (options.messages_key, options.prompt_key) == ("messages", "prompt") and row.get(
        "messages"
    ) is None
    if default and not (with_response and options.response_key != "response"):
        for name, read in SHAPES.items():
            if read_as := read(row, with_response):
                return row | read_as, name
    return row, ""


def alpaca(row: dict, with_response: bool) -> dict | None:
    """instruction, output, and perhaps input, system, history (a list of pairs of a question and its answer)."""
    if row.get("prompt") is not None or not all(
        isinstance(row.get(key), str) for key in ("instruction", "output")
    ):
        return None
    question = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
    pairs = [*(row.get("history") or []), (question, row["output"])]
    return {
        "messages": system_of(row)
        + [
            {"role": role, "content": text}
            for pair in pairs
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
    }


def sharegpt(row: dict, with_response: bool) -> dict | None:
    """conversations, a list of {from, value} or {role, content}, and perhaps system."""
    turns = row.get("conversations")
    return (
        {"messages": system_of(row) + turns}
        if isinstance(turns, list) and row.get("prompt") is None
        else None
    )


def prompt_completion(row: dict, with_response: bool) -> dict | None:
    """prompt and completion: two strings, or lists of messages of which only the completion's are learned."""
    prompt, completion = row.get("prompt"), row.get("completion")
    if not with_response or prompt is None or completion is None or row.get("response") is not None:
        return None
    if isinstance(completion, str):
        return {"response": completion}
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {
        "messages": [m | {"loss_mask": 0} if isinstance(m, dict) else m for m in prompt]
        + completion
    }


def system_of(row: dict) -> list[dict]:
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


# Data sets in these shapes are read without a key being set. name -> function: the columns to add to a row, None if the
# row has another shape.
SHAPES = {"Alpaca": alpaca, "ShareGPT": sharegpt, "prompt/completion": prompt_completion}


def from_sharegpt(message: dict, name: str) -> dict:
    """A message {from, value} as {role, content}."""
    role, value = SHAREGPT_ROLES.get(message["from"]), message["value"]
    if role is None:
        raise InputError(
            f'"{name}.from" is {message["from"]!r}: must be one of {", ".join(SHAREGPT_ROLES)}'
        )
    rest = {k: v for k, v in message.items() if k not in ("from", "value")}
    if message["from"] != "function_call":
        return rest | {"role": role, "content": value}
    try:
        calls = json.loads(value)
    except (TypeError, ValueError) as error:
        raise InputError(
            f'"{name}.value" is the function_call {value!r}, which is not JSON'
        ) from error
    calls = calls if isinstance(calls, list) else [calls]
    return rest | {
        "role": role,
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }


def conversation_of(row: dict, has_template: bool, options) -> list[dict] | None:
    """The checked messages of a row, without None values; None for a prompt and a response of plain text."""
    paired, response = is_paired(row, options), row.get(options.response_key)
    if paired and not isinstance(response, str):
        raise InputError(
            f'"{options.response_key}" is missing or not a string{proposal(row, options, True)}'
        )
    messages = messages_of(row, has_template, options, with_response=True)
    if paired and messages is not None:
        messages = [
            *({"loss_mask": 0} | m for m in messages),
            {"role": "assistant", "content": response},
        ]
    return messages


def is_paired(row: dict, options) -> bool:
    """Whether the row has no messages, but a prompt."""
    return row.get(options.messages_key) is None and row.get(options.prompt_key) is not None


def messages_of(
    row: dict, has_template: bool, options, with_response: bool = False
) -> list[dict] | None:
    """The checked messages of a row's messages, else of its prompt, without None values; None for a prompt of plain text
    where there is no chat template."""
    paired = is_paired(row, options)
    key = options.prompt_key if paired else options.messages_key
    messages = row.get(key)
    if messages is None:
        missing = (
            f'"{key}" is missing'
            if with_response
            else f'both "{options.prompt_key}" and "{key}" are missing'
        )
        raise InputError(missing + proposal(row, options, with_response))
    if paired and isinstance(messages, str):
        if not has_template:
            return None
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not messages:
        raise InputError(f'"{key}" must be a list of messages, not {str(messages)[:40]!r}')
    messages = [
        from_sharegpt(m, f"{key}[{i}]")
        if isinstance(m, dict) and "from" in m and "value" in m
        else m
        for i, m in enumerate(messages)
    ]
    for i, message in enumerate(messages):
        check_message(message, f"{key}[{i}]")
    return without_none(messages)


def proposal(row: dict, options, with_response: bool) -> str:
    """The columns of a row that lacks those that are read, and the keys that would read them, to end an error with."""
    columns = [column for column, value in row.items() if value is not None]
    chats = [
        c
        for c in columns
        if isinstance(row[c], list)
        and row[c]
        and isinstance(row[c][0], dict)
        and row[c][0].keys() & {"role", "from"}
    ]
    texts = [c for c in columns if isinstance(row[c], str)]
    prompt = (
        options.prompt_key if row.get(options.prompt_key) is not None else first_of(PROMPTS, texts)
    )
    keys = {"prompt_key": prompt}
    if with_response:
        keys["response_key"] = first_of(RESPONSES, [c for c in texts if c != prompt])
    if chats and prompt != options.prompt_key:
        keys = {"messages_key": chats[0]}
    found = f"; the row has {', '.join(columns) or 'no columns'}"
    if None in keys.values():
        return (
            f"{found}: name the column of messages in data.messages_key, or those of two texts in data.prompt_key "
            "and data.response_key"
            if with_response
            else found
        )
    return (
        found
        + ": set "
        + " ".join(
            f"data.{key}={column}"
            for key, column in keys.items()
            if getattr(options, key) != column
        )
    )


def first_of(likely: tuple[str, ...], columns: list[str]) -> str | None:
    return next((name for name in likely if name in columns), next(iter(columns), None))


def check_message(message, name: str) -> None:
    if not isinstance(message, dict):
        raise InputError(f'"{name}" must be an object, not {type(message).__name__}')
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InputError(f'"{name}.role" is {role!r}: must be one of {", ".join(ROLES)}')
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        raise InputError(f'"{name}.content" is missing')
    if not isinstance(content, (str, list, type(None))):
        raise InputError(f'"{name}.content" must be a string, not {type(content).__name__}')
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(
        isinstance(c, dict) and isinstance(c.get("function") or c, dict) for c in calls
    ):
        raise InputError(f'"{name}.tool_calls" must be a list of objects with a function')
    for key, mask in (
        ("loss_mask", message.get("loss_mask")),
        ("weight", message.get("weight")),
    ):  # weight: OpenAI's name
        if mask is not None and mask not in (0, 1):
            raise InputError(f'"{name}.{key}" is {mask!r}: must be 0 or 1')
        if mask and role != "assistant":
            raise InputError(
                f'"{name}.{key}" is 1 on role {role}: only assistant messages can be trained'
            )


def template_arguments(row: dict, parameters, options) -> tuple[list | None, dict]:
    """(tools, keyword arguments of the template). A column enable_thinking counts as an argument; parameters are the names
    that are no template's."""
    tools, arguments = row.get(options.tools_key), row.get(options.template_kwargs_key)
    if isinstance(tools, str) and tools.lstrip().startswith(
        "["
    ):  # as data sets keep them whose columns are typed
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise InputError(f'"{options.tools_key}" is not JSON: {error}') from error
    if not isinstance(tools, (list, type(None))):
        raise InputError(f'"{options.tools_key}" must be a list, not {type(tools).__name__}')
    if not isinstance(arguments, (dict, type(None))):
        raise InputError(
            f'"{options.template_kwargs_key}" must be an object, not {type(arguments).__name__}'
        )
    arguments = without_none(
        {"enable_thinking": row.get("enable_thinking")} | without_none(arguments or {})
    )
    if not isinstance(
        arguments.get("enable_thinking", True), bool
    ):  # the string "false" is true in a template
        raise InputError(
            f'"enable_thinking" is {arguments["enable_thinking"]!r}: must be true or false'
        )
    if taken := arguments.keys() & parameters:
        raise InputError(f'"{options.template_kwargs_key}.{min(taken)}" is not a template argument')
    return without_none(tools) or None, arguments


def without_none(value):
    """Arrow gives every row the keys of all rows, with None for those that it lacks; templates would see them."""
    if isinstance(value, dict):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    return [without_none(v) for v in value] if isinstance(value, list) else value
