"""Read YAML files and key=value pairs."""

import re
from functools import cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

CONFIGS = Path(__file__).resolve().parent
SCRIPTS = ("sft", "ppo")  # train_{script}.py reads configs/{script}.yaml
KEY_LINE = re.compile(r"( *)(\w+):")
INDENT = 2  # spaces per level in the files of configs/


class InputError(ValueError):
    """Mistakes of the user. Scripts print one line for each and exit with code 2.

    Attributes:
        problems: a sentence about each mistake. Usually there is one.
    """

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


def engine_files() -> list[Path]:
    """Return the files with the defaults of the engines, one for each model_engine."""
    return sorted((CONFIGS / "model_engine").glob("*.yaml"))


@cache
def read_defaults(path: Path) -> DictConfig:
    """Return the keys of a file of configs/, which is read only once. Do not change the result."""
    return read(path)


def read(path: Path) -> DictConfig:
    """Return the keys of a YAML file.

    Raises InputError if the file does not exist, or if it is not a YAML file of keys and values.
    """
    try:
        layer = OmegaConf.load(path)
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}; arguments are YAML files or key=value pairs"
        ) from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not YAML: {error}") from None
    if not isinstance(layer, DictConfig):
        raise InputError(f"{path} must hold keys and values")
    return layer


def read_pair(argument: str) -> DictConfig:
    """Return the key and the value of a key=value argument."""
    try:
        return OmegaConf.from_dotlist([argument])
    except YAMLError:
        raise InputError(f"{argument}: the value is not YAML; quote it") from None


def read_comments(path: Path) -> dict[str, str]:
    """Return the comment of each key in a file of configs/: {"optim.lr": "peak learning rate"}.

    Comment lines directly below a key continue its comment.
    """
    comments: dict[str, str] = {}
    parents: list[str] = []
    key = None
    for line in path.read_text().splitlines():
        code, _, comment = line.partition("# ")
        match = KEY_LINE.match(code)
        if match:
            indent, name = match.groups()
            parents[len(indent) // INDENT :] = [name]
            key = ".".join(parents)
            comments[key] = comment
        elif key and code and code.isspace():
            comments[key] += f" {comment}"
        else:
            key = None
    return comments


def flatten(tree: DictConfig | dict, prefix: str = "") -> dict:
    """Return the leaves of a tree of keys: {"a.b": 1} for {"a": {"b": 1}}.

    An empty group counts as a leaf. Interpolations are not resolved.
    """
    if isinstance(tree, DictConfig):
        tree = OmegaConf.to_container(tree, resolve=False)
    leaves = {}
    for key, value in tree.items():
        check_no_dots(str(key), prefix)
        if isinstance(value, dict) and value:
            leaves |= flatten(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def check_no_dots(key: str, prefix: str) -> None:
    """Raise InputError for a dotted key in a YAML file.

    OmegaConf would store it as a key of its own, which nothing reads, and not in the group.
    """
    if "." in key:
        group = key.replace(".", ": {")
        closing = "}" * key.count(".")
        raise InputError(
            f"{prefix}{key}: keys of a YAML file cannot contain dots; write a group, "
            f"{group}: ...{closing}"
        )


def is_free(key: str, known: dict) -> bool:
    """Return whether a key is in a group whose default is {}.

    Other code defines and checks the keys of such a free group.
    """
    return any(value == {} and key.startswith(f"{name}.") for name, value in known.items())
