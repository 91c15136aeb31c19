"""Prompts for reinforcement learning: tokenized once, kept with their rows, read a prompt at a time.

As in data.dataset, reading needs numpy alone, and only rank 0, on a miss, imports Hugging Face datasets.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from config import InputError
from data.chat.conversation import Conversation, Seen, Steps, check_no_images
from data.chat.forms import has_image, text_of
from data.chat.tokens import ChatTokenizer
from data.images.processor import Pictures, Reader
from data.images.sources import IMAGE, place, without_pixels
from data.rows import is_paired, messages_of, read_shape, template_arguments
from data.tokenization import Kind, kept_tokens, tokenized

FORMAT = "prompts 6"  # of the cache; raise it when encode_prompt() or the files of a cache change
OPTIONS = (
    "messages_key",
    "prompt_key",
    "images_key",
    "tools_key",
    "template_kwargs_key",
    "max_prompt_length",
    "truncation",
    "special_tokens_in_text",
)
UNUSED = {
    "input_ids": [],
    "length": 0,
    "record": "",
    "shape": "",
}  # an empty line, or a prompt that is too long


@dataclass(frozen=True)
class Prompt:
    """input_ids: the tokens to go on from. text: the prompt as its template renders it, or the text of these tokens where it was
    truncated. row: the row of the data file, whole, but for pixels. question: the text of the last message of the user; "" where
    the prompt is plain text. images: uint8 [height, width, 3] each; before_images: the tokens with one placeholder for each, as
    the template has it, where there are any, and text is theirs."""

    input_ids: list[int]
    text: str
    row: dict
    question: str = ""
    images: Sequence[np.ndarray] = ()
    before_images: list[int] | None = None


def tokenize_prompts(
    files: str | Sequence[str],
    tokenizer,
    options,
    cache_dir: Path,
    tokenizer_dir: Path | str,
    reader: Reader | None = None,
) -> Path:
    """The cache folder for these files, written if there is none: input_ids.npy int32 [T], cu_seqlens.npy int64 [n+1],
    records.jsonl (text, row and question of each prompt), record_ends.npy int64 [n] (bytes), stats.json. For rank 0 alone.

    A row has `messages`, of which the assistant's turns at the end are not part of the prompt, or `prompt`, a string
    or messages; tools and template arguments as for data.dataset.tokenize. options is the `data` section of the
    configuration.
    Raises InputError for a missing, unreadable or empty file, for the first malformed row (as file:line), for prompts
    longer than options.max_prompt_length when options.truncation is error, and when no row is left.
    """
    return tokenized(
        Kind(FORMAT, OPTIONS, "max_prompt_length", UNUSED, tokenize_row),
        files,
        tokenizer,
        options,
        cache_dir,
        tokenizer_dir,
        reader,
    )


def tokenize_row(row: dict, chat: ChatTokenizer, options, folder: Path = Path()) -> Steps[dict]:
    standard, shape = read_shape(row, options, with_response=False)
    ids, text, question, seen = yield from encode_prompt(standard, chat, options, folder)
    kept, row = (
        kept_tokens(len(ids), options.max_prompt_length, options.truncation),
        without_pixels(row, options.images_key),
    )
    result = {"length": len(ids), "shape": shape, "image_files": list(seen.files)}
    if not ids[kept] or seen.would_be_cut(kept):
        return result | {"cut": seen.would_be_cut(kept)}
    more = {}
    if seen.images:  # what is cut has none of their tokens, and as many with placeholders
        before, num_cut = chat.tokens(text).ids, len(ids) - len(ids[kept])
        more["before_images"] = (
            before[num_cut:] if options.truncation == "left" else before[: len(before) - num_cut]
        )
    if len(ids[kept]) < len(ids):
        text = chat.tokenizer.decode(
            more.get("before_images", ids[kept]), clean_up_tokenization_spaces=False
        )
    try:
        record = json.dumps({"text": text, "row": row, "question": question, **more})
    except TypeError as error:
        raise InputError(
            f"the row cannot be handed to a reward function as JSON: {error}"
        ) from error
    return result | {"input_ids": ids[kept], "record": record} | seen.columns()


def encode_prompt(
    row: dict, chat: ChatTokenizer, options, folder: Path = Path()
) -> Steps[tuple[list[int], str, str, Seen]]:
    """(input_ids [T], text, question, images) of a row's prompt, which ends with the template's generation prompt.

    A plain string without a chat template begins with the tokenizer's own special tokens, which text leaves out.
    Raises InputError, without the row's place, when the row is malformed.
    """
    messages, tokenizer, question = (
        messages_of(row, bool(chat.tokenizer.chat_template), options),
        chat.tokenizer,
        "",
    )
    seen = Seen()
    if messages is None:
        check_no_images(row, options)
        text = row[options.prompt_key]
        tokens = chat.plain(text, options.special_tokens_in_text)
        ids = tokens.ids
        if ids and ids[-1] == tokenizer.eos_token_id and tokens.place(len(ids) - 1)[0] == len(text):
            ids = ids[:-1]  # a tokenizer that ends every text itself: nothing would follow
    elif not tokenizer.chat_template:
        raise InputError(
            "the tokenizer has no chat template: give data.chat_template, or rows of a plain string"
        )
    else:
        messages, images = place(messages, row.get(options.images_key), options.images_key)
        turns, arguments = (
            without_reply(messages, row, options),
            template_arguments(row, chat.parameters, options),
        )
        images = images[
            : sum(turn["content"].count(IMAGE) for turn in turns if has_image(turn.get("content")))
        ]
        conversation = Conversation(turns, chat, *arguments, add_generation_prompt=True)
        yield conversation
        tokens, seen = conversation.with_images(images, options, folder)
        ids, text = tokens.ids, conversation.text
        question = next(
            (text_of(turn["content"]) for turn in reversed(turns) if turn["role"] == "user"), ""
        )
    if not ids:
        raise InputError("the prompt is empty")
    return ids, text, question, seen


def without_reply(messages: list[dict], row: dict, options) -> list[dict]:
    """The messages up to the last one that is not the assistant's."""
    end = max(
        (i + 1 for i, message in enumerate(messages) if message["role"] != "assistant"), default=0
    )
    if is_paired(row, options) and end < len(messages):
        raise InputError(
            f'"{options.prompt_key}" ends with a turn of the assistant: leave it out, or name the column '
            "in data.messages_key, where such turns are not part of the prompt"
        )
    if not end:
        raise InputError(f'"{options.messages_key}" has turns of the assistant alone')
    return messages[:end]


