"""Find characters of a text that the tokenizer drops, because its vocabulary lacks them.

Most tokenizers have a token for each byte, or an unknown token. One with neither turns a letter
that it does not know into nothing. This also happens when transformers rebuilds the tokenizer of a
model's directory as the class that belongs to config.json, for which its vocabulary was not made.
"""

import unicodedata

# Unicode's categories of letters, numbers, punctuation and symbols. Normalizers may drop others,
# such as control characters.
VISIBLE = "LNPS"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what is decoded if bytes of a character are missing


class Coverage:
    """Which characters a tokenizer can represent.

    Args:
        chat: the data.chat.tokenizer.ChatTokenizer.
    """

    def __init__(self, chat):
        self.chat = chat
        self._examined: set[str] = set()
        self._unknown: set[str] = set()

    def unknown(self, text: str) -> set[str]:
        """Return the visible characters that by themselves become nothing, or lose some bytes.

        They may still be known as parts of a word.
        """
        characters = set(text)
        new = characters - self._examined
        if new:
            self._examine(new)
        return characters & self._unknown

    def _examine(self, characters: set[str]) -> None:
        visible = [character for character in characters if is_visible(character)]
        if visible:
            self._unknown.update(self._find_unknown(visible))
        # Last, because another thread may ask for the same characters.
        self._examined |= characters

    def _find_unknown(self, characters: list[str]) -> list[str]:
        """Return those of some visible characters that are unknown; see unknown()."""
        ids = [tokens.ids for tokens in self.chat.tokenize_batch(characters)]
        texts = self.chat.decode_batch(ids)
        unknown = []
        for character, own_ids, text in zip(characters, ids, texts, strict=True):
            is_partial = REPLACEMENT in text
            if not own_ids or is_partial:
                unknown.append(character)
        return unknown

    def first_dropped(self, text: str, ids: list[int]) -> str | None:
        """Return the first character of a text that its tokens lack, or None.

        Args:
            ids: the tokens of the text.
        """
        unknown = self.unknown(text)
        if not unknown:
            return None
        decoded = self.chat.decode(ids)
        for character in sorted(unknown, key=text.index):
            if decoded.count(character) < text.count(character):
                return character
        return None


def is_visible(character: str) -> bool:
    """Return whether a text says less without this character.

    The replacement character stands for something that was lost earlier. BERT's tokenizer drops it.
    """
    return character != REPLACEMENT and unicodedata.category(character)[0] in VISIBLE
