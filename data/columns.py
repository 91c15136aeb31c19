"""Report which columns and message fields of each file are read, ignored or lost.

Every row has a RowUse. The RowUses of each file are summed up in the cache's uses.json, so that a
run that finds the cache prints the same lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from common.counting import count_of
from config import InputError
from data.chat.losses import EARLIER, EMPTY, LOST, UNPRINTED, UNREAD, Loss, is_empty
from data.rows import has_prompt_column, system_column
from data.shapes import SHAPES, chats_in_text

DEFAULT_COLUMNS = {
    "messages_key": "messages",
    "prompt_key": "prompt",
    "response_key": "response",
    "chosen_key": "chosen",
    "rejected_key": "rejected",
    "label_key": "label",
    "margin_key": "margin",
    "score_key": "score",
    "images_key": "images",
    "tools_key": "tools",
    "template_kwargs_key": "chat_template_kwargs",
    "system_key": "system",
    "teacher_prompt_key": None,
}
TEACHER_PROMPT_KEY = "teacher_prompt_key"  # only for prompts

# The keys for columns of preferences alone.
PREFERENCE_KEYS = ("chosen_key", "rejected_key", "label_key", "margin_key", "score_key")

# Why rows are cut or not used, by the name of their count in stats.json.
REASONS_FOR_UNUSED_ROWS = {
    "dropped_long": "dropped, because they are longer than {limit}",
    "truncated": "cut to {limit} (data.truncation={truncation})",
    "dropped_lost_fields": "dropped because of data.lost_fields=drop",
    "dropped_no_loss": "not used, because no token is trained",
    "dropped_identical": "not used, because the chosen and the rejected answer are the same",
}


class RowUse(NamedTuple):
    """How the columns of a row and the fields of its messages are used.

    Attributes:
        columns: the columns that are read.
        fields: the fields of messages that are read.
        other_columns: the columns that are not read.
        ignored_fields: the fields of messages that are not read.
        lost: columns, fields and descriptions of tools that the rendered chat lacks.
        earlier: fields that the template prints only in the latest turns.
        has_system_column: whether a column becomes the system message.
        has_empty_answer: whether an answer without any text is trained.
        json_chats: the columns of chats that are JSON text.
        empty_columns: the columns that would be read, but have no value in this row.
    """

    columns: tuple[str, ...]
    fields: tuple[str, ...]
    other_columns: tuple[str, ...]
    ignored_fields: tuple[str, ...]
    lost: tuple[str, ...]
    earlier: tuple[str, ...]
    has_system_column: bool
    has_empty_answer: bool
    json_chats: tuple[str, ...]
    empty_columns: tuple[str, ...]


@lru_cache(maxsize=10_000)  # the rows of a data set have few different uses
def to_json(use: RowUse) -> str:
    return json.dumps(use)


def describe_use(
    row: dict,
    shape: str,
    options,
    losses: Iterable[Loss],
    with_response: bool,
    chat_columns: list[str] | None = None,
) -> str:
    """Return the RowUse of a row as JSON.

    Args:
        row: the row of the data file.
        shape: the name of its shape (data/shapes.py), or "".
        losses: from data.chat.lost.find_losses().
        with_response: whether the response is read, too (fine-tuning).
        chat_columns: for preferences, the columns that are read.
    """
    lost = names_of(losses, LOST)
    unread = names_of(losses, UNREAD)
    named_columns = key_columns(options, with_response, has_answers=chat_columns is not None)
    is_prompt = chat_columns is None and not with_response
    if chat_columns is None:
        chat_columns = columns_of_chat(row, shape, options, with_response)
    input_columns = columns_of_inputs(row, options)
    if is_prompt and options.teacher_prompt_key:
        input_columns.append(options.teacher_prompt_key)
    columns = [column for column in [*chat_columns, *input_columns] if column not in lost]
    present = [column for column, value in row.items() if not is_empty(value)]
    fields = list(fields_of_messages(row, chat_columns))
    ignored = [name for name in fields if name in options.ignored_fields]
    ignored += [name for name in unread if name not in ignored]
    use = RowUse(
        tuple(column for column in columns if column in present),
        tuple(name for name in fields if name not in ignored and name not in lost),
        tuple(column for column in present if column not in columns and column not in lost),
        tuple(ignored),
        (*lost, *names_of(losses, UNPRINTED)),
        names_of(losses, EARLIER),
        bool(system_column(row, options)),
        any(loss.kind == EMPTY for loss in losses),
        tuple(chats_in_text(row, options)),
        tuple(column for column in named_columns if is_empty(row.get(column, True))),
    )
    return to_json(use)


def key_columns(options, with_response: bool, has_answers: bool) -> list[str]:
    """Return the columns that the keys of `data` name.

    Args:
        has_answers: whether the rows are preferences.
    """
    keys = [key for key in DEFAULT_COLUMNS if with_response or key != "response_key"]
    if not has_answers:
        keys = [key for key in keys if key not in PREFERENCE_KEYS]
    if with_response or has_answers:
        keys.remove(TEACHER_PROMPT_KEY)
    columns = [getattr(options, key, None) for key in keys]
    return [column for column in columns if column]


def names_of(losses: Iterable[Loss], kind: str) -> tuple[str, ...]:
    return tuple(sorted({loss.field for loss in losses if loss.kind == kind}))


def columns_of_chat(row: dict, shape: str, options, with_response: bool) -> list[str]:
    """Return the columns that hold messages, or a prompt and its response."""
    if shape:
        return list(SHAPES[shape].reads)
    if not has_prompt_column(row, options):
        return [options.messages_key]
    return [options.prompt_key, options.response_key] if with_response else [options.prompt_key]


def columns_of_inputs(row: dict, options) -> list[str]:
    """Return the columns that any row may have besides its chat."""
    columns = [options.tools_key, options.template_kwargs_key, "enable_thinking"]
    columns.append(options.images_key)
    if system_column(row, options):
        columns.append(options.system_key)
    return columns


def fields_of_messages(row: dict, columns: list[str]) -> dict[str, None]:
    """Return the names of the fields that the messages in these columns have, in order."""
    fields: dict[str, None] = {}
    for column in columns:
        messages = row.get(column)
        if not isinstance(messages, list):
            continue
        for message in messages:
            if isinstance(message, dict):
                fields |= dict.fromkeys(key for key in message if not is_empty(message[key]))
    return fields


@dataclass
class FileUse:
    """How the columns of a file are used: sums of the RowUses of its rows.

    The dicts map a name to a number of rows. See RowUse.
    """

    columns: dict[str, int] = field(default_factory=dict)
    fields: dict[str, int] = field(default_factory=dict)
    other_columns: dict[str, int] = field(default_factory=dict)
    ignored_fields: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    earlier: dict[str, int] = field(default_factory=dict)
    json_chats: dict[str, int] = field(default_factory=dict)
    empty_columns: dict[str, int] = field(default_factory=dict)
    num_system_columns: int = 0
    num_empty_answers: int = 0
    num_files: int = 1

    def add(self, use: RowUse, num_rows: int) -> None:
        """Add rows that have the same use."""
        for name, value in vars(self).items():
            if isinstance(value, dict):
                add_counts(value, dict.fromkeys(getattr(use, name), num_rows))
        if use.has_system_column:
            self.num_system_columns += num_rows
        if use.has_empty_answer:
            self.num_empty_answers += num_rows

    def merge(self, other: FileUse) -> None:
        """Add the rows of another file."""
        for name, value in vars(other).items():
            if isinstance(value, dict):
                add_counts(getattr(self, name), value)
        self.num_system_columns += other.num_system_columns
        self.num_empty_answers += other.num_empty_answers
        self.num_files += other.num_files

    def names(self) -> str:
        """Return the names in all dicts, to recognize files whose report is the same."""
        reported = vars(self) | {"empty_columns": None}
        return str({name: sorted(value) for name, value in reported.items() if is_dict(value)})


def is_dict(value) -> bool:
    return isinstance(value, dict)


def add_counts(counts: dict[str, int], added: dict[str, int]) -> None:
    for name, number in added.items():
        counts[name] = counts.get(name, 0) + number


def uses_of_file(uses: Iterable[dict]) -> dict:
    """Return the FileUse of a file as a dict.

    Args:
        uses: {"values": a RowUse as JSON, "counts": number of rows} for each different RowUse.
    """
    total = FileUse()
    for use in uses:
        if use["values"]:
            total.add(RowUse(*json.loads(use["values"])), use["counts"])
    return asdict(total)


def report_lines(paths: list[Path], uses: list[dict], is_training: bool) -> Iterator[str]:
    """Yield the lines that tell a user how the files are read.

    Files with the same columns and fields share their lines.

    Args:
        uses: uses_of_file() for each path.
        is_training: whether the rows are for fine-tuning. Otherwise, columns that are not read are
            for the reward function.
    """
    merged: dict[str, tuple[str, FileUse]] = {}
    for path, use in zip(paths, uses):
        file_use = FileUse(**deepcopy(use))  # merge() changes its dicts
        key = file_use.names()
        if key in merged:
            merged[key][1].merge(file_use)
        else:
            merged[key] = (path.name, file_use)
    for name, file_use in merged.values():
        if not file_use.columns:
            continue  # every row is an error or blank
        if file_use.num_files > 1:
            name += f" and {count_of(file_use.num_files - 1, 'more file')}"
        for line in lines_of_file(file_use, is_training):
            yield f"{name}: {line}"


def check_column_keys(options, datasets: Mapping[str, Any]) -> None:
    """Raise InputError for a key of `data` that names a column which is read from no row.

    Keys with their defaults are exempt, since most rows have no tools and no images. So are columns
    that exist but are empty.

    Args:
        options: the section `data` of the configuration.
        datasets: TokenDatasets or PromptDatasets, by the configuration key of their files.
    """
    use = FileUse()
    for dataset in datasets.values():
        for use_of_file in dataset.uses:
            use.merge(FileUse(**use_of_file))
    read = {*use.columns, *use.lost, *use.empty_columns}
    for key, default in DEFAULT_COLUMNS.items():
        column = getattr(options, key, default)
        if column in (default, None) or column in read:
            continue
        if column in use.other_columns:
            raise InputError(
                f"data.{key}={column} has no effect: the rows have this column, but they are read "
                f"from {', '.join(use.columns)}. Leave out data.{key}"
            )
        columns = [*use.columns, *use.other_columns, *use.lost]
        raise InputError(
            f"data.{key}={column} names no column of {' and '.join(datasets)}, which have "
            f"{', '.join(dict.fromkeys(columns))}: name one of these, or leave out data.{key}"
        )


def filled_columns(dataset) -> set[str]:
    """Return the columns that have a value in some row of a TokenDataset or PromptDataset.

    Columns that the chat template leaves out are not among them.
    """
    columns: set[str] = set()
    for use in dataset.uses:
        columns |= {*use["columns"], *use["other_columns"]}
    return columns


def unused_row_lines(stats: dict, limit: str, truncation: str) -> Iterator[str]:
    """Yield a line for each reason for which rows are cut or not used.

    Args:
        stats: the numbers of rows, from stats.json.
        limit: the setting that limits their length, such as data.max_length=4096.
        truncation: data.truncation.
    """
    for name, reason in REASONS_FOR_UNUSED_ROWS.items():
        if stats.get(name):
            text = reason.format(limit=limit, truncation=truncation)
            yield f"{text}: {count_of_rows(stats[name])}"


def lines_of_file(use: FileUse, is_training: bool) -> Iterator[str]:
    """Yield the lines about one file; see report_lines()."""
    columns = list(use.columns)
    if use.fields and columns:
        columns[0] += f" ({', '.join(use.fields)})"
    parts = [f"reads {', '.join(columns)}"]
    if use.other_columns and is_training:
        parts.append(f"ignores the columns {with_counts(use.other_columns)}")
    elif use.other_columns:
        parts.append(f"leaves to the reward function {with_counts(use.other_columns)}")
    if use.ignored_fields:
        parts.append(f"ignores in messages {with_counts(use.ignored_fields)}")
    yield "; ".join(parts)
    if use.json_chats:
        yield f"JSON text is read as a chat: {with_counts(use.json_chats)}"
    if use.num_system_columns:
        rows = count_of_rows(use.num_system_columns)
        yield f"the system column becomes the system message ({rows})"
    if use.num_empty_answers:
        rows = count_of_rows(use.num_empty_answers)
        yield f"an empty answer is trained ({rows}): it ends at once"
    yield from advice_on_columns(use)
    if use.earlier:
        yield f"the chat template drops from earlier turns, by design: {with_counts(use.earlier)}"
    if use.lost:
        yield f"the chat template leaves out {with_counts(use.lost)}: see data.lost_fields"


def advice_on_columns(use: FileUse) -> Iterator[str]:
    """Yield settings that would read an ignored column whose name suggests its use."""
    for column in use.other_columns:
        is_system = column.lower().startswith("system") and not use.num_system_columns
        if is_system:
            yield f"data.system_key={column} would make this column the system message"


def with_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} ({count_of_rows(number)})" for name, number in counts.items())


def count_of_rows(number: int) -> str:
    return count_of(number, "row")
