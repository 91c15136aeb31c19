"""Check keys and values against configs/*.yaml and configs/rules.py, and describe every mistake."""

from collections.abc import Iterator

from omegaconf import DictConfig

from configs.files import InputError, flatten, is_free
from configs.names import reader_note, readers, suggest
from configs.rules import REQUIRED, problem_with, problem_with_number, rule_of


def key_problems(layers: list[DictConfig], known: dict) -> Iterator[str]:
    """Yield a sentence about each key of the layers that does not exist or that is a group.

    Keys that only another script or engine reads share a sentence.

    Args:
        known: the keys of this script and engine, with their defaults.
    """
    foreign: dict[str, list[str]] = {}
    for layer in layers:
        try:
            values = flatten(layer)
        except InputError as error:
            yield str(error)
            continue
        for key, value in values.items():
            problem = group_problem(key, value, known)
            if problem:
                yield problem
            elif key in known or is_free(key, known):
                continue
            elif is_foreign(key, known):
                foreign.setdefault(readers()[key], []).append(key)
            else:
                yield unknown_key_problem(key, known)
    for reader, keys in foreign.items():
        yield foreign_keys_problem(reader, list(dict.fromkeys(keys)))


def members(key: str, known: dict) -> list[str]:
    """Return the known keys of a group, or []."""
    return [name for name in known if name.startswith(f"{key}.")]


def is_foreign(key: str, known: dict) -> bool:
    """Return whether only another script or engine reads a key that is unknown here."""
    return key in readers() and not members(key, known)


def foreign_keys_problem(reader: str, keys: list[str]) -> str:
    """Return a sentence about keys that only this script or engine reads."""
    if len(keys) == 1:
        return f"unknown key {keys[0]}; only {reader} reads it"
    return f"unknown keys {', '.join(keys)}; only {reader} reads them"


def unknown_key_problem(key: str, known: dict) -> str:
    """Return a sentence about a key that does not exist, with the key to use instead."""
    of_group = members(key, known)
    if of_group:
        return f"{key} is a group of keys, not a value; did you mean {of_group[0]}?"
    target = suggest(key, known)
    advice = target or "--help lists the keys"
    if target in readers():
        advice = f"the nearest is {target}{reader_note(target, known)}"
    return f"unknown key {key}; {advice}"


def group_problem(key: str, value, known: dict) -> str | None:
    """Describe a group where a value belongs, or a value where a group belongs."""
    is_group = isinstance(value, dict)
    is_free_group = known.get(key) == {}
    if is_group and key in known and not is_free_group:
        return f"{key} is a value, not a group of keys"
    if is_free_group and not is_group:
        return f"{key} is a group of keys, not a value: write {key}.NAME=..."
    return None


def value_problems(values: dict, known: dict) -> list[str]:
    """Return a sentence about each value that has the wrong type, breaks its rule or is missing.

    Args:
        values: the merged configuration, flattened.
        known: the defaults, flattened.
    """
    problems = []
    missing = []
    for key, value in values.items():
        if value == REQUIRED:
            missing.append(f"{key} is missing: pass {key}=... or set it in a YAML file")
            continue
        if is_free(key, known):
            problem = problem_with_number(value) or rule_of(key).problem(value)
        else:
            problem = problem_with(key, value, known[key])
        if problem:
            shown = "null" if value is None else repr(value)
            problems.append(f"{key}={shown} {problem}")
    return problems + missing
