"""Find the beginning of an assistant turn: the end of its header or its generation prompt.

The header begins every turn in the history, e.g. "<|im_start|>assistant\\n". The generation prompt
asks the model for a new turn. It consists of the header and possibly more, such as "<think>\\n".
Both are part of the model's input and are never learned.
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

# The beginning of a tag at the end of a text, e.g. "<" if one text continues with <think> and the
# other with </think>.
UNCLOSED_TAG = re.compile(r"<[^<>]*$")
# Limits the cache: some templates write a different text before every turn.
MAX_CACHED_PROMPTS = 1000


@dataclass(frozen=True)
class Header:
    """How a template begins an assistant turn, after the end of the user's turn.

    Both texts are empty if they cannot be determined.

    Attributes:
        text: the text at the beginning of every turn.
        prompt: the generation prompt.
    """

    text: str = ""
    prompt: str = ""


@lru_cache(maxsize=16)
def read_header(chat: ChatTokenizer) -> Header:
    """Return the header that the template writes into the probe."""
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

    # Both texts begin with the tokens that close the user's turn.
    tokens = chat.tokenize_probe(with_prompt)
    bare_ids = chat.tokenize_probe(without_prompt).ids
    num_common = len(os.path.commonprefix([tokens.ids, bare_ids]))
    closing = ""
    if 0 < num_common < len(tokens.ids):
        closing = with_prompt[: tokens.end(num_common - 1)]

    # White space before the header may differ between prompt and history.
    prompt = with_prompt[len(closing) :].lstrip()
    header = os.path.commonprefix([prompt, before_answer.removeprefix(closing).lstrip()])
    if header != prompt:
        header = UNCLOSED_TAG.sub("", header)
    return Header(header if header.strip() else "", prompt)


def find_header_end(conversation: Conversation, turn: Run, previous: Run) -> int:
    """Return the position where a turn begins: the end of its header or generation prompt.

    Normally the text before a turn is the generation prompt for this turn. Otherwise the header of
    the probe is searched for, for example if the template adds an empty <think> block, or if it
    rejects the chat before this turn.

    Args:
        turn: the text of the turn. An empty turn lies anywhere between previous.end and turn.end.
        previous: the run before the turn.

    Raises:
        InputError: neither the generation prompt nor the header is found.
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
        # If the prompt does not contain the header, the header may follow it.
        return previous.end + max(num_agreeing, header_start + len(header.text))
    if header_start >= 0:
        # Some turns in the history begin with the whole prompt, e.g. with a <think> block.
        has_prompt = gap.startswith(header.prompt, header_start)
        opening = header.prompt if has_prompt else header.text
        return previous.end + header_start + len(opening)
    if not turn.is_empty and len(gap.rstrip()) <= num_agreeing <= len(gap):
        # The gap is empty, or it is the beginning of the prompt.
        continues_turn = role_of(conversation, previous) == "assistant"
        has_no_header = not header.text or header.text not in prompt
        if continues_turn or (gap.strip() and has_no_header):
            return previous.end + num_agreeing
    raise turn_not_found(
        turn.message,
        f"it should begin after the generation prompt {prompt or header.text!r}, which is missing "
        f"from the text before it, {gap!r}",
    )


def find_header(header: Header, gap: str, is_empty_turn: bool) -> int:
    """Return the position of the header in the text before a turn, or -1.

    If there are several headers, the last one counts. For an empty turn, the first one counts,
    because the text may include the headers of later turns.
    """
    if not header.text:
        return -1
    return gap.find(header.text) if is_empty_turn else gap.rfind(header.text)


def role_of(conversation: Conversation, run: Run) -> str | None:
    return None if run.message is None else conversation.messages[run.message]["role"]


def cached_generation_prompt(
    conversation: Conversation, message: int, previous: Run, gap: str
) -> str:
    """Return generation_prompt(), cached for turns that a template cannot tell apart.

    A prompt may depend on the tools, the template's arguments, the roles so far, and on texts that
    the template looks for in them, such as "/no_think" in the system message.
    """
    chat = conversation.chat
    if not chat.is_stock:
        return generation_prompt(conversation, message, previous)
    key = (
        gap,
        role_of(conversation, previous),
        conversation.inputs_as_text,
        frozenset(earlier["role"] for earlier in conversation.messages[:message]),
        conversation.literals_before(message),
    )
    cache = chat.generation_prompts
    if key not in cache:
        if len(cache) > MAX_CACHED_PROMPTS:
            cache.clear()
        cache[key] = generation_prompt(conversation, message, previous)
    return cache[key]


def generation_prompt(conversation: Conversation, message: int, previous: Run) -> str:
    """Return the generation prompt for this message: the text that follows the previous run.

    Returns "" if the template rejects the chat that ends before this message, or if that chat does
    not end with the previous run.
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
    """Return `start`, or the end of the header's last token if the token extends beyond `start`.

    Phi-3's token "<|assistant|>" absorbs the white space after it, even the answer's own.
    """
    chat = conversation.chat
    if not chat.absorbs_spaces:
        return start
    tokens = conversation.tokens
    index = bisect_right(range(len(tokens.ids)), start, key=tokens.end)
    if index == len(tokens.ids) or tokens.ids[index] not in chat.added:
        return start
    begins_in_header = bool(conversation.text[tokens.start(index) : start].strip())
    return tokens.end(index) if begins_in_header else start
