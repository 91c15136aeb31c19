"""Read YAML files and key=value pairs."""

import re
from functools import cache
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from configs.errors import InputError

CONFIGS = Path(__file__).resolve().parent
SCRIPTS = ("rm", "dpo", "sft", "ppo")  # train_{script}.py reads configs/{script}.yaml
KEY_LINE = re.compile(r"( *)(\w+):")
NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
# 0x10 and 0b10 do not match, since their base is intended. Neither does .inf.
DECIMAL_DIGITS = re.compile(r"[-+]?[0-9_.]+(:|[eE]|$)")
DATA_FILE = re.compile(r"\.(jsonl|json|csv|parquet)(\.gz)?$")
# libyaml, which is ten times as fast, where PyYAML has it.
FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
INDENT = 2  # spaces per level in the files of configs/


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
        problems = number_problems(yaml.compose(path.read_text(), FAST_LOADER))
    except OSError as error:
        advice = advice_on_value(path) or "arguments are YAML files or key=value pairs"
        raise InputError(f"{path}: {error.strerror}; {advice}") from None
    except (YAMLError, UnicodeDecodeError) as error:
        problem = advice_on_value(path) or str(error)
        raise InputError(f"{path} is not YAML: {problem}") from None
    if not isinstance(layer, DictConfig):
        raise InputError(f"{path} must hold keys and values")
    if problems:
        raise InputError(*(f"{path}: {problem}" for problem in problems))
    return layer


def advice_on_value(path: Path) -> str:
    """Return how to pass a model's directory or a data file that has no key; otherwise ""."""
    if (path / "config.json").is_file():
        return f"write model.path={path}"
    is_data = DATA_FILE.search(path.name) is not None
    return f"write data.train_files={path}" if is_data else ""


@cache
def read_pair(argument: str) -> DictConfig:
    """Return the key and the value of a key=value argument. Do not change the result.

    Raises InputError if the value is not YAML, or if YAML reads it in an unexpected way: a part of
    it as a comment, or a number in another base.
    """
    key, _, value = argument.partition("=")
    try:
        layer = OmegaConf.from_dotlist([argument])
        node = yaml.compose(value, yaml.SafeLoader)
    except YAMLError:
        raise InputError(
            f"{argument}: the value is not YAML; quote it, '{key}=\"{value}\"'"
        ) from None
    unread = value[node.end_mark.index if node else 0 :].strip()
    if unread:
        raise InputError(
            f"{argument}: {unread} is a comment in YAML; quote the value, '{key}=\"{value}\"'"
        )
    problems = number_problems(node)
    if problems:
        raise InputError(*(f"{argument}: {problem}" for problem in problems))
    return layer


def number_problems(node: yaml.Node | None) -> list[str]:
    """Return a sentence about each number that YAML reads as another one.

    YAML 1.1 reads 010 as 8, in base 8, and 1:30 as 90, in base 60.

    Args:
        node: the parsed text of a value or file. None: an empty one.
    """
    if isinstance(node, yaml.MappingNode):
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    else:
        return scalar_problems(node)
    return [problem for child in children for problem in number_problems(child)]


def scalar_problems(node: yaml.ScalarNode | None) -> list[str]:
    """Return a sentence if this is a number that YAML does not read as decimal, else nothing."""
    is_number = node is not None and node.tag in NUMBER_TAGS
    if not is_number or not DECIMAL_DIGITS.match(node.value):
        return []
    value = yaml.safe_load(node.value)
    try:
        is_decimal = float(node.value) == value
    except ValueError:
        is_decimal = False
    return [] if is_decimal else [f"{node.value} is {value} in YAML; write that, or quote the text"]


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
        check_name(str(key), value, prefix)
        if isinstance(value, dict) and value:
            leaves |= flatten(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def check_name(key: str, value, prefix: str) -> None:
    """Raise InputError for a key that would not be read as the user meant it.

    OmegaConf would store the dotted key optim.lr of a YAML file under this whole name, instead of
    as lr in the group optim, so nothing would read it. YAML reads {a:1} as a key "a:1" without a
    value.
    """
    if ":" in key and value is None:
        name, _, text = key.partition(":")
        raise InputError(
            f"{prefix}{key}: YAML needs a space after the colon; write '{{{name}: {text}}}', "
            "in quotes on a command line"
        )
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
    names = key.split(".")
    groups = (".".join(names[:length]) for length in range(1, len(names)))
    return any(known.get(group) == {} for group in groups)
