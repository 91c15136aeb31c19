"""The key of a message that holds the reasoning before an answer.

Data sets and templates call it by different names. A row's reasoning is moved to the key that the
template prints. To find that key, a short chat is rendered with each of the keys.
"""

from __future__ import annotations

from collections.abc import Callable

from data.chat.probe import PROBE

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
REASONING = "pReasoning"


def with_readable_reasoning(
    messages: list[dict], try_render: Callable[[list[dict]], str | None], printed_keys: dict
) -> list[dict]:
    """Return the messages with their reasoning under a key that the template prints.

    Messages that already use such a key are unchanged. If there is no such key, all are unchanged.

    Args:
        try_render: renders messages; returns None if the template rejects them.
        printed_keys: a cache for chats that are rendered with the same arguments.
    """
    if not any(map(reasoning_keys, messages)):
        return messages
    if not printed_keys:
        printed_keys.update({key: is_printed(key, try_render) for key in REASONING_KEYS})
    printed = [key for key in REASONING_KEYS if printed_keys[key]]
    if not printed:
        return messages
    return [rename(message, printed) for message in messages]


def reasoning_keys(message: dict) -> list[str]:
    """Return the keys under which a message has reasoning as text."""
    return [
        key for key in REASONING_KEYS if isinstance(message.get(key), str) and message[key].strip()
    ]


def is_printed(key: str, try_render: Callable[[list[dict]], str | None]) -> bool:
    """Return whether the template prints the reasoning of the last answer under this key."""
    answer = PROBE[1] | {key: REASONING}
    return REASONING in (try_render([PROBE[0], answer]) or "")


def rename(message: dict, printed: list[str]) -> dict:
    """Return a message with its reasoning under the first printed key."""
    keys = reasoning_keys(message)
    if not keys or any(key in printed for key in keys):
        return message
    renamed = {key: value for key, value in message.items() if key != keys[0]}
    return renamed | {printed[0]: message[keys[0]]}
