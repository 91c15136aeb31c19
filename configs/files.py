"""Read YAML files and key=value pairs."""

from functools import cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

CONFIGS = Path(__file__).resolve().parent
SCRIPTS = ("sft", "ppo")  # train_{script}.py reads configs/{script}.yaml


class InputError(ValueError):
    """A mistake of the user. Scripts print it as one line on rank 0 and exit with code 2."""


def engine_files() -> list[Path]:
    """Return the files with the defaults of the engines, one for each model_engine."""
    return sorted((CONFIGS / "model_engine").glob("*.yaml"))


@cache
def read_defaults(path: Path) -> DictConfig:
    """Return a file of configs/, read once. Callers must not change it."""
    return read(path)


def read(path: Path) -> DictConfig:
    """Return the keys of a YAML file; InputError if there is no such file, or it is not YAML."""
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
    """Return the key of a key=value argument."""
    try:
        return OmegaConf.from_dotlist([argument])
    except YAMLError:
        raise InputError(f"{argument}: the value is not YAML; quote it") from None


def flatten(tree: DictConfig | dict, prefix: str = "") -> dict:
    """Return {"a.b": 1} for {"a": {"b": 1}}.

    An empty group stays as a leaf. Interpolations are not resolved.
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

    OmegaConf would keep it beside the group of that name, where nothing reads it.
    """
    if "." in key:
        group = key.replace(".", ": {")
        closing = "}" * key.count(".")
        raise InputError(
            f"{prefix}{key}: a YAML file has no dots in its keys; write a group, "
            f"{group}: ...{closing}"
        )


def is_free(key: str, known: dict) -> bool:
    """Return whether a key is in a group whose default is {}.

    Another package defines the keys of such a group and checks them.
    """
    return any(value == {} and key.startswith(f"{name}.") for name, value in known.items())
