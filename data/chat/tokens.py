"""A tokenizer with its chat template, and the tokens of a text."""

from __future__ import annotations

import datetime
import inspect
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import jinja2

from config import InputError
from data.chat.forms import forms
from data.chat.turns import PROBE, Ending, read_ending, read_header, shows

# What Jinja templates raise on a conversation that they refuse, raise_exception(...) included.
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError)
HALF_CHARACTER = re.compile("[\ud800-\udfff]")


class Tokens:
    """T tokens of a text. ids: T int; place(t): the characters (start, end) of token t in the text, in order."""

    def __init__(self, ids: list[int], place: Callable[[int], tuple[int, int]]):
        self.ids, self.place = ids, place

    def mask(self, spans: list[tuple[int, int]]) -> list[int]:
        """[T] of 0 and 1: the tokens that share a character with one of the spans."""
        mask, every = [0] * len(self.ids), range(len(self.ids))
        for start, end in spans:
            first = bisect_right(every, start, key=lambda t: self.place(t)[1])
            last = bisect_left(every, end, lo=first, key=lambda t: self.place(t)[0])
            mask[first:last] = [1] * (last - first)
        return mask

    def between(self, start: int, end: int) -> Tokens:
        """The tokens that lie within the characters start:end."""
        every = range(len(self.ids))
        first = bisect_left(every, start, key=lambda t: self.place(t)[0])
        return self.part(first, bisect_right(every, end, lo=first, key=lambda t: self.place(t)[1]))

    def part(self, first: int, last: int) -> Tokens:
        return Tokens(self.ids[first:last], lambda t: self.place(first + t))

    def first(self, ids) -> int | None:
        """The number of the first token that is one of ids."""
        return next((t for t, token in enumerate(self.ids) if token in ids), None)


