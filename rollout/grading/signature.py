"""Bind the parameters of a reward function by name, never by position.

A name is one of rankwise's, verl's or TRL's, or reward.kwargs binds it to a value in the row. Any
other name is an error, since a function with a wrong argument would still return a score.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

from configs.errors import InputError

# (prompt, response, row) -> the argument for one response
Value = Callable[[str, str, dict], object]
# For functions written for verl, the first of these paths that a row has is the ground truth.
GROUND_TRUTHS = ("reward_model.ground_truth", "ground_truth", "answer")
# A column that functions of rankwise's convention may take as a parameter without reward.kwargs.
# If the parameter has a default, it keeps it for rows without an answer.
ANSWER = "answer"
# Columns that TRL does not pass on to reward functions.
NOT_PASSED_BY_TRL = {"prompt", "completion", "completion_ids"}


@dataclass(frozen=True)
class Convention:
    """One way of calling reward functions.

    Attributes:
        response_name: the name of the parameter that gets the response.
        values: parameter -> function that computes its argument.
        takes_groups: whether each argument is a list with one entry per response of a group.
        takes_columns: whether all other parameters are columns of the rows.
        is_verl: whether the function may return a dictionary with a "score", and with texts that
            are meant for people.
        notice: a description for the user, if the convention is not obvious.
    """

    response_name: str = ""
    values: dict[str, Value] = field(default_factory=dict)
    takes_groups: bool = False
    takes_columns: bool = False
    is_verl: bool = False
    notice: str = ""


OURS: dict[str, Value] = {
    "prompt": lambda prompt, response, row: prompt,
    "response": lambda prompt, response, row: response,
    "row": lambda prompt, response, row: row,
}
VERL: dict[str, Value] = {
    "data_source": lambda prompt, response, row: value_at(row, "data_source"),
    "solution_str": lambda prompt, response, row: response,
    "ground_truth": lambda prompt, response, row: ground_truth(row),
    "extra_info": lambda prompt, response, row: row.get("extra_info") or {},
}


def ground_truth(row: dict):
    available = paths_in(row)
    path = next((path for path in GROUND_TRUTHS if path in available), GROUND_TRUTHS[0])
    return value_at(row, path)


def trl_values(conversation_keys: list[str]) -> dict[str, Value]:
    """Return TRL's parameters: lists of messages if the row's prompt is a list, else strings."""

    def messages_of(row: dict) -> list[dict] | None:
        candidates = (row.get(key) for key in conversation_keys)
        return next((value for value in candidates if isinstance(value, list)), None)

    def prompt_of(prompt: str, response: str, row: dict):
        messages = messages_of(row)
        if messages is None:
            return prompt
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        return messages

    def completion_of(prompt: str, response: str, row: dict):
        if messages_of(row) is None:
            return response
        return [{"role": "assistant", "content": response}]

    return {"prompts": prompt_of, "completions": completion_of}


def conventions(conversation_keys: list[str]) -> dict[str, Convention]:
    """Return the conventions, by the name of the parameter that gets the response.

    Args:
        conversation_keys: columns in which a prompt may be a list of messages.
    """
    source = f"ground_truth is the row's {', else '.join(GROUND_TRUTHS)}"
    known = [
        Convention("response", OURS),
        Convention(
            "responses", plural(OURS), takes_groups=True, notice="it gets all responses of a group"
        ),
        Convention(
            "solution_str", VERL, is_verl=True, notice=f"it is called as verl does; {source}"
        ),
        Convention(
            "solution_strs",
            plural(VERL),
            takes_groups=True,
            is_verl=True,
            notice=f"it is called as verl does for a batch, which is a group here; {source}",
        ),
        Convention(
            "completions",
            trl_values(conversation_keys),
            takes_groups=True,
            takes_columns=True,
            notice="it is called as TRL does, with a group and the columns of its rows",
        ),
    ]
    return {convention.response_name: convention for convention in known}


def plural(values: dict[str, Value]) -> dict[str, Value]:
    return {f"{name}s": value for name, value in values.items()}


class Signature:
    """The parameters of a reward function, bound by name.

    Args:
        kwargs: parameter -> a column, or a path in one, such as "reward_model.ground_truth".
        conversation_keys: columns in which a prompt may be a list of messages.

    Raises:
        InputError: the function has an unknown parameter, or lacks a parameter in kwargs.
    """

    def __init__(self, function: Callable, kwargs: dict[str, str], conversation_keys: list[str]):
        parameters = list(inspect.signature(function).parameters.values())
        by_name = [
            p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        self.takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
        self.names = set(by_name)
        self.required = [p.name for p in parameters if is_required(p)]
        self.optional = [name for name in by_name if name not in self.required]
        convention = find_convention(by_name, kwargs, conventions(conversation_keys))
        self.convention = convention or Convention()
        self.values = self._bind(kwargs)
        self.may_be_missing = {ANSWER}.intersection(self.optional) - kwargs.keys()
        positional_only = [p.name for p in parameters if p.kind == p.POSITIONAL_ONLY]
        self._check_known(positional_only, convention is not None)

    def _bind(self, kwargs: dict[str, str]) -> dict[str, Value]:
        for name in kwargs:
            if name not in self.names and not self.takes_all:
                names = ", ".join(sorted(self.names)) or "none"
                raise InputError(
                    f"it has no parameter {name}, but reward.kwargs sets it; it has {names}"
                )
        values = dict(self.convention.values)
        if self.convention.values is OURS and ANSWER in self.names:
            values[ANSWER] = value_reader(ANSWER)
        for name, path in kwargs.items():
            values[name] = value_reader(path, name)
        return {
            name: value for name, value in values.items() if name in self.names or self.takes_all
        }

    def _check_known(self, positional_only: list[str], has_convention: bool) -> None:
        unbound = [name for name in self.required if name not in self.values]
        unknown = positional_only or ([] if self.convention.takes_columns else unbound)
        if has_convention and not unknown:
            return
        problem = "it has no known parameter"
        if unknown:
            problem = f"its parameter {unknown[0]} is unknown"
            if has_convention:
                problem += f" in a function that takes {self.convention.response_name}"
        example = unknown[0] if unknown else "NAME"
        raise InputError(
            f"{problem}: it may take prompt, response and row; or prompts, responses and rows, "
            "which are lists over a group; or the parameters of verl's or TRL's reward functions; "
            f"or values in the row, which you set with reward.kwargs.{example}=COLUMN"
        )

    def arguments(self, prompts: list[str], responses: list[str], rows: list[dict]) -> dict:
        """Return the arguments of a call for one response, or for all responses of a group.

        Raises:
            InputError: a row lacks a value for one of the function's parameters.
        """
        samples = list(zip(prompts, responses, rows, strict=True))
        arguments: dict[str, list] = {}
        for name, value in self.values.items():
            if name in self.may_be_missing and rows[0].get(name) is None:
                continue
            arguments[name] = [value(*sample) for sample in samples]
        if self.convention.takes_columns:
            self._add_columns(arguments, rows)
        if self.convention.takes_groups:
            return arguments
        return {name: value for name, (value,) in arguments.items()}

    def _add_columns(self, arguments: dict[str, list], rows: list[dict]) -> None:
        columns = rows[0].keys() - arguments.keys() - NOT_PASSED_BY_TRL
        if not self.takes_all:
            columns &= self.names
        for name in columns:
            arguments[name] = [row.get(name) for row in rows]
        for name in self.required:
            if name not in arguments:
                value_at(rows[0], name)  # raises the error that names the row's columns

    def notice(self, arguments: dict, columns: set[str]) -> str:
        """Return a one-line notice about how the function is called, or "".

        Args:
            arguments: for the first row.
            columns: the columns that have a value in any row.

        Raises:
            InputError: rows have a column named like a parameter that does not get it.
        """
        bound = arguments.keys() | (self.may_be_missing & columns)
        at_default = [name for name in self.optional if name not in bound]
        self._check_columns(at_default, columns)
        notices = [self.convention.notice]
        if at_default:
            notices.append(f"{', '.join(at_default)} keeps its default")
        return "; ".join(filter(None, notices))

    def _check_columns(self, at_default: list[str], columns: set[str]) -> None:
        """Raise InputError if rows have a column for a parameter that keeps its default.

        verl and TRL would not pass these columns either, so their functions may have such
        parameters.
        """
        if self.convention.is_verl or self.convention.takes_columns:
            return
        for name in at_default:
            if name in columns:
                raise InputError(
                    f"its parameter {name} would keep its default, although rows have a column "
                    f"of this name: set reward.kwargs.{name}={name} if all rows have the column, "
                    f'take row and read row.get("{name}"), or rename the parameter'
                )


def is_required(parameter: inspect.Parameter) -> bool:
    is_variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    return parameter.default is parameter.empty and not is_variadic


def find_convention(
    names: list[str], kwargs: dict[str, str], known: dict[str, Convention]
) -> Convention | None:
    """Return the convention of a function with these parameters, or None.

    This is the convention whose name for the response is a parameter of the function. If there is
    none, it is the first convention that has any parameter in common with the function, or
    rankwise's own if reward.kwargs sets a parameter.

    Raises:
        InputError: two parameters are names for the response.
    """
    own_names = [name for name in known if name in names and name not in kwargs]
    if len(own_names) > 1:
        raise InputError(
            f"it takes {' and '.join(own_names)}, which are names for the same argument: remove one"
        )
    if own_names:
        return known[own_names[0]]
    for convention in known.values():
        if set(names) & (convention.values.keys() - kwargs.keys()):
            return convention
    if set(names) & kwargs.keys():
        return known["response"]
    return None


def value_reader(path: str, parameter: str | None = None) -> Value:
    return lambda prompt, response, row: value_at(row, path, parameter)


def value_at(row: dict, path: str, parameter: str | None = None):
    """Return row["a"]["b"] for "a.b".

    Args:
        parameter: the parameter of the function that gets the value, if not the path's last name.

    Raises:
        InputError: the row has no such value, or it is None. The message lists the row's paths.
    """
    value = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if value is None:
        parameter = parameter or path.rpartition(".")[2]
        raise InputError(
            f"the row has no {path}, only {', '.join(paths_in(row))}: set "
            f"reward.kwargs.{parameter}=COLUMN to take it from another column, such as "
            "reward_model.ground_truth"
        )
    return value


def paths_in(row: dict) -> list[str]:
    """Return the paths that value_at() accepts for this row, down to the second level."""
    paths = []
    for key, value in row.items():
        if value is None:
            continue
        paths.append(key)
        if isinstance(value, dict):
            paths += [f"{key}.{inner}" for inner in value if value[inner] is not None]
    return paths
