"""Read preference rows: two answers to one prompt, or one answer with a label.

A pair has the columns chosen and rejected, in one of these forms:

    prompt, chosen, rejected    texts, or lists of messages (TRL). The prompt may also be a list of
                                "messages", ShareGPT's "conversations", or the columns of Alpaca
                                (LLaMA-Factory)
    chosen, rejected            complete chats, whose first messages are equal (TRL), or texts with
                                Human: and Assistant: (Anthropic's HH)

An answer with a label is a row in any form for fine-tuning, with a column "label", or "kto_tag" in
LLaMA-Factory's files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

from config import InputError
from data.chat.losses import is_empty
from data.columns import columns_of_chat
from data.messages import ROLES, as_context, number_in_text, without_none
from data.shapes import alpaca_messages, parse_chat, read_shape, role_of

LABELS = ("label", "kto_tag")  # the second is LLaMA-Factory's
# The column whose messages end a row of a shape in data/shapes.py.
MESSAGE_COLUMNS = {"ShareGPT": "conversations", "prompt/completion": "completion"}
# A turn in Anthropic's HH-RLHF data set.
HH_TURN = re.compile(r"\n\n(Human|Assistant):")
HH_ROLES = {"Human": "user", "Assistant": "assistant"}
HH_ANSWER = "\n\nAssistant:"

Message = dict[str, Any]


class Preference(NamedTuple):
    """A row of preferences, as rows for fine-tuning whose answer is trained.

    Attributes:
        chosen, rejected: rows for data.chat.encoding.encode(); None if the row has no such answer.
        columns: the columns that the prompt, the answers and the label are read from.
        shape: the name of the form in data/shapes.py, or "".
        options: the section `data` for encode(); its train_on selects the trained turns.
    """

    chosen: dict | None
    rejected: dict | None
    columns: list[str]
    shape: str
    options: Any


class Prompt(NamedTuple):
    """The prompt of a pair.

    Attributes:
        value: a text, or a list of messages; None if the answers are complete chats.
        columns: the columns that it is read from.
    """

    value: str | list[Message] | None
    columns: list[str]


def read_preference(row: dict, options, has_template: bool) -> Preference:
    """Return the answers of a row.

    Args:
        options: the section `data` of the configuration.
        has_template: whether the tokenizer has a chat template. Otherwise texts are not made into
            messages.

    Raises:
        InputError: the row is malformed.
    """
    keys = (options.chosen_key, options.rejected_key)
    present = [key for key in keys if row.get(key) is not None]
    label_key = find_label(row, options)
    if label_key and has_pair(row, options):
        raise InputError(
            f'the row has both "{present[0]}" and the label "{label_key}": leave out one of them, '
            "or set data.label_key=null, which reads no label"
        )
    if label_key:
        return read_labelled(row, label_key, options)
    if len(present) == 2:
        return read_pair(row, options, has_template)
    missing = [f'"{key}"' for key in keys if key not in present]
    columns = ", ".join(column for column, value in row.items() if value is not None)
    raise InputError(
        f"{' and '.join(missing)} {'is' if present else 'are'} missing; the row has "
        f"{columns or 'no columns'}: name the columns in data.chosen_key and data.rejected_key, or "
        "the column of a label in data.label_key"
    )


def has_pair(row: dict, options) -> bool:
    """Return whether a row that has a label or a score has a chosen or a rejected answer, too.

    Empty answers do not count: a .csv file with rows of both kinds has empty cells.
    """
    return any(not is_empty(row.get(key)) for key in (options.chosen_key, options.rejected_key))


def with_training(options, train_on: str):
    """Return the options with train_on, a key that the configuration of preferences lacks."""
    changed = copy(options)
    changed.train_on = train_on
    return changed


# -- an answer with a label ------------------------------------------------------------------------


def find_label(row: dict, options) -> str | None:
    """Return the column of the row's label, or None."""
    if options.label_key is None:
        return None
    names = [options.label_key]
    if options.label_key == LABELS[0]:
        names = LABELS
    check_same_label(row, "label_key", names)
    return first_filled(row, names)


def check_same_label(row: dict, option: str, names: Sequence[str]) -> None:
    """Raise InputError if two of these columns have different labels.

    Args:
        option: the key of `data` that names one column to read.
    """
    filled = [name for name in names if not is_empty(row.get(name))]
    if len(filled) < 2:
        return
    first, second = filled
    if number_in_text(row[first]) != number_in_text(row[second]):
        raise InputError(
            f'"{first}" is {str(row[first])[:40]!r}, and "{second}" is {str(row[second])[:40]!r}: '
            f"leave out one of them, or set data.{option}={second}, which does not read {first}"
        )


def first_filled(row: dict, names: Sequence[str]) -> str | None:
    """Return the first of these columns that has a value. An empty cell of a CSV file has none."""
    return next((name for name in names if not is_empty(row.get(name))), None)


