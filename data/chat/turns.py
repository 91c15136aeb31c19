"""How a chat template begins and ends the turns of the assistant, read off a chat of two turns."""

from __future__ import annotations

import os.path
import re
from typing import NamedTuple

from data.chat.forms import forms

QUESTION, ANSWER, QUESTION_2, ANSWER_2 = TEXTS = (
    "pQuestionOne",
    "pAnswerOne",
    "pQuestionTwo",
    "pAnswerTwo",
)
ROLES = ("user", "assistant") * 2
PROBE = [{"role": role, "content": text} for role, text in zip(ROLES, TEXTS)]
CALL = {
    "id": "pCall0001",
    "type": "function",
    "function": {"name": "pName", "arguments": {"pKey": "pValue"}},
}
CALL_PROBE = [
    PROBE[0],
    {"role": "assistant", "content": ANSWER, "tool_calls": [CALL]},
    {"role": "tool", "content": QUESTION_2, "name": "pName", "tool_call_id": CALL["id"]},
]


def shows(text: str | None) -> bool:
    """Whether a template has written each text of a probe once."""
    return text is not None and all(text.count(t) == 1 for t in TEXTS)


HALF_TAG = re.compile(r"<[^<>]*$")  # <think> and </think> both begin with it


class Ending(NamedTuple):
    """ids: a turn ends with the first of these tokens behind its text. text: what it ends with where no token does.

    tail: what a template leaves out behind the last turn, and writes when the chat goes on, up to the token that ends the
    turn; call_tail: that token, for a last turn that calls a tool. Both are empty where the last turn has its end.
    """

    ids: frozenset[int]
    text: str = ""
    tail: str = ""
    call_tail: str = ""


def read_header(chat) -> tuple[str, str]:
    """(what begins a turn of the assistant, what asks for one: the same and perhaps more), without the end of the user's turn;
    empty strings where the template does not show it."""
    asked = chat.probe and chat.attempt(chat.probe[:1], add_generation_prompt=True)
    bare = chat.probe and chat.attempt(chat.probe[:1])
    if asked is None or bare is None:
        return "", ""
    asked, bare = asked.partition(QUESTION)[2], bare.partition(QUESTION)[2]
    between = chat.attempt(chat.probe).partition(QUESTION)[2].partition(ANSWER)[0]
    tokens = chat.tokens(asked)
    count = len(os.path.commonprefix([tokens.ids, chat.tokens(bare).ids]))
    closing = asked[: tokens.place(count - 1)[1]] if 0 < count < len(tokens.ids) else ""
    prompt = asked[len(closing) :].lstrip()  # the white space before it may differ
    header = os.path.commonprefix([prompt, between.removeprefix(closing).lstrip()])
    if header != prompt:
        header = HALF_TAG.sub("", header)
    return header if header.strip() else "", prompt


def read_ending(chat) -> Ending:
    """The token that ends generation is one of chat.end_ids. Where none stands behind a turn, e.g. for a base model that
    learns a new template, it is an added token that ends all turns of the assistant, or the user's turns as well; but where
    the last turn alone has one of end_ids (gpt-oss), nothing ends the others."""
    if chat.probe is None:
        return Ending(chat.end_ids)
    text = chat.attempt(chat.probe)
    tokens, ends = chat.tokens(text), {t: text.index(t) + len(t) for t in TEXTS}
    user = tokens.between(ends[QUESTION], text.index(ANSWER))
    inner, last = (
        tokens.between(ends[ANSWER], text.index(QUESTION_2)),
        tokens.between(ends[ANSWER_2], len(text)),
    )
    shared = inner.part(0, len(os.path.commonprefix([inner.ids, last.ids])))
    for ids in (chat.end_ids, chat.added):
        if (end := shared.first(ids)) is not None:
            return Ending(chat.end_ids | {shared.ids[end]})
    if last.first(chat.end_ids) is not None:
        return Ending(chat.end_ids)
    if (end := inner.first(chat.end_ids)) is None:
        end, closing = inner.first(chat.added), user.first(chat.added)
        if end is None or closing is None or inner.ids[end] != user.ids[closing]:
            return Ending(
                chat.end_ids,
                text=text[ends[ANSWER] : shared.place(len(shared.ids) - 1)[1]].strip()
                if shared.ids
                else "",
            )
    ids = chat.end_ids | {inner.ids[end]}
    if last.first(chat.added) is not None:
        return Ending(ids)
    tail = text[ends[ANSWER] : inner.place(end)[1]].removeprefix(text[ends[ANSWER_2] :])
    return Ending(ids, tail=tail, call_tail=read_call_tail(chat, ids))


def read_call_tail(chat, ids: frozenset[int]) -> str:
    text = next(filter(None, map(chat.attempt, forms(CALL_PROBE))), "")
    called, answered = max(map(text.rfind, ("pValue", "pName", ANSWER))), text.find(QUESTION_2)
    behind = chat.tokens(text).between(called, answered)
    end = behind.first(ids)
    return "" if end is None else chat.added.get(behind.ids[end], "")
