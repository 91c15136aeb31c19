"""Functions that the configuration names: one of ours, or path/to/file.py:name from a file of yours.

Ours are called by name and take **_, so a function of yours names only the arguments that it reads, and goes on working
when there are more of them. Its parameters of its own come from a free group of the configuration, e.g.
algorithm.loss_kwargs.
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
    """The function that the configuration's `key` names: known[name], or path/to/file.py:name with its kwargs bound.

    given: the arguments that it will be called with, by name; empty: the caller checks the signature.
    Raises InputError when there is no such name or file, when the file cannot be imported, when the function has no
    parameter of the name of a kwarg, and when it cannot be called with `given`.
    """
    said = f"{key}={name}"
    function = known[name] if name in known else import_function(said, name, known)
    if not given:
        return function
    kwargs = OmegaConf.to_container(kwargs) if isinstance(kwargs, DictConfig) else kwargs
    own = parameters(function) - set(given)
    for kwarg in kwargs:
        if kwarg not in own:
            raise InputError(
                f"{kwargs_key}.{kwarg}: {name} has no such parameter of its own, "
                + (f"only {', '.join(sorted(own))}" if own else "nor any other")
            )
    try:
        inspect.signature(function).bind(**dict.fromkeys(given), **kwargs)
    except TypeError as error:
        raise InputError(
            f"{said}: {error}; it is called with {', '.join(given)} by name, and needs **_ for those that it "
            f"does not read{f'; {kwargs_key} has the rest' if kwargs_key else ''}"
        ) from None
    return partial(function, **kwargs) if kwargs else function


def parameters(function: Callable) -> set[str]:
    """What a function's signature names; *_ and **_ name nothing."""
    return {
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }


def import_function(said: str, name: str, known: Iterable[str]) -> Callable:
    """`name` is path/to/file.py:function, relative to the working directory; `said` (key=value) begins an error."""
    if ":" not in name and not name.endswith(".py"):
        raise InputError(
            f"{said} must be one of {', '.join(known)}, or path/to/file.py:name; the nearest is "
            f"{nearest(name, known)}"
        )
    file, _, name = name.partition(".py:")
    path = Path(file if file.endswith(".py") else f"{file}.py").expanduser().resolve()
    if not path.is_file():
        raise InputError(f"{said}: {path}: no such file")
    try:
        module = import_file(path)
    except (Exception, SystemExit) as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        ]
        place = f"{path}:{lines[-1]}" if lines else str(path)
        raise InputError(
            f"{said}: {place} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    functions = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
    if not callable(getattr(module, name, None)):
        example = f"; the nearest is {path.name}:{nearest(name, functions)}" if functions else ""
        raise InputError(f"{said}: {path} has no function {name!r}{example}")
    return getattr(module, name)


@cache
def import_file(path: Path) -> ModuleType:
    """The module of a file, which may import its neighbours; once for all keys that name it. Its name is not that of a
    file of ours."""
    spec = importlib.util.spec_from_file_location(f"user_file_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


def nearest(name: str, names: Iterable[str]) -> str:
    return difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
