"""How a reward function is called: each of its parameters is bound by its name, never by its place.

The names are ours, verl's or TRL's, or those that reward.kwargs gives to places in the row. A name that is none of these
is an error, since a function that is handed the wrong thing gives a score like any other.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from config import InputError

Value = Callable[
    [str, str, dict], object
]  # (prompt, response, row) -> what a parameter gets for one response
GROUND_TRUTHS = (
    "reward_model.ground_truth",
    "ground_truth",
    "answer",
)  # the first of these that a row has


@dataclass(frozen=True)
class Convention:
    """values: its parameters. lists: each is a list over all responses of a group. columns: any other name is a column
    of the rows. verls: a dictionary that is returned has a "score". said: what to say of it at start."""

    values: dict[str, Value]
    lists: bool = False
    columns: bool = False
    verls: bool = False
    said: str = ""


def conventions(conversation_keys: list[str]) -> dict[str, Convention]:
    """By the name that the response has in each. conversation_keys: the columns in which a prompt may be messages."""

    def messages(row):
        return next((row[key] for key in conversation_keys if isinstance(row.get(key), list)), None)

    def question(prompt, response, row):
        turns = messages(row)
        while turns and turns[-1]["role"] == "assistant":
            turns = turns[:-1]
        return prompt if turns is None else turns

    def completion(prompt, response, row):
        return response if messages(row) is None else [{"role": "assistant", "content": response}]

    def ground_truth(prompt, response, row):
        return at(
            row, next((path for path in GROUND_TRUTHS if path in columns(row)), GROUND_TRUTHS[0])
        )

    ours: dict[str, Value] = {
        "prompt": lambda prompt, response, row: prompt,
        "response": lambda prompt, response, row: response,
        "row": lambda prompt, response, row: row,
    }
    verl: dict[str, Value] = {
        "data_source": lambda prompt, response, row: at(row, "data_source"),
        "solution_str": ours["response"],
        "ground_truth": ground_truth,
        "extra_info": lambda prompt, response, row: row.get("extra_info") or {},
    }
    trl: dict[str, Value] = {"prompts": question, "completions": completion}
    places = f"ground_truth is the row's {', else '.join(GROUND_TRUTHS)}"
    return {
        "response": Convention(ours),
        "responses": Convention(
            plural(ours), lists=True, said="it is given all responses of a group"
        ),
        "solution_str": Convention(verl, verls=True, said=f"it is called as verl does; {places}"),
        "solution_strs": Convention(
            plural(verl),
            lists=True,
            verls=True,
            said=f"it is called as verl does for a batch, which is a group here; {places}",
        ),
        "completions": Convention(
            trl,
            lists=True,
            columns=True,
            said="it is called as TRL does, with a group and the columns of its rows",
        ),
    }


def plural(values: dict[str, Value]) -> dict[str, Value]:
    return {f"{name}s": value for name, value in values.items()}


class Signature:
    """The parameters of a function, bound. Raises InputError for an unknown one.

    kwargs: parameter -> a column of the row, or a place inside one, "reward_model.ground_truth".
    """

    def __init__(self, function: Callable, kwargs: dict[str, str], conversation_keys: list[str]):
        parameters = inspect.signature(function).parameters.values()
        named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
        self.required = [
            p.name
            for p in parameters
            if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        known = conventions(conversation_keys)
        marks = [mark for mark in known if mark in named and mark not in kwargs]
        if len(marks) > 1:
            raise InputError(
                f"it takes {' and '.join(marks)}, which are names for the same thing: leave one out"
            )
        marks = (
            marks
            or [mark for mark in known if set(named) & known[mark].values.keys() - kwargs.keys()]
            or ["response"] * bool(set(named) & kwargs.keys())
        )
        self.convention = known[marks[0]] if marks else Convention({})
        values = self.convention.values | {
            name: lambda prompt, response, row, path=path: at(row, path)
            for name, path in kwargs.items()
        }
        if unused := [name for name in kwargs if name not in named and not takes_all]:
            raise InputError(f"it has no parameter {unused[0]}, which reward.kwargs names")
        self.values = {name: value for name, value in values.items() if name in named or takes_all}
        self.wanted = None if takes_all else set(named)
        self.optional = [name for name in named if name not in self.required]
        positional = [p.name for p in parameters if p.kind == p.POSITIONAL_ONLY]
        unknown = positional or [
            name
            for name in self.required
            if name not in self.values and not self.convention.columns
        ]
        if unknown or not marks:
            problem = (
                f"its parameter {unknown[0]} is not known{f' beside {marks[0]}' if marks else ''}"
                if unknown
                else "it names no parameter that is known"
            )
            raise InputError(
                f"{problem}: it may take prompt, response and row; or prompts, responses and rows, the lists of a "
                "group; or what verl or TRL call theirs; or the places of a row that reward.kwargs names, as in "
                f"reward.kwargs.{unknown[0] if unknown else 'NAME'}=COLUMN"
            )

    def arguments(self, prompts: list[str], responses: list[str], rows: list[dict]) -> dict:
        """For the responses of a call: one, or those of a group. Raises InputError for what a row does not have."""
        triples = list(zip(prompts, responses, rows, strict=True))
        given = {
            name: [value(*triple) for triple in triples] for name, value in self.values.items()
        }
        if self.convention.columns:
            free = (
                rows[0].keys() - given.keys() - {"prompt", "completion", "completion_ids"}
            )  # as TRL leaves out
            given |= {
                name: [row.get(name) for row in rows]
                for name in (free if self.wanted is None else free & self.wanted)
            }
            for name in self.required:
                if name not in given:
                    at(rows[0], name)
        return given if self.convention.lists else {name: value for name, (value,) in given.items()}

    def said(self, given: dict) -> str:
        """What is not plain from its names, in one line; empty when all is."""
        left = [name for name in self.optional if name not in given]
        return "; ".join(
            filter(
                None,
                [self.convention.said, f"{', '.join(left)} stays at its default" if left else ""],
            )
        )


def at(row: dict, path: str):
    """row["a"]["b"] for "a.b". Raises InputError, with what the row has, where there is nothing or None."""
    value = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if value is None:
        raise InputError(
            f"the row has no {path}, only {', '.join(columns(row))}: reward.kwargs.PARAMETER=COLUMN says where "
            "a parameter is to be found"
        )
    return value


def columns(row: dict) -> list[str]:
    """The names that at() takes, down to the second level."""
    return [
        name
        for key, value in row.items()
        if value is not None
        for name in [
            key,
            *(
                f"{key}.{k}"
                for k, v in (value.items() if isinstance(value, dict) else ())
                if v is not None
            ),
        ]
    ]
