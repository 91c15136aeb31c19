"""A chat with known texts, rendered to see how a template begins and ends turns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from data.chat.forms import forms
from data.chat.tokenizer import ChatTokenizer
from data.chat.tokens import Tokens

QUESTION = "pQuestionOne"
ANSWER = "pAnswerOne"
QUESTION_2 = "pQuestionTwo"
ANSWER_2 = "pAnswerTwo"
PROBE = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": QUESTION_2},
    {"role": "assistant", "content": ANSWER_2},
]
FUNCTION_NAME = "pName"
ARGUMENT = "pValue"
CALL = {
    "id": "pCall0001",
    "type": "function",
    "function": {"name": FUNCTION_NAME, "arguments": {"pKey": ARGUMENT}},
}
CALL_PROBE = [
    PROBE[0],
    {"role": "assistant", "content": ANSWER, "tool_calls": [CALL]},
    {"role": "tool", "content": QUESTION_2, "name": FUNCTION_NAME, "tool_call_id": CALL["id"]},
]


@dataclass(frozen=True)
class RenderedProbe:
    """PROBE as the template renders it.

    Attributes:
        text: the rendered chat.
        answer_end, answer_2_end: the positions where the texts of the two answers end.
        after_question, after_answer, after_answer_2: the tokens between a text and the next text,
            or the end of the chat.
    """

    text: str
    answer_end: int
    answer_2_end: int
    after_question: Tokens
    after_answer: Tokens
    after_answer_2: Tokens


@lru_cache(maxsize=16)  # a run has one tokenizer; tests have several
def find_probe(chat: ChatTokenizer) -> list[dict] | None:
    """Return PROBE in the first form whose texts the template prints exactly once; else None."""
    for messages in forms(PROBE):
        text = chat.try_render(messages)
        if text is None:
            continue
        if all(text.count(message["content"]) == 1 for message in PROBE):
            return messages
    return None


def render_probe(chat: ChatTokenizer, messages: list[dict]) -> RenderedProbe:
    """Render the messages that find_probe() returned."""
    text = chat.try_render(messages)
    tokens = chat.tokenize_probe(text)
    question_end = text.index(QUESTION) + len(QUESTION)
    answer_end = text.index(ANSWER) + len(ANSWER)
    answer_2_end = text.index(ANSWER_2) + len(ANSWER_2)
    return RenderedProbe(
        text,
        answer_end,
        answer_2_end,
        after_question=tokens.between(question_end, text.index(ANSWER)),
        after_answer=tokens.between(answer_end, text.index(QUESTION_2)),
        after_answer_2=tokens.between(answer_2_end, len(text)),
    )
