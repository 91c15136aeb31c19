"""A tokenizer with its chat template."""

from __future__ import annotations

import datetime
import inspect
import re
from pathlib import Path

import jinja2

from common.end_tokens import read_end_ids
from config import InputError
from data.chat.coverage import Coverage
from data.chat.tokens import Tokens

# The exceptions of Jinja templates that reject a conversation. raise_exception() raises a
# TemplateError.
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError)
# JSON may contain one half of a UTF-16 surrogate pair, e.g. "\ud83d", which is half of an emoji.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# The name of a role or of a key, or white space.
WORD_OR_SPACE = re.compile(r"(?:\w+|\s+)\Z")


class ChatTokenizer:
    """A fast tokenizer, its chat template, and the tokens that end generation.

    Args:
        tokenizer: a fast tokenizer of transformers.
        end_ids: tokens that end generation, in addition to the tokenizer's eos token.
        processor: the data.images.processor.Processor of a vision-language model, else None.

    Attributes:
        end_ids: all tokens that end generation.
        added: id -> text of the tokens that were added to the vocabulary.
        special: the control tokens in `added`, except the unknown token.
        unknown_id: the token for text that the tokenizer cannot represent; None if it has none, or
            one that also begins or ends texts.
        coverage: which characters the tokenizer can represent.
        may_drop: whether characters that it cannot represent may be dropped without an error.
        literals: the strings in the template's code that it may look for in texts.
        generation_prompts: cache of data.chat.headers.generation_prompt().
        reasoning_keys: caches of data.chat.reasoning.with_readable_reasoning().
        printed_if_last: cache of data.chat.lost.TextCheck.is_printed_if_last().

    Raises:
        InputError: the tokenizer is not a fast one.
    """

    def __init__(self, tokenizer, end_ids=(), processor=None):
        if not tokenizer.is_fast:
            raise InputError(
                f"{type(tokenizer).__name__} returns no character offsets: use a fast tokenizer"
            )
        self.tokenizer = tokenizer
        self.processor = processor
        self.end_ids = frozenset({tokenizer.eos_token_id, *end_ids} - {None})

        added_tokens = tokenizer.added_tokens_decoder
        self.added = {i: str(token) for i, token in added_tokens.items()}
        self.special = {
            i: str(token)
            for i, token in added_tokens.items()
            if token.special and i != tokenizer.unk_token_id
        }
        # Nearly all texts contain none of these prefixes, and therefore no special tokens.
        self.special_prefixes = {text[:2] for text in self.special.values()}
        self.absorbs_spaces = any(token.lstrip or token.rstrip for token in added_tokens.values())

        unknown_id = tokenizer.unk_token_id
        has_other_use = unknown_id in (*self.end_ids, tokenizer.bos_token_id)
        self.unknown_id = None if has_other_use else unknown_id
        self.coverage = Coverage(self)
        self.may_drop = False

        # Names that cannot be template arguments, because they are parameters of the method.
        self.parameters = inspect.signature(tokenizer.apply_chat_template).parameters.keys()
        self.is_stock = uses_stock_method(tokenizer)
        self.clock = frozen_clock(tokenizer)
        self.literals = template_literals(str(tokenizer.chat_template or ""))
        self.generation_prompts: dict[tuple, str] = {}
        self.printed_if_last: set[tuple] = set()
        self.reasoning_keys: dict[str, dict[str, bool]] = {}

    @classmethod
    def load(cls, tokenizer, directory: Path, processor=None) -> ChatTokenizer:
        """Return a ChatTokenizer with the end tokens that the model's files list.

        These are the values of eos_token_id in generation_config.json and config.json.
        """
        return cls(tokenizer, read_end_ids(directory), processor)

    def render(
        self, messages: list[dict], tools: list | None = None, tokenize: bool = False, **options
    ):
        """Return the rendered chat as text, or as token ids with tokenize=True."""
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=tokenize, **self.clock, **options
        )

    def try_render(self, messages: list[dict], tools: list | None = None, **options) -> str | None:
        """Return the rendered chat, or None if the template rejects it.

        For example, some templates reject a conversation without a user turn.
        """
        try:
            return self.render(messages, tools, **options)
        except TEMPLATE_ERRORS:
            return None

    def tokenize(self, text: str, **options) -> Tokens:
        """Return the tokens of a text.

        Raises:
            InputError: the text contains a lone surrogate, or a character that would be dropped.
        """
        surrogate = LONE_SURROGATE.search(text)
        if surrogate:
            raise InputError(
                f"the text contains a lone surrogate, {surrogate[0]!r}, at position "
                f"{surrogate.start()}: write the complete character, or remove it"
            )
        tokens = self.tokenize_batch([text], **options)[0]
        character = self.first_dropped(text, tokens)
        if character is not None:
            position = text.index(character)
            excerpt = text[max(0, position - 20) : position + 20]
            raise InputError(
                f"the tokenizer ({type(self.tokenizer).__name__}) has no token for {character!r} "
                f"in {excerpt!r}, and would drop it: use a tokenizer with tokens for all bytes or "
                "an unknown token, or change the text"
            )
        return tokens

    def first_dropped(self, text: str, tokens: Tokens) -> str | None:
        """Return the first character of a text that its tokens lack, and must not lack, or None."""
        return None if self.may_drop else self.coverage.first_dropped(text, tokens.ids)

    def tokenize_probe(self, text: str) -> Tokens:
        """Return the tokens of a text that is not the user's, and may therefore lose characters."""
        return self.tokenize_batch([text])[0]

    def tokenize_batch(
        self, texts: list[str], add_special_tokens: bool = False, **options
    ) -> list[Tokens]:
        """Return the tokens of each text. The texts are tokenized in parallel."""
        encoded = self.tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
            **options,
        )
        return [
            Tokens(ids, encoding.token_to_chars)
            for ids, encoding in zip(encoded["input_ids"], encoded.encodings, strict=True)
        ]

    def decode(self, ids: list[int]) -> str:
        """Return the text of these tokens, special tokens included."""
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def decode_batch(self, ids_of_texts: list[list[int]]) -> list[str]:
        """Return what decode() returns for each text. The texts are decoded in parallel."""
        backend = self.tokenizer.backend_tokenizer
        return backend.decode_batch(ids_of_texts, skip_special_tokens=False)


