"""Find the functions that the configuration names: built-in ones, or path/to/file.py:name.

A function is called with all inputs by name. It declares only the inputs that it reads and takes
the rest as **_, so it continues to work when new inputs are added. Its own parameters come from a
group of the configuration, such as algorithm.loss_kwargs.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from common.imports import import_function
from configs.errors import InputError
from configs.rules import TYPES
from configs.values import has_type


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
    # Imported here, so that reward processes, which do not need it, start sooner.
    from omegaconf import DictConfig, OmegaConf

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
    if name in known:
        check_all_set(setting, function, own, kwargs_key, kwargs)
    try:
        inspect.signature(function).bind(**dict.fromkeys(inputs), **kwargs)
    except TypeError as error:
        source = f"; its own parameters are set in {kwargs_key}" if kwargs_key else ""
        raise InputError(
            f"{setting}: {error}; it is called with {', '.join(inputs)} by name, and must take the "
            f"inputs that it does not read as **_{source}"
        ) from None
    return partial(function, **kwargs) if kwargs else function


def check_all_set(
    setting: str, function: Callable, own: set[str], kwargs_key: str, kwargs: Mapping
) -> None:
    """Raise InputError if one of a function's own parameters has neither a default nor a value."""
    for name, parameter in inspect.signature(function).parameters.items():
        has_default = parameter.default is not inspect.Parameter.empty
        if name in own and name not in kwargs and not has_default:
            raise InputError(f"{setting} needs its parameter {name}: set {kwargs_key}.{name}")


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


def inputs_of_one_kind(key: str, name: str, reads: set[str], kinds: Mapping[str, set[str]]) -> str:
    """Return the kind of inputs that a function reads.

    Args:
        key, name: the configuration key and its value, for error messages.
        reads: the names of the function's arguments.
        kinds: kind -> the names of its inputs.

    Raises:
        InputError: it reads inputs of several kinds, or of none.
    """
    read_kinds = [kind for kind, names in kinds.items() if reads & names]
    if len(read_kinds) != 1:
        choices = [f"{kind} ({', '.join(sorted(names))})" for kind, names in kinds.items()]
        raise InputError(
            f"{key}={name} must read either {' or '.join(choices)}; it reads "
            f"{', '.join(sorted(reads)) or 'nothing'}"
        )
    return read_kinds[0]
