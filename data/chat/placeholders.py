"""Images in a conversation: replace the placeholders that the template writes by image tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from config import InputError
from data.chat.conversation import Conversation
from data.chat.forms import has_image, text_of
from data.chat.tokenizer import ChatTokenizer
from data.chat.tokens import Tokens
from data.images.sources import IMAGE, MARK, file_of, read_image


class RowImages(NamedTuple):
    """The images of a row.

    Attributes:
        is_image_token: [T], 1 for tokens of images, 0 for tokens of text. Empty without images.
        images: uint8 [height, width, 3] each.
        files: the files that the images were read from.
    """

    is_image_token: Sequence[int] = ()
    images: Sequence[np.ndarray] = ()
    files: Sequence[str] = ()

    def would_be_cut(self, kept: slice) -> bool:
        """Return whether keeping only these tokens would cut an image, or end with an image.

        An image at the end is useless, since no token after it depends on it.
        """
        is_image_token = self.is_image_token[kept]
        loses_tokens = sum(is_image_token) < sum(self.is_image_token)
        return loses_tokens or 1 in is_image_token[-1:]

    def columns(self) -> dict:
        """Return the images as columns of a cache; {} for a row without images."""
        if not self.images:
            return {}
        return {
            "pixels": b"".join(image.tobytes() for image in self.images),
            "image_sizes": [image.shape[:2] for image in self.images],
        }


def tokens_with_images(
    conversation: Conversation, sources: list, options, folder: Path
) -> tuple[Tokens, RowImages]:
    """Return a conversation's tokens, with placeholders replaced by image tokens, and its images.

    Applies options.special_tokens_in_text to special tokens that are written in texts.

    Args:
        sources: the images in the order of the conversation, as data.images.sources.place_images()
            returns them.
        folder: the directory that relative paths of images refer to.

    Raises:
        InputError: placeholders and images do not match, or an image cannot be read.
    """
    tokens = conversation.escaped_tokens(options.special_tokens_in_text)
    processor = conversation.chat.processor
    if processor:
        check_no_stray_placeholders(conversation, tokens, sources, options)
    if not sources:
        return tokens, RowImages()
    check_reads_images(sources, conversation.chat)
    if tokens is not conversation.tokens:
        raise InputError(
            "the row has images and a text with special tokens, which cannot be escaped in a row "
            "with images: set data.special_tokens_in_text=keep, or remove the special tokens"
        )
    if len(sources) > 1:
        check_order_of_images(conversation)
    images = [processor.resized(read_image(source, folder)) for source in sources]
    expanded_tokens, is_image_token = processor.expand(conversation.text, images)
    paths = [file_of(source, folder) for source in sources]
    files = [str(path) for path in paths if path]
    return expanded_tokens, RowImages(is_image_token, images, files)


def check_reads_images(sources: list, chat: ChatTokenizer) -> None:
    """Raise InputError if a row has images, and the model reads only text."""
    if sources and chat.processor is None:
        raise InputError(
            "the row has images: set model.images=true, which train_sft.py and train_ppo.py "
            "accept, or remove them"
        )


def check_no_stray_placeholders(
    conversation: Conversation, tokens: Tokens, sources: list, options
) -> None:
    """Raise InputError if a text contains a placeholder that does not belong to an image."""
    processor = conversation.chat.processor
    if not sources and (processor.token_types([tokens.ids]) > 0).any():
        raise InputError(
            "the row has no image, but a text contains an image placeholder, such as "
            f"{processor.image_token!r}: remove it"
        )
    for message in conversation.messages:
        if message["role"] != "assistant" and MARK in text_of(message.get("content")):
            raise InputError(
                f'a text contains {MARK}, but the row has no image in "{options.images_key}": set '
                "data.images_key to the column of images"
            )


def check_order_of_images(conversation: Conversation) -> None:
    """Raise InputError if the template moves messages so that the order of their images changes.

    The order is found by rendering numbered texts in place of the images.
    """
    numbers = count()
    messages = [number_images(message, numbers) for message in conversation.messages]
    num_images = next(numbers)
    text = conversation.try_render(messages, **conversation.options) or ""
    positions = [text.find(f"<<{number}>>") for number in range(num_images)]
    printed = [position for position in positions if position >= 0]
    if sorted(printed) != printed:
        raise InputError(
            "the chat template changes the order of the images, which is not supported"
        )


def number_images(message: dict, numbers: count) -> dict:
    """Return the message with a text <<0>>, <<1>>, ... in place of each image."""
    content = message.get("content")
    if not has_image(content):
        return message
    parts = []
    for part in content:
        if part == IMAGE:
            part = {"type": "text", "text": f"<<{next(numbers)}>>"}
        parts.append(part)
    return message | {"content": parts}
