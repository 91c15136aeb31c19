"""Conditions on single values of keys, for the table of rules.py."""

import math
import re

ONLY_ESCAPES = re.compile(r"(\\[nrt])+")  # a backslash and a letter, not a control character


def has_type(value, kind: type) -> bool:
    """Return whether a value fits a default of this type: whole numbers fit a float."""
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def is_text(value) -> bool:
    return isinstance(value, str) and value != ""


def are_texts(value) -> bool:
    """Return whether a value is a list of non-empty strings. The list itself may be empty."""
    return isinstance(value, list) and all(is_text(item) for item in value)


def stop_problem(value) -> str | None:
    """Return the problem with a list of strings that end a response.

    In the shell, rollout.stop=["\\n"] loses its quotes, and YAML then reads a backslash and an n.
    """
    if not are_texts(value):
        return "must be a list of strings"
    if any(ONLY_ESCAPES.fullmatch(text) for text in value):
        return (
            "has a backslash and a letter in place of a line break: put the whole argument in "
            "single quotes and the string in double quotes"
        )
    return None


def are_names(value) -> bool:
    return are_texts(value) and len(value) > 0


def are_weights(value: list) -> bool:
    numbers = [x for x in value if has_type(x, float) and 0 < x < math.inf]
    return len(value) == len(numbers) > 0


def are_betas(value: list) -> bool:
    numbers = [x for x in value if has_type(x, float) and 0 <= x < 1]
    return len(value) == len(numbers) == 2


def are_pass_costs(value: list) -> bool:
    numbers = [x for x in value if has_type(x, float) and 0 <= x < math.inf]
    return len(value) == len(numbers) == 4 and value[0] > 0


def is_interval(value: list) -> bool:
    """Return whether a value is [first step, last step], or [-1, -1]."""
    if len(value) != 2 or not all(type(step) is int for step in value):
        return False
    first, last = value
    return value == [-1, -1] or 1 <= first <= last


def is_count_or_share(value) -> bool:
    """Return whether a value is a whole number, at least 0, or a number below 1."""
    if type(value) is float:
        return 0 <= value < 1
    return type(value) is int and value >= 0


def are_ranks(value) -> bool:
    if value is None or value == "all":
        return True
    is_list = isinstance(value, list) and len(value) > 0
    return is_list and all(type(rank) is int and rank >= 0 for rank in value)
