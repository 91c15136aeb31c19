"""Expand ~ and environment variables in the values of keys that name files and directories."""

import os
import re
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from configs.rules import is_path

# $NAME, and ${NAME} unless it is escaped. OmegaConf's ${oc.env:NAME} and ${group.key} do not match.
BARE_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")
BRACED_VARIABLE = re.compile(r"(?<!\\)\$\{([A-Za-z_]\w*)\}")


def has_interpolation(values: dict) -> bool:
    """Return whether any value of a flattened configuration has a ${...}, escaped or not.

    Values may be lists and groups, so their notation is searched as a whole.
    """
    return "${" in repr([*values.values()])


def expand_braced(config: DictConfig, values: dict) -> list[str]:
    """Replace ${NAME} in paths by ${oc.env:NAME}, unless NAME is a key. Returns the problems.

    OmegaConf alone would look for a key of this name.

    Args:
        values: the configuration, flattened but not resolved. It is left as it is.
    """
    problems = []

    def to_interpolation(match: re.Match) -> str:
        name = match[1]
        return match[0] if name in config else f"${{oc.env:{name}}}"

    for key, value in path_values(values):
        expanded = apply(lambda text: BRACED_VARIABLE.sub(to_interpolation, text), value)
        text = " ".join(texts_of(value))
        if "\\${" in text:
            problems.append(f"{key}={value}: a path cannot contain an escaped ${{; rename the file")
            continue
        names = BRACED_VARIABLE.findall(text)
        missing = [name for name in names if name not in config and name not in os.environ]
        if missing:
            problems.append(unset_problem(key, value, missing[0]))
        elif expanded != value:
            OmegaConf.update(config, key, expanded)
    return problems


def expand(config: DictConfig, values: dict) -> list[str]:
    """Replace $NAME and ~ in the paths of a resolved configuration. Returns the problems.

    Args:
        values: the configuration, flattened. It is left as it is.
    """
    problems = []
    for key, value in path_values(values):
        problems_or_none = [path_problem(key, text) for text in texts_of(value)]
        own_problems = [problem for problem in problems_or_none if problem]
        expanded = apply(lambda text: os.path.expanduser(os.path.expandvars(text)), value)
        if own_problems:
            problems += own_problems
        elif expanded != value:
            OmegaConf.update(config, key, expanded)
    return problems


def path_problem(key: str, text: str) -> str | None:
    """Return the problem with a path: a variable that is not set, or a user who does not exist."""
    for name in BARE_VARIABLE.findall(text):
        if name not in os.environ:
            return unset_problem(key, text, name)
    path = os.path.expandvars(text)
    if path.startswith("~") and os.path.expanduser(path) == path:
        user = Path(path).parts[0]
        return f"{key}={text}: {user} is not the home of any user; write ./{path} for a file"
    return None


def unset_problem(key: str, value, name: str) -> str:
    return f"{key}={value}: the environment variable {name} is not set"


def path_values(values: dict) -> list[tuple[str, str | list]]:
    """Return the keys that hold paths, and their values."""
    return [(key, value) for key, value in values.items() if is_path(key)]


def texts_of(value) -> list[str]:
    """Return the strings in the value of a key: itself, or those in a list."""
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str)]


def apply(function, value):
    """Apply a function to a string, or to the strings in a list."""
    if isinstance(value, list):
        return [apply(function, item) for item in value]
    return function(value) if isinstance(value, str) else value