def read_labelled(row: dict, label_key: str, options) -> Preference:
    """Return a row with a label: its answer is the chosen one if the label is true."""
    label = number_in_text(row[label_key])
    if label not in (0, 1):
        raise InputError(
            f'"{label_key}" is {str(row[label_key])[:40]!r}: must be true for an answer that is '
            "desirable, and false for one that is not"
        )
    answer = read_single_answer(row, label_key, options)
    if label:
        return answer
    return answer._replace(chosen=None, rejected=answer.chosen)


def read_single_answer(row: dict, key: str, options) -> Preference:
    """Return a row's only answer, as the chosen one. key: the column of its label or score."""
    rest = {column: value for column, value in row.items() if column != key}
    standard_row, shape = read_shape(rest, options, with_response=True)
    columns = [*columns_of_chat(rest, shape, options, with_response=True), key]
    messages = standard_row.get(options.messages_key)
    if isinstance(messages, list) and messages:
        column = MESSAGE_COLUMNS.get(shape, options.messages_key)
        check_ends_with_answer(messages, column)
    # The messages of a completion are all new; a chat's earlier answers belong to its prompt.
    train_on = "all" if shape == "prompt/completion" else "last"
    return Preference(standard_row, None, columns, shape, with_training(options, train_on))


# -- a pair ----------------------------------------------------------------------------------------


def read_pair(row: dict, options, has_template: bool) -> Preference:
    """Return a row with a chosen and a rejected answer."""
    prompt = read_prompt(row, options)
    answers = {}
    for key in (options.chosen_key, options.rejected_key):
        answers[key] = read_answer(row[key], key)
    columns = [*prompt.columns, *answers]
    if isinstance(prompt.value, str) and is_hh(prompt.value) and has_template:
        prompt = prompt._replace(value=hh_prompt(prompt.value, columns[0]))
        answers = {key: without_space(answer) for key, answer in answers.items()}
    if any(is_complete(answer, prompt) for answer in answers.values()):
        check_both_complete(answers, prompt)
        prompt_value, answers = divide_chats(answers, prompt, has_template)
    elif prompt.value is None:
        raise no_prompt(answers)
    else:
        prompt_value = prompt.value
        check_needs_an_answer(prompt, answers)
    base = {column: value for column, value in row.items() if column not in columns}
    chosen, rejected = [
        base | training_row(prompt_value, answer, options) for answer in answers.values()
    ]
    return Preference(chosen, rejected, columns, "", with_training(options, "all"))


def no_prompt(answers: dict[str, str | list[Message]]) -> InputError:
    return InputError(
        f"the row has no prompt, and {' and '.join(answers)} begin with an answer: name the column "
        "of the prompt in data.prompt_key"
    )


def read_prompt(row: dict, options) -> Prompt:
    """Return the prompt of a pair, from the first of the columns that may hold it.

    Some data sets repeat the chosen chat in another column, which is not a prompt (UltraFeedback).
    """
    answers = (row[options.chosen_key], row[options.rejected_key])
    for column in (options.messages_key, options.prompt_key, "conversations"):
        value = row.get(column)
        is_copy = column != options.prompt_key and value in answers
        if value is None or is_copy:
            continue
        if isinstance(value, str) and column != options.prompt_key:
            value = parse_chat(value) or value
        elif isinstance(value, str) and value.lstrip().startswith("["):
            value = parse_chat(value) or value
        if isinstance(value, list) and value and all(map(is_dict, value)):
            return Prompt(without_none(value), [column])
        if isinstance(value, str) and column == options.prompt_key:
            return Prompt(value, [column])
        raise InputError(f'"{column}" must be a list of messages, not {str(value)[:40]!r}')
    if row.get("instruction") is not None:
        messages = alpaca_messages(row | {"output": ""}, "output")["messages"][:-1]
        names = ("instruction", "input", "context", "history")
        return Prompt(messages, [name for name in names if name in row])
    return Prompt(None, [])


def is_dict(value) -> bool:
    return isinstance(value, dict)


