"""Find the functions that the configuration names: built-in ones, or path/to/file.py:name.

A function is called with all inputs by name. It declares only the inputs that it reads and takes
the rest as **_, so it continues to work when new inputs are added. Its own parameters come from a
group of the configuration, such as algorithm.loss_kwargs.
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
from configs.rules import TYPES, has_type


def find(
    key: str,
    name: str,
    known: Mapping[str, Callable],
    inputs: Iterable[str] = (),
    kwargs_key: str = "",
    kwargs: Mapping = {},
) -> Callable:
    """Return the function that a configuration key names, with its own parameters bound.

    Args:
        key: the configuration key.
        name: the value of the key: a name in `known`, or path/to/file.py:name.
        known: the built-in functions, by name.
        inputs: names of the inputs that the function will be called with. Empty if the caller
            checks the signature itself.
        kwargs_key: the group with the function's own parameters, for error messages.
        kwargs: values of the function's own parameters.

    Raises InputError if the name or the file does not exist, if the file cannot be imported, if the
    function lacks a parameter in `kwargs`, or if it cannot be called with `inputs`.
    """
    setting = f"{key}={name}"
    function = known[name] if name in known else import_function(setting, name, known)
    if not inputs:
        return function
    if isinstance(kwargs, DictConfig):
        kwargs = OmegaConf.to_container(kwargs)
    own = parameters(function) - set(inputs)
    for kwarg in kwargs:
        if kwarg not in own:
            own_names = ", ".join(sorted(own)) or "none"
            raise InputError(
                f"{kwargs_key}.{kwarg}: {name} has no parameter {kwarg} of its own (it has "
                f"{own_names})"
            )
    check_types(function, kwargs_key, kwargs)
    try:
        inspect.signature(function).bind(**dict.fromkeys(inputs), **kwargs)
    except TypeError as error:
        source = f"; its own parameters are set in {kwargs_key}" if kwargs_key else ""
        raise InputError(
            f"{setting}: {error}; it is called with {', '.join(inputs)} by name, and must take the "
            f"inputs that it does not read as **_{source}"
        ) from None
    return partial(function, **kwargs) if kwargs else function


def check_types(function: Callable, kwargs_key: str, kwargs: Mapping) -> None:
    """Raise InputError if a parameter annotated as bool, int or float gets another type."""
    annotations = inspect.get_annotations(function)
    for name, value in kwargs.items():
        kind = annotations.get(name)
        if kind in (bool, int, float) and not has_type(value, kind):
            raise InputError(f"{kwargs_key}.{name}={value!r} must be {TYPES[kind][0]}")


def parameters(function: Callable) -> set[str]:
    """Return the names of a function's parameters, except *args and **kwargs."""
    return {
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def import_function(setting: str, name: str, known: Iterable[str]) -> Callable:
    """Import a function that is named as path/to/file.py:name.

    Args:
        setting: "key=value", for the beginning of error messages.
        name: path and name of the function. The path is relative to the working directory.
        known: names of the built-in functions, for suggestions; empty if there are none.
    """
    if ":" not in name and not name.endswith(".py"):
        if not known:
            raise InputError(f"{setting} must be path/to/file.py:name")
        raise InputError(
            f"{setting} must be one of {', '.join(known)}, or path/to/file.py:name; the nearest is "
            f"{nearest(name, known)}"
        )
    if ".py:" not in name and not name.endswith(".py"):
        file, _, name = name.rpartition(":")
        raise InputError(f"{setting} must be path/to/file.py:name; did you mean {file}.py:{name}?")
    path = path_of(name)
    name = name.partition(".py:")[2]
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
        problem = f"{path} has no function {name!r}" if name else f"{path}: name a function"
        raise InputError(f"{setting}: {problem}{hint}")
    return function


def path_of(name: str) -> Path:
    """Return the absolute path of the file in path/to/file.py:name."""
    file = name.partition(".py:")[0]
    return Path(file if file.endswith(".py") else f"{file}.py").expanduser().resolve()


def location(error: BaseException, path: Path) -> str:
    """Return the path, followed by the number of its last line in the traceback, if any."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)


@cache
def import_file(path: Path) -> ModuleType:
    """Import a user's file, once for all keys that name it.

    The file may import its neighbours. Its module name has a prefix, so it cannot hide a built-in
    module.
    """
    spec = importlib.util.spec_from_file_location(f"user_file_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the one of `names` that is most similar to `name`."""
    return difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
