"""Read the replies of gpt-oss, which consist of messages in channels (OpenAI calls it Harmony).

    <|channel|>analysis<|message|>I should add.<|end|><|start|>assistant<|channel|>commentary
    to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>

The first message has no beginning, because the prompt ends with <|start|>assistant. vLLM's parser
would first download a vocabulary, and it reads token ids with this one instead of the model's.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

START = re.compile(r"<\|start\|>(?:assistant)?")
BODY = "<|message|>"
END = re.compile(r"<\|(?:end|call|return)\|>")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
FUNCTIONS = "functions."


class HarmonyCall(NamedTuple):
    """A call of a function, with the fields of vLLM's calls."""

    name: str
    arguments: str
    id: None = None


class HarmonyReply(NamedTuple):
    """The reasoning, the content and the calls of a reply."""

    reasoning: str
    content: str
    calls: list[HarmonyCall]


def read_harmony(text: str, has_tools: bool) -> HarmonyReply:
    """Read a reply, whose last message may have no end.

    A call that cannot be read stays in the content, and so do all calls without tools.
    """
    reasoning = ""
    content = ""
    calls = []
    for message in START.split(text):
        head, _, rest = message.rpartition(BODY)
        body = END.split(rest, maxsplit=1)[0]
        recipient = RECIPIENT.search(head)
        channel = CHANNEL.search(head)
        call = read_call(recipient[1], body) if recipient and has_tools else None
        if call:
            calls.append(call)
        elif recipient:
            content += message
        elif channel and channel[1] == "analysis":
            reasoning += body
        else:
            content += body
    return HarmonyReply(reasoning, content, calls)


def read_call(recipient: str, arguments: str) -> HarmonyCall | None:
    """Return a call; None if it goes to something other than a function, or is no JSON object."""
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except ValueError:
        is_object = False
    if not is_object or not recipient.startswith(FUNCTIONS):
        return None
    return HarmonyCall(recipient.removeprefix(FUNCTIONS), arguments)
