"""Find the end of an assistant turn: the token that ends generation, which is learned as well."""

from __future__ import annotations

import os.path
from dataclasses import dataclass
from functools import lru_cache

from config import InputError
from data.chat.conversation import Conversation
from data.chat.forms import forms
from data.chat.headers import read_header
from data.chat.probe import (
    ANSWER,
    ARGUMENT,
    CALL_PROBE,
    FUNCTION_NAME,
    QUESTION_2,
    RenderedProbe,
    find_probe,
    render_probe,
)
from data.chat.runs import Run, turn_not_found
from data.chat.tokenizer import ChatTokenizer
from data.chat.tokens import Span


@dataclass(frozen=True)
class Ending:
    """How a template ends assistant turns.

    Attributes:
        ids: the ids of the end tokens. A turn ends with the first end token after its text.
        text: the text that ends a turn if the template has no end token.
        tail: the text to append to the chat's last turn, up to and including the end token, if the
            template ends a turn only when another turn follows. Empty if it ends every turn.
        call_tail: the end token to append instead if the last turn calls a tool.
        token: the end token that the template writes after an answer; None if there is none.
    """

    ids: frozenset[int]
    text: str = ""
    tail: str = ""
    call_tail: str = ""
    token: int | None = None


@lru_cache(maxsize=16)
def read_ending(chat: ChatTokenizer) -> Ending:
    """Return how the template ends the two turns of the probe.

    Normally a turn ends with one of chat.end_ids. If a base model is to learn a new template, its
    files may not list the template's end token. In that case, the end token is an added token that
    ends both assistant turns, or that ends the first assistant turn and the user's turn. If only
    the last turn ends with one of chat.end_ids (gpt-oss), earlier turns have no end token.
    """
    messages = find_probe(chat)
    if messages is None:
        return Ending(chat.end_ids)
    probe = render_probe(chat, messages)

    num_shared = len(os.path.commonprefix([probe.after_answer.ids, probe.after_answer_2.ids]))
    shared = probe.after_answer.part(0, num_shared)
    for candidates in (chat.end_ids, chat.added):
        end = shared.first(candidates)
        if end is not None:
            token = shared.ids[end]
            return Ending(chat.end_ids | {token}, token=token)

    end = probe.after_answer_2.first(chat.end_ids)
    if end is not None:
        return Ending(chat.end_ids, token=probe.after_answer_2.ids[end])
    end = find_end_between_turns(chat, probe)
    if end is None:
        closing = ""
        if shared.ids:
            closing = probe.text[probe.answer_end : shared.end(num_shared - 1)].strip()
        return Ending(chat.end_ids, text=closing)

    token = probe.after_answer.ids[end]
    ids = chat.end_ids | {token}
    if probe.after_answer_2.first(chat.added) is not None:
        return Ending(ids, token=token)
    closing = probe.text[probe.answer_end : probe.after_answer.end(end)]
    already_written = probe.text[probe.answer_2_end :]
    tail = closing.removeprefix(already_written)
    return Ending(ids, tail=tail, call_tail=read_call_tail(chat, ids), token=token)


def find_end_between_turns(chat: ChatTokenizer, probe: RenderedProbe) -> int | None:
    """Return the index in probe.after_answer of the token that ends the first answer, or None.

    This token is one of chat.end_ids, or an added token that also ends the user's turn.
    """
    end = probe.after_answer.first(chat.end_ids)
    if end is not None:
        return end
    end = probe.after_answer.first(chat.added)
    user_end = probe.after_question.first(chat.added)
    if end is None or user_end is None:
        return None
    is_same_token = probe.after_answer.ids[end] == probe.after_question.ids[user_end]
    return end if is_same_token else None


def read_call_tail(chat: ChatTokenizer, ids: frozenset[int]) -> str:
    """Return the end token between a tool call and its result, or "". Its id is one of `ids`."""
    renderings = map(chat.try_render, forms(CALL_PROBE))
    text = next(filter(None, renderings), "")
    call_end = max(text.rfind(part) for part in (ARGUMENT, FUNCTION_NAME, ANSWER))
    after_call = chat.tokenize_probe(text).between(call_end, text.find(QUESTION_2))
    end = after_call.first(ids)
    return "" if end is None else chat.added.get(after_call.ids[end], "")


def find_turn_end(conversation: Conversation, turn: Run, following: Run | None) -> int:
    """Return the position where a turn ends, after the token that ends generation.

    If the template leaves out the end of the chat's last turn, the end is appended to the
    conversation.

    Args:
        turn: the text of the turn, or its part before the text of another message.
        following: the next run; None at the end of the chat.

    Raises:
        InputError: nothing ends the turn, so the model would not learn to stop.
    """
    ending = read_ending(conversation.chat)
    gap_end = following.start if following else len(conversation.text)
    gap = conversation.text[turn.end : gap_end]
    tokens = conversation.tokens.between(turn.end, turn.end + len(gap))
    end = tokens.first(ending.ids)
    if end is not None:
        return tokens.end(end)
    if ending.text and ending.text in gap:
        return turn.end + gap.index(ending.text) + len(ending.text)
    if following and continues_turn(conversation, gap, following):
        return turn.end

    is_call = conversation.messages[turn.message].get("tool_calls")
    tail = ending.call_tail if is_call else ending.tail
    if following or not tail:
        raise no_end_error(conversation.chat, ending, turn.message, gap)
    conversation.append(tail)
    return len(conversation.text)


def continues_turn(conversation: Conversation, gap: str, following: Run) -> bool:
    """Return whether the following run belongs to the same assistant turn."""
    if following.message is None:
        return False
    if conversation.messages[following.message]["role"] != "assistant":
        return False
    if not gap.strip():
        return True
    header = read_header(conversation.chat).text
    return bool(header) and header not in gap


def no_end_error(chat: ChatTokenizer, ending: Ending, message: int, gap: str) -> InputError:
    """Return the error for a turn without an end token."""
    end_tokens = sorted(chat.added.get(token, str(token)) for token in ending.ids)
    known = ", ".join(end_tokens) or "no known token"
    return turn_not_found(
        message,
        f"nothing after it would teach the model to stop: the template writes {gap[:40]!r}, and "
        f"generation ends with {known} (eos_token_id of generation_config.json)",
    )


def check_nothing_follows_end(conversation: Conversation, message: int, span: Span) -> None:
    """Raise InputError if the template writes an end token within a turn.

    Generation stops at the first end token, so the model would never generate the rest.
    """
    end_ids = read_ending(conversation.chat).ids
    start, end = span
    if not has_inner_end(conversation, end_ids, span):
        return
    tokens = conversation.tokens.between(start, end)
    for index, token in enumerate(tokens.ids[:-1]):
        if token not in end_ids:
            continue
        token_start, token_end = tokens.span_of(index)
        is_in_text = any(piece.start <= token_start < piece.end for piece in conversation.pieces)
        if not is_in_text:
            rest = conversation.text[token_end:end]
            raise turn_not_found(message, f"the template ends it before {rest[:40]!r}")


def has_inner_end(conversation: Conversation, end_ids: frozenset[int], span: Span) -> bool:
    """Return whether an end token is written in the span anywhere but at its very end."""
    for token in end_ids:
        text = conversation.chat.added.get(token)
        if not text:
            continue
        position = conversation.text.find(text, span.start, span.end)
        if position not in (-1, span.end - len(text)):
            return True
    return False
