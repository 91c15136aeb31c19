"""Functions that the configuration names: built-in ones, or path/to/file.py:name.

A function is called with all its inputs by name. It names only those that it reads and takes the
others as **_, so it continues to work when new inputs are added. Its own parameters come from a
free group of the configuration, such as algorithm.loss_kwargs.
"""

import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from types import ModuleType

from omegaconf import DictConfig, OmegaConf

from config import InputError


def find(
    key: str,
    name: str,
    known: Mapping[str, Callable],
    given: Iterable[str] = (),
    kwargs_key: str = "",
    kwargs: Mapping = {},
) -> Callable:
    """Return the function that a configuration key names, with its own parameters bound.

    Args:
        key: the configuration key.
        name: its value: a key of `known`, or path/to/file.py:name.
        known: the built-in functions.
        given: names of the inputs that the function will be called with. Empty if the caller checks
            the signature itself.
        kwargs_key: the free group with the function's own parameters, for error messages.
        kwargs: the function's own parameters.

    Raises InputError if there is no such name or file, if the file cannot be imported, if a
    parameter in `kwargs` does not exist, and if the function cannot be called with `given`.
    """
    setting = f"{key}={name}"
    function = known[name] if name in known else import_function(setting, name, known)
    if not given:
        return function
    if isinstance(kwargs, DictConfig):
        kwargs = OmegaConf.to_container(kwargs)
    own = parameters(function) - set(given)
    for kwarg in kwargs:
        if kwarg not in own:
            alternatives = f"only {', '.join(sorted(own))}" if own else "nor any other"
            raise InputError(
                f"{kwargs_key}.{kwarg}: {name} has no such parameter of its own, {alternatives}"
            )
    try:
        inspect.signature(function).bind(**dict.fromkeys(given), **kwargs)
    except TypeError as error:
        rest = f"; {kwargs_key} has the rest" if kwargs_key else ""
        raise InputError(
            f"{setting}: {error}; it is called with {', '.join(given)} by name, and needs **_ for "
            f"those that it does not read{rest}"
        ) from None
    return partial(function, **kwargs) if kwargs else function


def parameters(function: Callable) -> set[str]:
    """Return the parameters that a function names, without *args and **kwargs."""
    return {
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def import_function(setting: str, name: str, known: Iterable[str]) -> Callable:
    """Return the function path/to/file.py:name.

    Args:
        setting: key=value, with which an error message begins.
        name: the function; its path is relative to the working directory.
        known: the built-in functions.
    """
    if ":" not in name and not name.endswith(".py"):
        raise InputError(
            f"{setting} must be one of {', '.join(known)}, or path/to/file.py:name; the nearest is "
            f"{nearest(name, known)}"
        )
    file, _, name = name.partition(".py:")
    path = Path(file if file.endswith(".py") else f"{file}.py").expanduser().resolve()
    if not path.is_file():
        raise InputError(f"{setting}: {path}: no such file")
    try:
        module = import_file(path)
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{setting}: {location(error, path)} cannot be imported: {type(error).__name__}: "
            f"{error}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        public = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        hint = f"; the nearest is {path.name}:{nearest(name, public)}" if public else ""
        raise InputError(f"{setting}: {path} has no function {name!r}{hint}")
    return function


def location(error: BaseException, path: Path) -> str:
    """Return the file and, if the error came from it, the last line of it that was running."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)


@cache
def import_file(path: Path) -> ModuleType:
    """Return the module of a user's file, imported once for all keys that name it.

    The file may import its neighbors. Its own module name cannot hide a built-in module.
    """
    spec = importlib.util.spec_from_file_location(f"user_file_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the most similar of these names."""
    return difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
