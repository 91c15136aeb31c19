"""Find characters of a text that the tokenizer drops, because its vocabulary lacks them.

Most tokenizers have a token for each byte, or an unknown token. One with neither turns a letter
that it does not know into nothing. This also happens when transformers rebuilds the tokenizer of a
model's directory as the class that belongs to config.json, for which its vocabulary was not made.
"""

import unicodedata
from collections.abc import Iterable

# Unicode's categories of letters, numbers, punctuation and symbols. Normalizers may drop others,
# such as control characters.
VISIBLE = "LNPS"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what is decoded if bytes of a character are missing
ASCII_AND_TWO_BYTES = range(0x800)  # by the length in UTF-8
THREE_BYTES = range(0x800, 0x10000, 0x40)
FOUR_BYTES = range(0x10000, 0x20000, 0x100)


class Coverage:
    """Which characters a tokenizer can represent.

    Args:
        chat: the data.chat.tokenizer.ChatTokenizer.

    Attributes:
        is_complete: whether it can represent characters from all parts of Unicode. Then no text has
            to be examined.
    """

    def __init__(self, chat):
        self.chat = chat
        self._is_unknown: dict[str, bool] = {}
        visible = [character for character in probes() if is_visible(character)]
        self.is_complete = self._keeps_all(visible) or not self.unknown(visible)

    def _keeps_all(self, characters: list[str]) -> bool:
        """Return whether a text of these characters, separated by spaces, still has all of them.

        For most tokenizers it does, and one text takes a fifth of the time of as many texts as
        characters. If a character is missing, it may have become another, such as its lower case.
        """
        ids = self.chat.tokenize_probe(" ".join(characters)).ids
        return set(characters) <= set(self.chat.decode(ids))

    def unknown(self, text: Iterable[str]) -> list[str]:
        """Return the visible characters that by themselves become nothing, or lose some bytes.

        They may still be known as parts of a word.
        """
        characters = [character for character in dict.fromkeys(text) if is_visible(character)]
        new = [character for character in characters if character not in self._is_unknown]
        if new:
            self._examine(new)
        return [character for character in characters if self._is_unknown[character]]

    def _examine(self, characters: list[str]) -> None:
        ids = [tokens.ids for tokens in self.chat.tokenize_batch(characters)]
        texts = self.chat.decode_batch(ids)
        for character, own_ids, text in zip(characters, ids, texts, strict=True):
            is_partial = REPLACEMENT in text and character != REPLACEMENT
            self._is_unknown[character] = not own_ids or is_partial

    def first_dropped(self, text: str, ids: list[int]) -> str | None:
        """Return the first character of a text that its tokens lack, or None.

        Args:
            ids: the tokens of the text.
        """
        if self.is_complete:
            return None
        unknown = self.unknown(text)
        if not unknown:
            return None
        decoded = self.chat.decode(ids)
        for character in unknown:
            if decoded.count(character) < text.count(character):
                return character
        return None


def probes() -> list[str]:
    """Return characters from all parts of Unicode."""
    ranges = (ASCII_AND_TWO_BYTES, THREE_BYTES, FOUR_BYTES)
    return [chr(number) for numbers in ranges for number in numbers]


def is_visible(character: str) -> bool:
    return unicodedata.category(character)[0] in VISIBLE
