"""Special tokens that are written in texts, e.g. "<|im_end|>" in a page that a tool returns.

data.special_tokens_in_text sets the policy: keep them as special tokens, escape them (tokenize them
as ordinary text), or reject the row with an error.
"""

from __future__ import annotations

from config import InputError
from data.chat.tokenizer import ChatTokenizer
from data.chat.tokens import Span, Tokens


def find_special_tokens(text: str, chat: ChatTokenizer) -> list[Span]:
    """Return the spans of the special tokens that are written in a text, in order."""
    if not any(prefix in text for prefix in chat.special_prefixes):
        return []
    spans = []
    for special in chat.special.values():
        start = text.find(special)
        while start >= 0:
            spans.append(Span(start, start + len(special)))
            start = text.find(special, start + 1)
    return sorted(spans)


def needs_escape(text: str, policy: str, chat: ChatTokenizer) -> bool:
    """Return whether a text contains special tokens that have to be escaped under this policy.

    Args:
        policy: "keep", "escape" or "error".

    Raises:
        InputError: the policy is "error", and the text contains special tokens.
    """
    if policy == "keep":
        return False
    spans = find_special_tokens(text, chat)
    if not spans:
        return False
    if policy == "error":
        start, end = spans[0]
        raise InputError(
            f"the special token {text[start:end]!r} is written in a text: set "
            "data.special_tokens_in_text to escape (tokenize it as ordinary text) or to keep "
            "(tokenize it as the special token)"
        )
    return True


def escape_special_tokens(
    tokens: Tokens, text: str, spans: list[Span], chat: ChatTokenizer
) -> Tokens:
    """Return the tokens of a text after escaping the special tokens within the spans.

    Each stretch between two kept special tokens is tokenized again without recognizing special
    tokens, so that they become ordinary text.

    Raises:
        InputError: the tokenizer cannot do this.
    """
    is_escaped = tokens.mask(spans)
    kept = [
        index
        for index, token in enumerate(tokens.ids)
        if token in chat.special and not is_escaped[index]
    ]
    ids: list[int] = []
    token_spans: list[Span] = []
    num_tokens = len(tokens.ids)
    for previous, following in zip([-1, *kept], [*kept, num_tokens]):
        stretch = tokens.part(previous + 1, following)
        if stretch.first(chat.special) is not None:
            start = tokens.end(previous) if previous >= 0 else 0
            end = tokens.start(following) if following < num_tokens else len(text)
            stretch = retokenize(stretch, text, Span(start, end), chat)
        ids += stretch.ids
        token_spans += [Span(*stretch.span_of(index)) for index in range(len(stretch.ids))]
        if following < num_tokens:
            ids.append(tokens.ids[following])
            token_spans.append(Span(*tokens.span_of(following)))
    return Tokens(ids, token_spans.__getitem__)


def retokenize(stretch: Tokens, text: str, span: Span, chat: ChatTokenizer) -> Tokens:
    """Tokenize text[span], whose tokens are `stretch`, again without special tokens."""
    quoted = text[span.start : span.end]
    escaped = chat.tokenize(quoted, split_special_tokens=True)
    is_special = escaped.first(chat.special) is not None
    if is_special or chat.decode(escaped.ids) != chat.decode(stretch.ids):
        raise InputError(
            f"the tokenizer cannot tokenize the special tokens in {quoted[:80]!r} as text: set "
            "data.special_tokens_in_text to error or keep"
        )

    def span_in_text(index: int) -> Span:
        start, end = escaped.span_of(index)
        return Span(span.start + start, span.start + end)

    return Tokens(escaped.ids, span_in_text)
