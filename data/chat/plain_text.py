"""Rows of plain text, for models without a chat template."""

from __future__ import annotations

from config import InputError
from data.chat.special_tokens import needs_escape
from data.chat.tokenizer import ChatTokenizer
from data.chat.tokens import Span, Tokens


def check_no_images(row: dict, options) -> None:
    """Raise InputError if a row of plain text has images, which need a chat template."""
    if row.get(options.images_key):
        raise InputError(
            f'the row has "{options.images_key}", but the tokenizer has no chat template: '
            "set data.chat_template"
        )


def tokenize_plain(text: str, policy: str | None, chat: ChatTokenizer) -> Tokens:
    """Return the tokens of a text, including special tokens that the tokenizer adds around it.

    The added tokens have empty spans at the start or at the end of the text.

    Args:
        policy: the value of data.special_tokens_in_text; None means keep.
    """
    options = {}
    if needs_escape(text, policy or "keep", chat):
        options["split_special_tokens"] = True
    tokens = chat.tokenize(text, add_special_tokens=True, **options)
    first_in_text = next(
        (index for index in range(len(tokens.ids)) if tokens.span_of(index) is not None), None
    )

    def span_of(index: int) -> tuple[int, int]:
        span = tokens.span_of(index)
        if span is not None:
            return span
        is_at_start = first_in_text is not None and index < first_in_text
        return Span(0, 0) if is_at_start else Span(len(text), len(text))

    return Tokens(tokens.ids, span_of)


def encode_pair(
    prompt: str, response: str, policy: str | None, chat: ChatTokenizer
) -> tuple[list[int], list[int]]:
    """Return (ids, mask), each [T], of a prompt followed by its response and an eos token.

    The mask is 1 for the response and the eos token. If the tokenizer already adds an eos token to
    every text, no second one is added.
    """
    eos = chat.tokenizer.eos_token_id
    if eos is None:
        raise InputError("the tokenizer has no eos token, which would end a response")
    tokens = tokenize_plain(prompt + response, policy, chat)
    mask = tokens.mask([Span(len(prompt), len(prompt) + len(response))])
    has_eos = bool(tokens.ids) and tokens.ids[-1] == eos and not mask[-1]
    if has_eos:
        return tokens.ids, [*mask[:-1], 1]
    return [*tokens.ids, eos], [*mask, 1]
