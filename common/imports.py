"""Import functions from files and modules of the user. This needs only the standard library."""

import difflib
import importlib.util
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import ModuleType

from configs.errors import InputError


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
    if not path.is_file():
        raise InputError(f"{setting}: {path}: no such file")
    try:
        module = import_file(path)
    except (Exception, SystemExit) as error:
        raise cannot_import(setting, location(error, path), error) from error
    return function_of(setting, module, name.partition(".py:")[2], path)


def import_from_module(setting: str, name: str) -> Callable:
    """Import a function that is named as package.module:name.

    Args:
        setting: "key=value", for the beginning of error messages.
    """
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise cannot_import(setting, module_name, error) from error
    return function_of(setting, module, function_name, Path(module_name))


def cannot_import(setting: str, place: str, error: BaseException) -> InputError:
    return InputError(f"{setting}: {place} cannot be imported: {type(error).__name__}: {error}")


def function_of(setting: str, module: ModuleType, name: str, path: Path) -> Callable:
    """Return a module's function.

    Raises:
        InputError: there is none with this name. The message suggests the nearest.
    """
    function = getattr(module, name, None)
    if callable(function):
        return function
    public = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
    hint = f"; the nearest is {path.name}:{nearest(name, public)}" if public else ""
    problem = f"{path} has no function {name!r}" if name else f"{path}: name a function"
    raise InputError(f"{setting}: {problem}{hint}")


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

    The file may import its neighbours.
    """
    spec = importlib.util.spec_from_file_location(module_name(path), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


def module_name(path: Path) -> str:
    """Return the module name of a user's file, which is the same in every process.

    It has a prefix, so it cannot hide another module, and depends on the whole path, so files of
    the same name in different directories are different modules.
    """
    return f"user_file_{path.stem}_{zlib.crc32(os.fsencode(path)):08x}"


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the one of `names` that is most similar to `name`."""
    return difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
