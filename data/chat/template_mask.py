"""Read the assistant turns that the chat template itself marks, with {% generation %} blocks.

Some templates enclose the tokens that the model has to generate in such blocks, from which
transformers computes a mask. If the mask is exact, turns need not be searched for. But some
templates leave the end token out of the block, and others include the header. For these, the search
in spans.py is used, which finds exactly the tokens that the model generates.
"""

from __future__ import annotations

import re
from itertools import groupby
from operator import itemgetter

from data.chat.conversation import Conversation
from data.chat.endings import read_ending
from data.chat.forms import missing_text
from data.chat.headers import read_header
from data.chat.tokens import Span

# {% generation %} and {%- generation -%}.
GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\b")
# read_header() returns the generation prompt that follows messages with these roles.
PLAIN_ROLES = ("system", "developer", "user", "assistant")


def marked_spans(conversation: Conversation, turns: list[int]) -> list[Span] | None:
    """Return the spans of these assistant messages as the template marks them.

    Returns None if the template has no generation blocks, or if the search might give a different
    result: if the marks do not correspond to the assistant's messages one to one, if a turn does
    not begin after the generation prompt, or if it does not end with its only end token.
    """
    if not is_applicable(conversation):
        return None
    messages = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    spans = mask_to_spans(conversation)
    if spans is None or len(spans) != len(messages):
        return None
    span_of_message = dict(zip(messages, spans))
    if not all(is_exact(conversation, i, span_of_message[i]) for i in turns):
        return None
    return [span_of_message[i] for i in turns]


def is_applicable(conversation: Conversation) -> bool:
    """Return whether the template has generation blocks, and a generation prompt that is fixed.

    Tools and template arguments may change the prompt. Tokens that absorb white space may move the
    beginning of a turn.
    """
    chat = conversation.chat
    inputs = conversation.inputs
    if not chat.is_stock or chat.absorbs_spaces or inputs.tools or inputs.arguments:
        return False
    if not GENERATION_BLOCK.search(str(chat.tokenizer.chat_template)):
        return False
    return all(message["role"] in PLAIN_ROLES for message in conversation.messages)


def mask_to_spans(conversation: Conversation) -> list[Span] | None:
    """Return the span of each run of marked tokens; None if the tokens differ from our own."""
    rendered = conversation.render(
        conversation.messages,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **conversation.options,
    )
    tokens = conversation.tokens
    if list(rendered["input_ids"]) != tokens.ids:
        return None
    spans = []
    indices_and_marks = enumerate(rendered["assistant_masks"])
    for is_marked, run in groupby(indices_and_marks, key=itemgetter(1)):
        if is_marked:
            indices = [index for index, _ in run]
            spans.append(Span(tokens.start(indices[0]), tokens.end(indices[-1])))
    return spans


def is_exact(conversation: Conversation, message: int, span: Span) -> bool:
    """Return whether a span is exactly the model's output, up to and including the end token.

    The span must begin after the generation prompt, contain the whole message, and contain a single
    end token, at its end.
    """
    text = conversation.text
    prompt = read_header(conversation.chat).prompt
    if not prompt or not text[: span.start].endswith(prompt):
        return False
    if missing_text(conversation.messages[message], text[span.start : span.end]):
        return False
    end_ids = read_ending(conversation.chat).ids
    ids = conversation.tokens.between(span.start, span.end).ids
    num_ends = sum(token in end_ids for token in ids)
    return num_ends == 1 and ids[-1] in end_ids
