"""Find characters of a text that the tokenizer drops, because its vocabulary lacks them.

A byte-level tokenizer has a token for each byte, so that it can encode any text. Others drop a
character that they do not know, unless they have an unknown token. This also happens when
transformers rebuilds the tokenizer of a model's directory as the class that belongs to config.json,
for which its vocabulary was not made.
"""

import unicodedata
from collections.abc import Iterable, Iterator
from functools import lru_cache

from data.chat.tokens import Tokens

# Unicode's categories of letters, numbers, punctuation and symbols. Normalizers may drop others,
# such as control characters.
VISIBLE = "LNPS"
ASCII_AND_TWO_BYTES = range(0x800)  # by the length in UTF-8
THREE_BYTES = range(0x800, 0x10000, 0x40)
FOUR_BYTES = range(0x10000, 0x20000, 0x100)


def probes() -> list[str]:
    """Return characters from all parts of Unicode."""
    ranges = (ASCII_AND_TWO_BYTES, THREE_BYTES, FOUR_BYTES)
    return [chr(number) for numbers in ranges for number in numbers]


def unknown_characters(tokenizer, text: Iterable[str]) -> list[str]:
    """Return the visible characters of a text that a fast tokenizer turns into no token."""
    characters = [character for character in dict.fromkeys(text) if is_visible(character)]
    encoded = tokenizer(
        characters,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    pairs = zip(characters, encoded["input_ids"], strict=True)
    return [character for character, ids in pairs if not ids]


def first_dropped(text: str, tokens: Tokens) -> int | None:
    """Return the position of the first visible character that no token covers, or None.

    After a dropped character, tokens of the same word may name earlier positions than they have.
    """
    end_of_last = 0
    for index in range(len(tokens.ids) + 1):
        is_behind = index == len(tokens.ids)
        start = len(text) if is_behind else tokens.start(index)
        for position in visible_positions(text, end_of_last, start):
            return position
        if not is_behind:
            end_of_last = max(end_of_last, tokens.end(index))
    return None


def visible_positions(text: str, start: int, end: int) -> Iterator[int]:
    for position in range(start, end):
        if is_visible(text[position]):
            yield position


@lru_cache(maxsize=4096)
def is_visible(character: str) -> bool:
    return unicodedata.category(character)[0] in VISIBLE
