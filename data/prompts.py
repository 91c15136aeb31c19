"""Prompts for reinforcement learning: tokenized once, stored with their rows, read one at a time.

As in data/dataset.py, reading needs only numpy. Hugging Face datasets is imported only on rank 0,
and only if there is no cache yet.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from omegaconf import DictConfig, OmegaConf

from config import InputError
from data.cache import key_of
from data.chat.conversation import Conversation
from data.chat.encoding import RowCoroutine
from data.chat.endings import read_ending
from data.chat.forms import has_image, text_of
from data.chat.losses import Loss
from data.chat.lost import find_losses, located_pieces, must_be_dropped, plain_row_losses
from data.chat.part_fields import lost_part_fields
from data.chat.placeholders import RowImages, check_reads_images, tokens_with_images
from data.chat.plain_text import check_no_images, tokenize_plain
from data.chat.tokenizer import ChatTokenizer
from data.columns import describe_use
from data.images.processor import ImageStore, Processor
from data.images.sources import IMAGE, place_images, without_pixels
from data.lengths import kept_tokens
from data.records import Records
from data.rows import has_prompt_column, read_messages, template_inputs
from data.selection import Selection
from data.shapes import chats_in_text, read_shape, role_of
from data.sources import read_file_rows
from data.tokenization import CacheSpec, read_uses, tokenize_to_cache

# Part of a cache's name. Increase it when encode_prompt() or the files of a cache change.
VERSION = "prompts 14"
# The keys of the section `data` that prompts depend on.
OPTIONS = (
    "messages_key",
    "prompt_key",
    "teacher_prompt_key",
    "images_key",
    "tools_key",
    "template_kwargs_key",
    "max_prompt_length",
    "truncation",
    "special_tokens_in_text",
    "system_key",
    "lost_fields",
    "ignored_fields",
    "system_prompt",
)
# The columns of a row that is not used: an empty line, or a prompt that is too long.
UNUSED = {"input_ids": [], "length": 0, "record": "", "shape": "", "use": "", "is_lost": False}


@dataclass(frozen=True)
class Prompt:
    """A prompt and its row.

    Attributes:
        input_ids: the tokens that the model continues.
        text: the prompt as the chat template renders it; after truncation, the text of the
            remaining tokens.
        row: the complete row of the data file, except for pixels.
        question: the text of the last user message; "" for a prompt of plain text.
        images: uint8 [height, width, 3] each.
        before_images: the tokens of `text`, with a single placeholder for each image; None for a
            prompt without images.
        teacher_ids: the tokens of the prompt that the teacher sees; None: the same prompt.
    """

    input_ids: list[int]
    text: str
    row: dict
    question: str = ""
    images: Sequence[np.ndarray] = ()
    before_images: list[int] | None = None
    teacher_ids: list[int] | None = None


def tokenize_prompts(
    files: str | Sequence[str] | Selection,
    tokenizer,
    options,
    cache_dir: Path,
    tokenizer_dir: Path | str,
    processor: Processor | None = None,
) -> Path:
    """Return the cache folder for these files. Writes it first if there is none. For rank 0 only.

    The folder holds input_ids.npy (int32 [T]), cu_seqlens.npy (int64 [n+1]), records.jsonl (text,
    row and question of each prompt), record_ends.npy (int64 [n], in bytes) and stats.json.

    Args:
        files: names of data files, or a selection of their rows, which have `prompt` (a string or
            messages) or `messages`. Assistant turns at the end of `messages` are removed. Tools and
            template arguments are read as in data.dataset.tokenize().
        options: the `data` section of the configuration.

    Raises:
        InputError: a file is missing, unreadable or empty; a row is malformed (the message names
            the first one, as file:line); prompts are longer than options.max_prompt_length, and
            options.truncation is error; no row is left.
    """
    return tokenize_to_cache(SPEC, files, tokenizer, options, cache_dir, tokenizer_dir, processor)


def validation_options(options: DictConfig) -> DictConfig:
    """Return the section `data` for validation prompts, which no teacher reads."""
    return OmegaConf.merge(options, {"teacher_prompt_key": None})


def tokenize_row(
    row: dict, chat: ChatTokenizer, options, folder: Path = Path()
) -> RowCoroutine[dict]:
    """Return the columns of a row that differ from UNUSED. Run it with encode_together()."""
    standard_row, shape = read_shape(row, options, with_response=False)
    prompt = yield from encode_prompt(standard_row, chat, options, folder)
    seen_by_teacher = None
    losses = prompt.losses
    if options.teacher_prompt_key:
        seen_by_teacher = yield from encode_teacher_prompt(standard_row, chat, options, folder)
        losses = [*losses, *seen_by_teacher.losses]
    prompts = [prompt, seen_by_teacher] if seen_by_teacher else [prompt]
    use = describe_use(row, shape, options, losses, with_response=False)
    if any(encoded.is_dropped for encoded in prompts):
        return {"is_lost": True, "use": use}
    row = without_pixels(row, options.images_key)
    num_tokens = len(prompt.input_ids)
    longest = max(len(encoded.input_ids) for encoded in prompts)
    kept = kept_tokens(num_tokens, options.max_prompt_length, options.truncation)
    columns = {"length": longest, "shape": shape, "use": use}
    columns["image_files"] = list(prompt.images.files)
    kept_ids = prompt.input_ids[kept]
    would_be_cut = prompt.images.would_be_cut(kept)
    if not kept_ids or would_be_cut:
        return columns | {"cut": would_be_cut}

    record = {"text": prompt.text, "row": row, "question": prompt.question}
    if seen_by_teacher:
        record["teacher_ids"] = limit_teacher_prompt(seen_by_teacher.input_ids, options)
        if not record["teacher_ids"]:
            return columns
    num_cut = num_tokens - len(kept_ids)
    text_ids = kept_ids
    if prompt.images.images:
        text_ids = cut_placeholders(chat.tokenize(prompt.text).ids, num_cut, options.truncation)
        record["before_images"] = text_ids
    if num_cut:
        record["text"] = chat.decode(text_ids)
    try:
        columns["record"] = json.dumps(record)
    except TypeError as error:
        raise InputError(
            f"the row cannot be passed to a reward function as JSON: {error}"
        ) from error
    return columns | {"input_ids": kept_ids} | prompt.images.columns()


SPEC = CacheSpec(VERSION, OPTIONS, "max_prompt_length", UNUSED, tokenize_row)


def cut_placeholders(ids: list[int], num_cut: int, truncation: str) -> list[int]:
    """Truncate a prompt with one placeholder per image in the same way as the expanded prompt.

    Truncation never cuts an image, so it removes the same tokens from both.
    """
    return ids[num_cut:] if truncation == "left" else ids[: len(ids) - num_cut]


class EncodedPrompt(NamedTuple):
    """The tokens of a row's prompt.

    Attributes:
        text, question: see Prompt.
        losses, is_dropped: see data.chat.encoding.EncodedRow.
    """

    input_ids: list[int]
    text: str
    question: str
    images: RowImages
    losses: Sequence[Loss] = ()
    is_dropped: bool = False


def encode_prompt(
    row: dict, chat: ChatTokenizer, options, folder: Path = Path()
) -> RowCoroutine[EncodedPrompt]:
    """Encode a row's prompt, up to and including the template's generation prompt.

    A generator: run it with data.chat.encoding.encode_together(). If there is no chat template, the
    prompt is a string, and its tokens begin with the tokenizer's own special tokens, which are not
    in `text`.

    Raises:
        InputError: the row is malformed. The message does not contain file and line.
    """
    messages = read_messages(row, bool(chat.tokenizer.chat_template), options)
    prompt_text = row.get(options.prompt_key)
    if has_prompt_column(row, options) and isinstance(prompt_text, str) and not prompt_text.strip():
        raise InputError("the prompt is empty")
    if messages is None:
        prompt = encode_plain_prompt(row, chat, options)
    elif not chat.tokenizer.chat_template:
        raise InputError(
            "the tokenizer has no chat template, so prompts must be strings: set "
            "data.chat_template to a template for messages"
        )
    else:
        losses = [*lost_part_fields(without_reply(messages, row, options))]
        messages, sources = place_images(messages, row.get(options.images_key), options.images_key)
        turns = without_reply(messages, row, options)
        sources = sources[: count_images(turns)]
        check_reads_images(sources, chat)
        inputs = template_inputs(row, chat.parameters, options)
        conversation = Conversation(turns, chat, inputs, add_generation_prompt=True)
        yield conversation
        losses += find_losses(conversation)
        if must_be_dropped(losses, options.lost_fields, conversation.messages):
            return EncodedPrompt([], "", "", RowImages(), losses, is_dropped=True)
        check_asks_for_turn(conversation)
        tokens, images = tokens_with_images(conversation, sources, options, folder)
        question = last_user_text(turns)
        prompt = EncodedPrompt(tokens.ids, conversation.text, question, images, losses)
    if not prompt.input_ids and not prompt.is_dropped:
        raise InputError("the prompt is empty")
    return prompt


def encode_teacher_prompt(
    row: dict, chat: ChatTokenizer, options, folder: Path
) -> RowCoroutine[EncodedPrompt]:
    """Encode the prompt in the column data.teacher_prompt_key: a string or a list of messages.

    The list may be JSON text, as in the policy's prompts. The prompt has the tools, the template's
    arguments and the system message of the row, unless it has a system message of its own.
    """
    key = options.teacher_prompt_key
    value = row.get(key)
    if not value:
        raise InputError(f'"{key}" is missing or empty, and data.teacher_prompt_key={key} names it')
    try:
        as_prompt = {options.prompt_key: value}
        as_prompt |= chats_in_text(as_prompt, options)
        as_prompt[options.prompt_key] = with_system_of(row, as_prompt[options.prompt_key], options)
        teacher_row = row | {options.messages_key: None} | as_prompt
        return (yield from encode_prompt(teacher_row, chat, options, folder))
    except InputError as error:
        raise InputError(f"data.teacher_prompt_key={key}: {error}") from error


def with_system_of(row: dict, prompt: str | list, options) -> str | list:
    """Return a teacher's prompt with the system message that the policy's messages begin with.

    A system message from a column or from data.system_prompt is added later, as to any prompt.
    """
    key = options.prompt_key if has_prompt_column(row, options) else options.messages_key
    messages = row.get(key)
    if not begins_with_system_message(messages) or begins_with_system_message(prompt):
        return prompt
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return [messages[0], *prompt] if isinstance(prompt, list) else prompt


def begins_with_system_message(messages) -> bool:
    first = messages[0] if isinstance(messages, list) and messages else None
    return isinstance(first, dict) and role_of(first) in ("system", "developer")


def limit_teacher_prompt(ids: list[int], options) -> list[int]:
    """Return the tokens of a teacher's prompt, cut as prompts are."""
    return ids[kept_tokens(len(ids), options.max_prompt_length, options.truncation)]


