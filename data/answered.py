"""Encode prompts and responses of one model with another model's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from config import InputError
from data.chat.conversation import Conversation
from data.chat.encoding import tokenize_together
from data.chat.endings import read_ending
from data.chat.losses import LOST
from data.chat.lost import find_losses
from data.chat.placeholders import tokens_with_images
from data.chat.plain_text import encode_pair
from data.chat.tokenizer import ChatTokenizer
from data.prompts import without_reply
from data.rows import read_messages, template_inputs
from data.shapes import read_shape


def encode_answered(
    rows: Sequence[dict], responses: Sequence[str], chat: ChatTokenizer, options
) -> list[list[int]]:
    """Return the tokens of conversations: each row's prompt, and the response to it.

    They are rendered as in data.reward_dataset, including all text after the response.
    Special tokens that are written in texts are escaped, unless options.special_tokens_in_text is
    keep: a response cannot end its own turn.

    Args:
        rows: complete rows of data files with prompts.
        options: the section `data` of the configuration.

    Raises:
        InputError: the rows are messages, and there is no chat template; or the template rejects a
            conversation.
    """
    options = copy(options)
    if options.special_tokens_in_text != "keep":
        options.special_tokens_in_text = "escape"
    conversations: list[Conversation | None] = []
    encoded: list[list[int]] = []
    for row, response in zip(rows, responses, strict=True):
        conversation = conversation_of(row, response, chat, options)
        conversations.append(conversation)
    tokenize_together([conversation for conversation in conversations if conversation])
    for row, response, conversation in zip(rows, responses, conversations):
        if conversation is None:
            prompt, _ = read_shape(row, options, with_response=False)
            text = prompt[options.prompt_key]
            ids, _ = encode_pair(text, response, options.special_tokens_in_text, chat)
        else:
            ids = tokens_with_images(conversation, [], options, None)[0].ids
        encoded.append(ids)
    return encoded


def find_unseen(row: dict, response: str, chat: ChatTokenizer, options) -> list[str]:
    """Return the message fields that the rendered chat lacks, and "tools" if it lacks those.

    Template arguments are left out, since a row's arguments are for the policy's template.
    """
    conversation = conversation_of(row, response, chat, options)
    if conversation is None:
        return []
    arguments = conversation.inputs.arguments
    lost = [loss.field for loss in find_losses(conversation) if loss.kind == LOST]
    return [field for field in dict.fromkeys(lost) if field not in arguments]


def form_of(row: dict, chat: ChatTokenizer, options) -> tuple:
    """Return the properties on which a row's rendering depends, besides its texts.

    These are each message's role, type of content and filled fields; whether there are tools; and
    the template's arguments.
    """
    row, _ = read_shape(row, options, with_response=False)
    messages = read_messages(row, bool(chat.tokenizer.chat_template), options)
    if messages is None:
        return ()
    turns = []
    for message in messages:
        filled = [name for name, value in message.items() if value not in (None, "", [])]
        type_of_content = type(message.get("content")).__name__
        turns.append((message["role"], type_of_content, *sorted(filled)))
    inputs = template_inputs(row, chat.parameters, options)
    return (*turns, bool(inputs.tools), repr(inputs.arguments))


def conversation_of(row: dict, response: str, chat: ChatTokenizer, options) -> Conversation | None:
    """Return the rendered conversation; None if prompt and response are plain text."""
    row, _ = read_shape(row, options, with_response=False)
    messages = read_messages(row, bool(chat.tokenizer.chat_template), options)
    if messages is None:
        return None
    if not chat.tokenizer.chat_template:
        raise InputError(
            "the tokenizer has no chat template, and the prompts are messages: save a template "
            "with the tokenizer"
        )
    turns = [*without_reply(messages, row, options), {"role": "assistant", "content": response}]
    conversation = Conversation(turns, chat, template_inputs(row, chat.parameters, options))
    # Some templates end a turn only when another turn follows.
    tail = read_ending(chat).tail
    if tail:
        conversation.append(tail)
    return conversation
