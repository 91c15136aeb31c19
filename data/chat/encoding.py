"""Turn a row of data into token ids and a mask of the tokens that the model has to generate."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from config import InputError
from data.chat.conversation import Conversation
from data.chat.losses import EMPTY, Loss
from data.chat.lost import empty_answers, find_losses, must_be_dropped, plain_row_losses
from data.chat.part_fields import lost_part_fields
from data.chat.placeholders import RowImages, check_reads_images, tokens_with_images
from data.chat.plain_text import check_no_images, encode_pair
from data.chat.spans import find_spans
from data.chat.tokenizer import LONE_SURROGATE, ChatTokenizer
from data.images.sources import place_images
from data.messages import CONTEXT_KEY, LOSS_KEYS
from data.rows import template_inputs, training_messages

Result = TypeVar("Result")
# The computation of one row. It yields each of the row's conversations, if there are any, and
# resumes after encode_together() has tokenized the conversations of many rows in one call.
RowCoroutine = Generator[Conversation, None, Result]


class EncodedRow(NamedTuple):
    """The tokens of a row.

    Attributes:
        input_ids: T token ids.
        loss_mask: T values, 1 for the tokens to learn, otherwise 0. The first value is always 0,
            since nothing predicts the first token.
        images: the images of the row.
        losses: the texts and fields of the row that the tokens lack.
        is_dropped: whether the row has no tokens because of its losses.
    """

    input_ids: list[int]
    loss_mask: list[int]
    images: RowImages
    losses: Sequence[Loss] = ()
    is_dropped: bool = False


def encode(
    row: dict, chat: ChatTokenizer, options, folder: Path = Path()
) -> RowCoroutine[EncodedRow]:
    """Encode a row for fine-tuning. A generator: run it with encode_together().

    Args:
        row: a row with `messages` (and optionally tools and template arguments), or with `prompt`
            and `response`, of which only the response is learned.
        options: the `data` section of the configuration. Its train_on selects all assistant turns,
            or only the last one. A message is not learned if one of
            data.messages.LOSS_KEYS is 0 or false in it.
        folder: the directory for relative paths of images.

    Raises:
        InputError: the row is malformed, or a turn cannot be located or has no end. The message
            does not contain file and line.
    """
    messages = training_messages(row, bool(chat.tokenizer.chat_template), options)
    images = RowImages()
    if messages is None:
        check_no_images(row, options)
        losses = plain_row_losses(row, options)
        if must_be_dropped(losses, options.lost_fields):
            return EncodedRow([], [], images, losses, is_dropped=True)
        prompt = row[options.prompt_key]
        response = row[options.response_key]
        if not response.strip():
            losses = [*losses, Loss(EMPTY, options.response_key, None, "")]
        ids, mask = encode_pair(prompt, response, options.special_tokens_in_text, chat)
    else:
        if not chat.tokenizer.chat_template:
            raise InputError(
                "the tokenizer has no chat template, so prompt and response must be strings: set "
                "data.chat_template to a template for messages"
            )
        turns = learned_turns(messages, options.train_on)
        losses = [*lost_part_fields(messages)]
        messages, sources = place_images(messages, row.get(options.images_key), options.images_key)
        check_reads_images(sources, chat)  # The template would complain about something else.
        conversation = Conversation(messages, chat, template_inputs(row, chat.parameters, options))
        yield conversation
        losses += [*find_losses(conversation), *empty_answers(conversation, turns)]
        if must_be_dropped(losses, options.lost_fields, conversation.messages):
            return EncodedRow([], [], images, losses, is_dropped=True)
        spans = find_spans(conversation, turns)
        tokens, images = tokens_with_images(conversation, sources, options, folder)
        ids = tokens.ids
        mask = tokens.mask(spans)
        check_no_image_learned(mask, images)
    if mask:
        mask[0] = 0
    return EncodedRow(ids, mask, images, losses)


def learned_turns(messages: list[dict], train_on: str) -> list[int]:
    """Return the indices of the assistant messages to learn."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if train_on == "last":
        turns = turns[-1:]
    return [i for i in turns if is_learned(messages[i])]


def is_learned(message: dict) -> bool:
    if message.get(CONTEXT_KEY):
        return False
    return all(message.get(key, True) for key in LOSS_KEYS)


def check_no_image_learned(mask: list[int], images: RowImages) -> None:
    """Raise InputError if the tokens to learn include tokens of an image."""
    if any(is_learned and is_image for is_learned, is_image in zip(mask, images.is_image_token)):
        raise InputError(
            "an assistant turn that is learned contains an image, which no model can generate: set "
            '"loss_mask": 0 in this message'
        )


def encode_together(rows: list[RowCoroutine[Result]]) -> list[Result | InputError]:
    """Run the coroutines of several rows, and return the result or the InputError of each.

    All conversations are tokenized in one call, which uses several threads.
    """
    results: list = [None] * len(rows)

    def advance(index: int) -> Conversation | None:
        """Run a row until it yields its next conversation, or ends with a result."""
        try:
            return next(rows[index])
        except StopIteration as end:
            results[index] = end.value
        except InputError as error:
            results[index] = error
        return None

    unfinished = list(range(len(rows)))
    while unfinished:
        waiting: dict[int, Conversation] = {}
        for index in unfinished:
            conversation = advance(index)
            if conversation is not None:
                waiting[index] = conversation
        tokenize_together(list(waiting.values()))
        unfinished = list(waiting)
    return results


def tokenize_together(conversations: list[Conversation]) -> None:
    """Tokenize several conversations in one call, and set their `tokens`.

    Conversations whose tokenization may fail are skipped. They are tokenized one by one later, so
    that a failure affects only its own row.
    """
    batch = [c for c in conversations if c.chat.is_stock and not LONE_SURROGATE.search(c.text)]
    if not batch:
        return
    batch_tokens = batch[0].chat.tokenize_batch([c.text for c in batch])
    for conversation, tokens in zip(batch, batch_tokens, strict=True):
        if conversation.chat.first_dropped(conversation.text, tokens) is None:
            conversation.tokens = tokens