def check_asks_for_turn(conversation: Conversation) -> None:
    """Raise InputError if a prompt ends with the end of an assistant turn.

    Some templates write nothing for an empty result of a tool, or for a role that they do not know.
    """
    pieces = located_pieces(conversation)
    if not pieces or conversation.messages[pieces[-1].source.message]["role"] != "assistant":
        return
    tail_start = pieces[-1].end
    tail = conversation.tokens.between(tail_start, len(conversation.text))
    end = tail.first(read_ending(conversation.chat).ids)
    if end is not None and not conversation.text[tail.end(end) :].strip():
        raise InputError(
            "the chat template does not ask for an answer: the prompt ends with "
            f"{conversation.text[tail_start:]!r}, the end of an assistant turn. Remove the "
            "messages after that turn, or set data.chat_template to another template"
        )


def encode_plain_prompt(row: dict, chat: ChatTokenizer, options) -> EncodedPrompt:
    """Encode a prompt of plain text."""
    check_no_images(row, options)
    losses = plain_row_losses(row, options)
    if must_be_dropped(losses, options.lost_fields):
        return EncodedPrompt([], "", "", RowImages(), losses, is_dropped=True)
    text = row[options.prompt_key]
    tokens = tokenize_plain(text, options.special_tokens_in_text, chat)
    ids = tokens.ids
    if ids and ids[-1] == chat.tokenizer.eos_token_id and tokens.start(len(ids) - 1) == len(text):
        # This tokenizer adds an eos token to every text, after which the model would not continue.
        ids = ids[:-1]
    return EncodedPrompt(ids, text, "", RowImages(), losses)