class PromptDataset(Sequence):
    """n prompts, mapped from a cache folder: nothing is read before it is asked for.

    name: the hash of all that the prompts depend on. lengths: np.int64 [n], tokens of each prompt. stats: see
    data.tokenization.write_arrays().
    drawn_lengths: np.float32 [n], tokens of the responses that each prompt got last, their mean; nan: none yet.
    pictures: the images of the prompts, for a model that reads them.
    """

    pictures: Pictures | None = None

    def __init__(self, path: Path, reader: Reader | None = None):
        self.pictures, self.name = Pictures.load(path, reader) if reader else (None, path.name)
        self.stats = json.loads((path / "stats.json").read_text())
        self.input_ids, self.cu_seqlens, self.record_ends = (
            np.load(path / f"{name}.npy", mmap_mode="r")
            for name in ("input_ids", "cu_seqlens", "record_ends")
        )
        self.records = np.memmap(path / "records.jsonl", dtype=np.uint8, mode="r")
        self.lengths = np.diff(np.asarray(self.cu_seqlens))
        self.drawn_lengths = np.full(len(self.lengths), np.nan, np.float32)

    @classmethod
    def load(cls, path: Path, reader: Reader | None = None) -> PromptDataset:
        return cls(Path(path), reader)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Prompt:
        i = range(len(self))[index]
        start = self.record_ends[i - 1] if i else 0
        record = json.loads(self.records[start : self.record_ends[i]].tobytes())
        images = self.pictures.images[i] if self.pictures else ()
        return Prompt(
            self.input_ids[self.cu_seqlens[i] : self.cu_seqlens[i + 1]].tolist(),
            images=images,
            **record,
        )

    def expected_lengths(self, rows: Sequence[int]) -> list[float]:
        """drawn_lengths of these rows; where there is none, the mean of the others, or 1."""
        known = ~np.isnan(lengths := self.drawn_lengths[rows])
        return np.where(known, lengths, lengths[known].mean() if known.any() else 1.0).tolist()
