"""Show at start whether a chat template lets conversations continue their recorded ids.

A template may write an earlier turn differently once another message follows: it may drop the
reasoning, or move the tools. Then each such turn begins a new branch, which costs compute, since
its prompt is computed again in training. Users want to know this before a run.
"""

from __future__ import annotations

import os.path
from dataclasses import dataclass

from config import InputError
from data.rows import TemplateInputs
from rollout.episodes.rendering import Prompt, Renderer, Session

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city."}},
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Paris"}},
}
CONVERSATION = [
    {"role": "user", "content": "How is the weather in Paris?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "It rains."},
    {"role": "assistant", "content": "It rains in Paris."},
    {"role": "user", "content": "Do I need an umbrella?"},
]
REASONING = "I have to think."
NUM_CONTEXT = 20  # characters before a difference that a notice shows
NUM_SHOWN = 30  # characters after it


def describe_stability(renderer: Renderer) -> str:
    """Return a notice: whether the turns of a sample conversation continue each other."""
    try:
        sample = choose_conversation(renderer)
    except InputError as error:
        return f"episodes: it is unknown whether turns continue each other: {error}"
    kind = "with tools" if sample.inputs.tools else "without tools"
    difference = next(filter(None, differences(renderer, sample)), None)
    if difference is None:
        return f"episodes: the chat template is prefix-stable: turns continue each other ({kind})"
    return f"episodes: the chat template is not prefix-stable ({kind}): {difference}"


@dataclass(frozen=True)
class SampleConversation:
    """A conversation that the template accepts, and the template's other inputs."""

    messages: list[dict]
    inputs: TemplateInputs


def choose_conversation(renderer: Renderer) -> SampleConversation:
    """Return a conversation with tools if the template knows them, and with reasoning likewise.

    Raises:
        InputError: the template rejects even a conversation without tools.
    """
    sample = SampleConversation(CONVERSATION, renderer.inputs([TOOL], {}))
    try:
        renderer.request(sample.messages, sample.inputs)
    except InputError:
        sample = SampleConversation([CONVERSATION[0], *CONVERSATION[3:]], renderer.inputs(None, {}))
        renderer.request(sample.messages, sample.inputs)
    with_thoughts = [with_reasoning(message) for message in sample.messages]
    thoughtful = SampleConversation(with_thoughts, sample.inputs)
    prompt = renderer.request(thoughtful.messages[:1], sample.inputs).text
    reply = renderer.history(thoughtful.messages[:2], sample.inputs)
    is_read = reply.startswith(prompt) and REASONING in reply
    return thoughtful if is_read else sample


def with_reasoning(message: dict) -> dict:
    """Return a message with reasoning if it is the assistant's."""
    return message | {"reasoning_content": REASONING} if message["role"] == "assistant" else message


def differences(renderer: Renderer, sample: SampleConversation) -> list[str]:
    """Describe, for each reply, how the next request fails to continue it.

    The text is "" if the request continues the reply's ids, and all of its ids are the same as if
    the request were rendered and tokenized as a whole.
    """
    session = Session(renderer)
    messages = sample.messages
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    next_requests = [*replies[1:], len(messages)]
    descriptions = []
    for number, (reply, following) in enumerate(zip(replies, next_requests, strict=True), start=1):
        prompt = session.prompt(messages[:reply], sample.inputs)
        request = renderer.request(messages[:following], sample.inputs)
        text = written_reply(renderer, messages[: reply + 1], sample.inputs, prompt, request.text)
        reply_ids = renderer.chat.tokenize(text).ids
        session.record(messages[:reply], prompt, messages[reply], reply_ids)
        continued = session.prompt(messages[:following], sample.inputs)
        difference = ""
        if not continued.num_recorded:
            shown = first_difference(prompt.text + text, request.text)
            difference = f"a new branch begins after turn {number}, since {shown}"
        elif continued.ids != renderer.ids(request):
            difference = f"after turn {number}, the template's text has other tokens"
        descriptions.append(difference)
    return descriptions


def written_reply(
    renderer: Renderer,
    messages: list[dict],
    inputs: TemplateInputs,
    prompt: Prompt,
    next_request: str,
) -> str:
    """Return the text of a reply as the template writes it, up to and including its end token.

    Args:
        messages: end with the reply.
        prompt: what the reply continues.
        next_request: the rendered request after the reply.
    """
    end_texts = renderer.end_texts.values()
    history = renderer.history(messages, inputs)
    common = os.path.commonprefix([prompt.text, history])
    reply = history[len(common) :]
    ends = [reply.rfind(end) + len(end) for end in end_texts if end in reply]
    if ends:
        return reply[: max(ends)]
    # Some templates end a turn only when another one follows.
    follows = next_request.removeprefix(history) if next_request.startswith(history) else ""
    return reply + next(filter(follows.startswith, end_texts), "")


def first_difference(expected: str, written: str) -> str:
    """Describe the first difference between two texts."""
    position = len(os.path.commonprefix([expected, written]))
    start = max(position - NUM_CONTEXT, 0)
    before = expected[start : position + NUM_SHOWN]
    after = written[start : position + NUM_SHOWN]
    return f"the template then writes {after!r} in place of {before!r}"