def without_reply(messages: list[dict], row: dict, options) -> list[dict]:
    """Return the messages without the assistant's turns at the end."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if has_prompt_column(row, options) and end < len(messages):
        raise InputError(
            f'"{options.prompt_key}" ends with an assistant turn: remove it, or set '
            f"data.messages_key={options.prompt_key}, which removes such turns from the prompt"
        )
    if not end:
        raise InputError(f'"{options.messages_key}" contains only assistant turns')
    return messages[:end]


def count_images(messages: list[dict]) -> int:
    contents = [message.get("content") for message in messages]
    return sum(content.count(IMAGE) for content in contents if has_image(content))


def last_user_text(messages: list[dict]) -> str:
    """Return the text of the last user message; "" if there is none."""
    for message in reversed(messages):
        if message["role"] == "user":
            return text_of(message["content"])
    return ""


class PromptRows(Sequence):
    """The rows of a PromptDataset."""

    def __init__(self, records: Records):
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict:
        return self.records[index]["row"]


class PromptDataset(Sequence):
    """The n prompts of a cache folder, memory-mapped: a prompt is read when it is needed.

    Attributes:
        name: a hash of everything that the prompts depend on.
        lengths: np.int64 [n], the number of tokens of each prompt.
        uses: how the columns of each file are used: data.columns.FileUse as dicts.
        stats: see data.tokenization.write_arrays().
        file_rows: see data.sources.write_file_rows().
        rows: the complete rows of the data files, except for pixels.
        drawn_lengths: np.float32 [n], the mean number of tokens in the latest responses to each
            prompt; nan if there are none yet.
        image_store: the images of the prompts; None for a text model.
    """

    image_store: ImageStore | None = None

    def __init__(self, path: Path, processor: Processor | None = None):
        self.name = key_of(path)
        if processor:
            self.image_store, self.name = ImageStore.load(path, processor)
        self.stats = json.loads((path / "stats.json").read_text())
        self.uses = read_uses(path)
        self.file_rows = read_file_rows(path)
        self.input_ids = np.load(path / "input_ids.npy", mmap_mode="r")
        self.cu_seqlens = np.load(path / "cu_seqlens.npy", mmap_mode="r")
        self.records = Records(path)
        self.rows = PromptRows(self.records)
        self.lengths = np.diff(np.asarray(self.cu_seqlens))
        self.drawn_lengths = np.full(len(self.lengths), np.nan, np.float32)

    @classmethod
    def load(cls, path: Path, processor: Processor | None = None) -> PromptDataset:
        return cls(Path(path), processor)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Prompt:
        row = range(len(self))[index]  # negative indices count from the end
        record = self.records[row]
        ids = self.input_ids[self.cu_seqlens[row] : self.cu_seqlens[row + 1]].tolist()
        images = self.image_store.images[row] if self.image_store else ()
        return Prompt(ids, images=images, **record)

    def expected_lengths(self, rows: Sequence[int]) -> list[float]:
        """Return the drawn_lengths of these rows; for nan, the mean of known ones, or else 1."""
        lengths = self.drawn_lengths[rows]
        is_known = ~np.isnan(lengths)
        default = lengths[is_known].mean() if is_known.any() else 1.0
        return np.where(is_known, lengths, default).tolist()