def uses_stock_method(tokenizer) -> bool:
    """Return whether apply_chat_template() is the method of transformers.

    That method renders a text and then tokenizes it. If a tokenizer overrides it, the result has to
    be checked for every row.
    """
    from transformers import PreTrainedTokenizerBase

    return type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template


def template_literals(template: str) -> list[str]:
    """Return the strings in a template's code, except words such as role names, and white space."""
    try:
        tokens = list(jinja2.Environment().lex(template))
    except jinja2.TemplateError:  # reported when a chat is rendered
        return []
    sources = {source[1:-1] for _, kind, source in tokens if kind == "string"}
    strings = [
        source.encode("ascii", "backslashreplace").decode("unicode-escape") for source in sources
    ]
    return [string for string in strings if len(string) > 1 and not WORD_OR_SPACE.match(string)]


def frozen_clock(tokenizer) -> dict:
    """Return template arguments that fix the time in a template that writes the current time.

    Two renderings of the same chat are compared, so they must contain the same time.
    """
    if "strftime_now" not in str(tokenizer.chat_template):
        return {}
    return {"strftime_now": datetime.datetime.now().strftime}


def load_tokenizer(config):
    """Return the tokenizer of model.path, with the template in data.chat_template if it is set.

    Raises InputError if there is no tokenizer, or no such template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    except ImportError:
        raise  # it names the package that is missing
    except Exception as error:  # tokenizers raises this class itself for a file it cannot read
        raise InputError(f"no tokenizer in model.path={config.model.path}: {error}") from None
    # Without the tokenizer's files, transformers makes one that turns every text into nothing.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise InputError(
            f"no tokenizer in model.path={config.model.path}: its vocabulary would be "
            f"{' '.join(tokenizer.all_special_tokens)}. Copy the tokenizer's files into it, such "
            "as tokenizer.json and tokenizer_config.json"
        )
    template = config.data.chat_template
    if template is not None:
        try:
            tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(f"data.chat_template={template}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise InputError(f"data.chat_template={template} is not UTF-8: {error}") from None
    return tokenizer
