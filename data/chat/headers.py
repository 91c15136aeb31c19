"""Where an assistant turn begins: its header, and the generation prompt that contains it.

The header begins a turn in the history, e.g. "<|im_start|>assistant\\n". The generation prompt
asks the model for a turn: the header, and perhaps more, such as "<think>\\n". Both are given to the
model and never learned.
"""

from __future__ import annotations

import os.path
import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

from data.chat.conversation import Conversation
from data.chat.marks import mark_messages, mark_offsets, read_marks, texts_of
from data.chat.probe import ANSWER, QUESTION, find_probe
from data.chat.runs import Run, turn_not_found
from data.chat.special_tokens import find_special_tokens
from data.chat.tokenizer import ChatTokenizer

# A tag that is cut off: "<thi" of "<think>", which </think> would not continue.
UNCLOSED_TAG = re.compile(r"<[^<>]*$")
# Limits the cache for templates that write a different text between any two messages.
MAX_CACHED_PROMPTS = 1000


@dataclass(frozen=True)
class Header:
    """How a template begins a turn of the assistant, without the end of the user's turn.

    Both texts are empty if they cannot be read from the template.

    Attributes:
        text: the text at the start of every turn.
        prompt: the text that asks for a turn.
    """

    text: str = ""
    prompt: str = ""


@lru_cache(maxsize=16)
def read_header(chat: ChatTokenizer) -> Header:
    """Return the header that the template writes into a chat of two turns."""
    probe = find_probe(chat)
    if probe is None:
        return Header()
    with_prompt = chat.try_render(probe[:1], add_generation_prompt=True)
    without_prompt = chat.try_render(probe[:1])
    if with_prompt is None or without_prompt is None:
        return Header()
    with_prompt = with_prompt.partition(QUESTION)[2]
    without_prompt = without_prompt.partition(QUESTION)[2]
    history = chat.try_render(probe)
    before_answer = history.partition(QUESTION)[2].partition(ANSWER)[0]

    # Both begin with the tokens that close the user's turn.
    tokens = chat.tokenize(with_prompt)
    bare_ids = chat.tokenize(without_prompt).ids
    num_common = len(os.path.commonprefix([tokens.ids, bare_ids]))
    closing = ""
    if 0 < num_common < len(tokens.ids):
        closing = with_prompt[: tokens.end(num_common - 1)]

    # The white space before the header may differ.
    prompt = with_prompt[len(closing) :].lstrip()
    header = os.path.commonprefix([prompt, before_answer.removeprefix(closing).lstrip()])
    if header != prompt:
        header = UNCLOSED_TAG.sub("", header)
    return Header(header if header.strip() else "", prompt)


def find_header_end(conversation: Conversation, turn: Run, previous: Run) -> int:
    """Return where the header of a turn, or the generation prompt for it, ends.

    Normally the text before a turn is the prompt with which the template asks for this turn. If not
    (the template adds an empty <think> block, or it rejects the shortened chat), the header of the
    probe is searched for.

    Args:
        turn: the text of the turn. If it is empty, the turn lies anywhere between previous.end and
            turn.end.
        previous: the run before it.

    Raises:
        InputError: neither the prompt nor the header is found.
    """
    text = conversation.text
    gap = text[previous.end : turn.start]
    prompt = cached_generation_prompt(conversation, turn.message, previous, gap)
    num_agreeing = len(os.path.commonprefix([prompt, text[previous.end : turn.end]]))
    header = read_header(conversation.chat)
    header_start = find_header(header, gap, is_empty_turn=turn.is_empty)

    if prompt and num_agreeing == len(prompt):
        if header_start < 0 or turn.is_empty:
            return previous.end + num_agreeing
        # The prompt may lack the header, which then follows it.
        return previous.end + max(num_agreeing, header_start + len(header.text))
    if header_start >= 0:
        # Some turns of the history begin with the whole prompt, e.g. with a <think> block.
        has_prompt = gap.startswith(header.prompt, header_start)
        opening = header.prompt if has_prompt else header.text
        return previous.end + header_start + len(opening)
    if not turn.is_empty and len(gap.rstrip()) <= num_agreeing <= len(gap):
        # The gap is the beginning of the prompt, or empty.
        continues_turn = role_of(conversation, previous) == "assistant"
        has_no_header = not header.text or header.text not in prompt
        if continues_turn or (gap.strip() and has_no_header):
            return previous.end + num_agreeing
    raise turn_not_found(
        turn.message,
        f"it should begin with the prompt for it, {prompt or header.text!r}, which is not in "
        f"{gap!r}",
    )


def find_header(header: Header, gap: str, is_empty_turn: bool) -> int:
    """Return where the header begins in the text before a turn, or -1.

    The last header in this text counts. For an empty turn it is the first one, because the text may
    extend to the headers of later turns.
    """
    if not header.text:
        return -1
    return gap.find(header.text) if is_empty_turn else gap.rfind(header.text)


def role_of(conversation: Conversation, run: Run) -> str | None:
    return None if run.message is None else conversation.messages[run.message]["role"]


def cached_generation_prompt(
    conversation: Conversation, message: int, previous: Run, gap: str
) -> str:
    """Return generation_prompt(), cached for turns that follow the same text."""
    inputs = conversation.inputs
    cache = conversation.chat.generation_prompts
    role = role_of(conversation, previous)
    key = (gap, role, bool(inputs.tools), str(inputs.arguments))
    if key not in cache:
        if len(cache) > MAX_CACHED_PROMPTS:
            cache.clear()
        cache[key] = generation_prompt(conversation, message, previous)
    return cache[key]


def generation_prompt(conversation: Conversation, message: int, previous: Run) -> str:
    """Return what the template writes after the previous run when it asks for this message.

    It is "" if another message's text follows that run, or if the template rejects the shortened
    chat.
    """
    chat = conversation.chat
    messages = conversation.messages[:message]
    texts = texts_of(messages)
    offsets = [mark_offsets(text.text, find_special_tokens(text.text, chat)) for text in texts]
    marked = conversation.try_render(mark_messages(messages, offsets), add_generation_prompt=True)
    plain, pieces = read_marks(marked or "", texts, offsets)
    last_message = pieces[-1].source.message if pieces else None
    if last_message != previous.message:
        return ""
    return plain[pieces[-1].end if pieces else 0 :]


def skip_absorbed_spaces(conversation: Conversation, start: int) -> int:
    """Return `start`, or the end of the header's last token if that extends beyond `start`.

    Phi-3's "<|assistant|>" absorbs the white space after it, even if it belongs to the answer.
    """
    chat = conversation.chat
    if not chat.absorbs_spaces:
        return start
    tokens = conversation.tokens
    index = bisect_right(range(len(tokens.ids)), start, key=tokens.end)
    if index == len(tokens.ids) or tokens.ids[index] not in chat.added:
        return start
    is_of_header = bool(conversation.text[tokens.start(index) : start].strip())
    return tokens.end(index) if is_of_header else start