def read_answer(value, key: str) -> str | list[Message]:
    """Return an answer: a text, or a list of at least one message."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_chat(value) or value
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list) and value and all(map(is_dict, value)):
        check_ends_with_answer(value, key)
        return without_none(value)
    if isinstance(value, str):
        return value
    raise InputError(
        f'"{key}" must be a text, a message or a list of messages, not {str(value)[:40]!r}'
    )


def check_ends_with_answer(messages: list, key: str) -> None:
    """Raise InputError if the last of these messages is not from the assistant."""
    last = messages[-1]
    role = role_of(last) if isinstance(last, dict) else None
    # Unknown roles are reported later.
    if role in ROLES and role != "assistant":
        raise InputError(
            f'"{key}" ends with a message of the role {role}: it must end with an answer of the '
            "assistant"
        )


def check_needs_an_answer(prompt: Prompt, answers: dict[str, str | list[Message]]) -> None:
    """Raise InputError if a prompt ends with an answer, and another one would follow it."""
    if isinstance(prompt.value, str) or role_of(prompt.value[-1]) != "assistant":
        return
    for key, answer in answers.items():
        if isinstance(answer, str) or role_of(answer[0]) == "assistant":
            raise InputError(
                f'"{prompt.columns[0]}" ends with an answer of the assistant, and "{key}" is '
                "another one: move the beginning of an answer into both answers, and leave the "
                "turn out of the prompt"
            )


def is_complete(answer: str | list[Message], prompt: Prompt) -> bool:
    """Return whether an answer is a chat that begins with the prompt."""
    if isinstance(answer, str):
        return prompt.value is None
    return role_of(answer[0]) not in ("assistant", "tool")


def check_both_complete(answers: dict[str, str | list[Message]], prompt: Prompt) -> None:
    """Raise InputError if only one of the answers begins with the prompt."""
    complete = [key for key, answer in answers.items() if is_complete(answer, prompt)]
    if len(complete) == 1:
        raise InputError(
            f'"{complete[0]}" begins with its prompt, and the other answer does not: write both in '
            "the same form"
        )


def divide_chats(
    answers: dict[str, str | list[Message]], prompt: Prompt, has_template: bool
) -> tuple[str | list[Message], dict[str, str | list[Message]]]:
    """Return the common prompt of two complete chats, and the rest of each.

    Raises:
        InputError: they have no common prompt, or the prompt's column has another one.
    """
    texts = [answer for answer in answers.values() if isinstance(answer, str)]
    if len(texts) == 2 and not has_template:
        return divide_hh_texts(answers)
    chats = {
        key: hh_messages(answer, key) if isinstance(answer, str) else answer
        for key, answer in answers.items()
    }
    first, second = chats.values()
    longest = min(len(first), len(second)) - 1
    num_common = next((i for i in range(longest) if first[i] != second[i]), longest)
    for key, chat in chats.items():
        if role_of(chat[num_common]) != "assistant":
            raise InputError(
                f"{' and '.join(chats)} answer different prompts: the first message in which they "
                f'differ, number {num_common}, is not of the assistant in "{key}"'
            )
    common = first[:num_common]
    if not common:
        raise no_prompt(answers)
    check_prompt(prompt, common)
    return common, {key: chat[num_common:] for key, chat in chats.items()}


def check_prompt(prompt: Prompt, common: list[Message]) -> None:
    """Raise InputError if a row's chats do not begin with its prompt."""
    value = prompt.value
    texts = [message.get("content", message.get("value")) for message in common]
    is_same = value is None or value == common or value in texts
    if not is_same:
        raise InputError(
            f'"{prompt.columns[0]}" is not the prompt that the chats of both answers begin with: '
            "leave out the column, or the prompt in the answers"
        )


# -- texts of Anthropic's HH -----------------------------------------------------------------------


def is_hh(text: str) -> bool:
    return HH_TURN.match(text) is not None


def hh_messages(text: str, key: str) -> list[Message]:
    """Return the messages of a text with Human: and Assistant:, which ends with an answer."""
    if not is_hh(text):
        raise InputError(
            f'"{key}" is the text {text[:40]!r}, and the row has no prompt: name its column in '
            'data.prompt_key, or begin the turns of both texts with "\\n\\nHuman:" and '
            '"\\n\\nAssistant:"'
        )
    _, *parts = HH_TURN.split(text)
    messages = []
    for speaker, content in zip(parts[::2], parts[1::2], strict=True):
        messages.append({"role": HH_ROLES[speaker], "content": content.strip()})
    if messages[-1]["role"] != "assistant":
        raise InputError(f'"{key}" must end with a turn of the Assistant')
    return messages


def hh_prompt(text: str, key: str) -> list[Message]:
    """Return the messages of a prompt with Human: and Assistant:."""
    if not text.rstrip().endswith(HH_ANSWER):
        text += HH_ANSWER
    return hh_messages(text, key)[:-1]


def without_space(answer: str | list[Message]) -> str | list[Message]:
    """Return an answer without the space that follows "Assistant:"."""
    return answer.strip() if isinstance(answer, str) else answer


def divide_hh_texts(answers: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return the common prompt of two texts, and the rest of each, for a model without template."""
    prompts = set()
    rest = {}
    for key, text in answers.items():
        hh_messages(text, key)
        end = text.rindex(HH_ANSWER) + len(HH_ANSWER)
        prompts.add(text[:end])
        rest[key] = text[end:]
    if len(prompts) == 2:
        raise InputError(f"{' and '.join(answers)} answer different prompts")
    return prompts.pop(), rest


def training_row(prompt: str | list[Message], answer: str | list[Message], options) -> dict:
    """Return the columns of a row for fine-tuning, of which only the answer is trained."""
    if isinstance(answer, str):
        return {options.prompt_key: prompt, options.response_key: answer}
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    context = [as_context(message) for message in prompt]
    return {options.messages_key: context + answer}