class ChatTokenizer:
    """A fast tokenizer, what is known of its chat template, and end_ids, the tokens at which generation stops.

    added, special: id -> text of the tokens that were added to the vocabulary, and of those that are control tokens.
    """

    def __init__(self, tokenizer, end_ids=(), reader=None):
        from transformers import PreTrainedTokenizerBase

        if not tokenizer.is_fast:
            raise InputError(
                f"{type(tokenizer).__name__} gives no character offsets: a fast tokenizer is needed"
            )
        self.tokenizer, self.end_ids = (
            tokenizer,
            frozenset({tokenizer.eos_token_id, *end_ids} - {None}),
        )
        self.added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        self.special = {
            i: str(token)
            for i, token in tokenizer.added_tokens_decoder.items()
            if token.special and i != tokenizer.unk_token_id
        }
        self.takes_space = any(
            token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values()
        )
        self.beginnings = {text[:2] for text in self.special.values()}
        self.parameters = inspect.signature(tokenizer.apply_chat_template).parameters.keys()
        # That of transformers renders and then tokenizes, which need not be checked for every row.
        self.is_stock = (
            type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
        )
        # A template that writes the time would write another one each time it renders a chat.
        writes_time = "strftime_now" in str(tokenizer.chat_template)
        self.clock = {"strftime_now": datetime.datetime.now().strftime} if writes_time else {}
        self.prompts: dict[tuple, str] = {}  # of Conversation.prompt
        self.reader = reader  # a data.images.processor.Reader, for rows with images

    @classmethod
    def load(cls, tokenizer, directory: Path, reader=None) -> ChatTokenizer:
        """With the ends of generation that a model's directory names, if any: eos_token_id of generation_config.json and of
        config.json."""
        end_ids = set()
        for path in (directory / "generation_config.json", directory / "config.json"):
            found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
            end_ids |= set(found if isinstance(found, list) else [found])
        return cls(tokenizer, end_ids, reader)

    @cached_property
    def probe(self) -> list[dict] | None:
        """A chat of two turns that the template accepts."""
        return next((messages for messages in forms(PROBE) if shows(self.attempt(messages))), None)

    @cached_property
    def header(self) -> tuple[str, str]:
        return read_header(self)

    @cached_property
    def ending(self) -> Ending:
        return read_ending(self)

    def render(
        self, messages: list[dict], tools: list | None = None, tokenize: bool = False, **options
    ):
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=tokenize, **self.clock, **options
        )

    def attempt(self, messages: list[dict], tools: list | None = None, **options) -> str | None:
        """The text, or None: a template may refuse a part of a conversation, e.g. one without a user turn."""
        try:
            return self.render(messages, tools, **options)
        except TEMPLATE_ERRORS:
            return None

    def tokens(self, text: str, **options) -> Tokens:
        if half := HALF_CHARACTER.search(text):
            raise InputError(f"the text has half a character, {half[0]!r}, at {half.start()}")
        return self.tokens_of([text], **options)[0]

    def tokens_of(
        self, texts: list[str], add_special_tokens: bool = False, **options
    ) -> list[Tokens]:
        """The tokens of each text; several are tokenized in parallel."""
        encoding = self.tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
            **options,
        )
        return [
            Tokens(ids, each.token_to_chars)
            for ids, each in zip(encoding["input_ids"], encoding.encodings, strict=True)
        ]

    def plain(self, text: str, policy: str | None) -> Tokens:
        """The tokens of a text without a chat template, between those that the tokenizer puts around every text."""
        escape = {"split_special_tokens": True} if self.to_escape(text, policy or "keep") else {}
        tokens = self.tokens(text, add_special_tokens=True, **escape)
        inner = [t for t in range(len(tokens.ids)) if tokens.place(t) is not None]
        return Tokens(
            tokens.ids,
            lambda t: (
                tokens.place(t) or ((0, 0) if inner and t < inner[0] else (len(text), len(text)))
            ),
        )

    def literals(self, text: str) -> list[tuple[int, int]]:
        """The places (start, end) in a text where special tokens are written."""
        if not any(beginning in text for beginning in self.beginnings):
            return []
        found = []
        for literal in (literal for literal in self.special.values() if literal in text):
            at = text.find(literal)
            while at >= 0:
                found.append((at, at + len(literal)))
                at = text.find(literal, at + 1)
        return sorted(found)

    def to_escape(self, text: str, policy: str) -> bool:
        """Whether a text has special tokens that policy, data.special_tokens_in_text, wants escaped."""
        if policy == "keep" or not (found := self.literals(text)):
            return False
        if policy == "error":
            raise InputError(
                f"the special token {text[slice(*found[0])]!r} is written in a text: "
                "data.special_tokens_in_text=escape reads it as text, =keep as the token"
            )
        return True

    def escape(self, tokens: Tokens, text: str, spans: list[tuple[int, int]]) -> Tokens:
        """The tokens of text, in which special tokens within the spans have become text. What lies between two special
        tokens that stay is tokenized as if the tokenizer had none, so that its ids are those of any other text."""
        stay = [
            t
            for t, quoted in enumerate(tokens.mask(spans))
            if tokens.ids[t] in self.special and not quoted
        ]
        ids, places = [], []
        for before, behind in zip([-1, *stay], [*stay, len(tokens.ids)]):
            part, start = tokens.part(before + 1, behind), 0
            if part.first(self.special) is not None:
                start = tokens.place(before)[1] if before >= 0 else 0
                end = tokens.place(behind)[0] if behind < len(tokens.ids) else len(text)
                read = self.tokens(text[start:end], split_special_tokens=True)
                if read.first(self.special) is not None or self.decode(read) != self.decode(part):
                    raise InputError(
                        f"the tokenizer cannot read the special tokens in {text[start:end][:80]!r} as text: "
                        "data.special_tokens_in_text=error or keep"
                    )
                part = read
            ids += part.ids + tokens.ids[behind : behind + 1]
            places += [(start + a, start + b) for a, b in map(part.place, range(len(part.ids)))]
            places += [tokens.place(behind)] if behind < len(tokens.ids) else []
        return Tokens(ids, places.__getitem__)

    def decode(self, tokens: Tokens) -> str:
        return self.tokenizer.decode(tokens.ids, clean_up_tokenization_spaces=False)
