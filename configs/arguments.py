"""Read the arguments of a command: YAML files and key=value pairs.

Arguments in another style, such as --key value, are not read; they are reported with the form to
use.
"""

import re
from pathlib import Path

from omegaconf import DictConfig

from configs.files import InputError, read, read_pair
from configs.names import reader_note, readers, suggest

USAGE = "arguments are YAML files and key=value pairs"
YAML_FILE = re.compile(r"\.ya?ml$")


def read_layers(arguments: list[str], known: dict) -> tuple[list[DictConfig], list[str]]:
    """Return the keys and values of every argument, the files first, and the problems.

    Args:
        known: the keys of the script and of its default engine.
    """
    files = []
    pairs = []
    problems = []
    foreign = []
    remaining = list(arguments)
    while remaining:
        advice, num_arguments = advise(remaining, known)
        if advice:
            is_spaced = not is_option(remaining[0])
            shown = " ".join(remaining[:num_arguments]) if is_spaced else remaining[0]
            foreign.append(f"{shown}: {advice}")
        else:
            read_argument(remaining[0], files, pairs, problems)
        del remaining[:num_arguments]
    if foreign:
        foreign[-1] += f"; {USAGE}"
    return files + pairs, foreign + problems


def read_argument(
    argument: str, files: list[DictConfig], pairs: list[DictConfig], problems: list[str]
) -> None:
    """Append an argument's keys and values to `files` or `pairs`, or the problem to `problems`."""
    try:
        if "=" in argument:
            pairs.append(read_pair(argument))
        else:
            files.append(read(Path(argument)))
    except InputError as error:
        problems.extend(error.problems)


def advise(arguments: list[str], known: dict) -> tuple[str, int]:
    """Return advice about the first argument, and the number of arguments that it concerns.

    The advice is "" for a YAML file and for a key=value pair.
    """
    argument, second, third = [*arguments, "", ""][:3]
    if is_option(argument):
        return advise_option(argument, second, known)
    if argument.startswith("="):
        return "there is no key before the =", 1
    key, equals, value = argument.partition("=")
    if equals and not value and is_value(second):
        return advise_pair(key, second, known) + ", without spaces", 2
    if equals or Path(argument).exists():
        return "", 1
    if second == "=" and is_value(third):
        return advise_pair(key, third, known) + ", without spaces", 3
    if second.startswith("=") and is_value(second[1:]):
        return advise_pair(key, second[1:], known) + ", without spaces", 2
    if key not in known:
        return "", 1
    if is_value(second):
        return advise_pair(key, second, known), 2
    return advise_pair(key, "", known), 1


def advise_pair(key: str, value: str, known: dict) -> str:
    """Return how to write a key and its value, or a sentence about a key that does not exist."""
    target = key if key in known else suggest(key, known)
    if target in readers():
        return f"write {target}={value or '...'}{reader_note(target, known)}"
    return target or "--help lists the keys"


def is_option(argument: str) -> bool:
    """Return whether an argument is in the style of argparse or Hydra.

    These are --key value, --key=value, +key=value, ++key=value and ~key.
    """
    return argument.startswith(("-", "+", "~")) and not argument.startswith("~/")


def is_value(argument: str) -> bool:
    """Return whether an argument can be the value in `key value`, two separate arguments."""
    is_other_argument = argument.startswith("--") or "=" in argument
    return argument != "" and not is_other_argument and not YAML_FILE.search(argument)


def advise_option(argument: str, following: str, known: dict) -> tuple[str, int]:
    """Return advice about an argument for which is_option() holds; see advise()."""
    key, equals, value = argument.lstrip("-+~").partition("=")
    num_arguments = 1
    is_flag = argument.startswith("-") and not equals
    if is_flag and is_value(following) and not following.startswith("-"):
        value = following
        num_arguments = 2
    return advise_pair(key, value, known), num_arguments
