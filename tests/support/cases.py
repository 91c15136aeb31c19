"""Worker cases that run only if a selected test needs them.

Starting torchrun and importing an engine takes longer than most cases, so all cases for one
number of ranks share a launch. A test names the cases whose results it judges, and `pytest -k` then
launches those alone:

    @needs((2, "offload"), (2, "dp2"))
    def test_offload(results): ...

    @pytest.mark.parametrize("world, name", case_params(CASES))
    def test_training(results, world, name): ...

In a test's id, spaces of a case's name become underscores: `pytest -k "[2-tp2_full]"`.

The fixture that launches the worker calls selected_cases(request) to learn which cases to run.
A worker whose cases are defined beside their assertions keeps them in a Registry.

Launches of vLLM run all their cases at once. Their tests name launches instead of cases, with
launch_params(LAUNCHES), and the fixture runs selected_launches(request, LAUNCHES).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

# (number of ranks, name of the case)
CaseKey = tuple[int, str]


def needs(*cases: CaseKey) -> pytest.MarkDecorator:
    """Mark a test, or one of its parameter sets, with the cases whose results it reads."""
    return pytest.mark.needs(*cases)


def case_params(
    cases: Iterable[CaseKey],
    references: Callable[[int, str], Iterable[CaseKey]] | None = None,
) -> list:
    """Return parameter sets (number of ranks, name), each of which needs its own case.

    references: returns the further cases that a case is compared with.
    """
    params = []
    for num_ranks, name in cases:
        compared_with = () if references is None else references(num_ranks, name)
        mark = needs((num_ranks, name), *compared_with)
        case_id = id_of(f"{num_ranks}-{name}")
        params.append(pytest.param(num_ranks, name, marks=mark, id=case_id))
    return params


def slow_unless_quick(
    cases: Iterable, is_quick: Callable[[Any], bool], name_of: Callable[[Any], str]
) -> list:
    """Return parameter sets of one case each, of which only the quick ones run in quick tests."""
    params = []
    for case in cases:
        marks = () if is_quick(case) else pytest.mark.slow
        params.append(pytest.param(case, marks=marks, id=name_of(case)))
    return params


def launch_params(launches: dict[str, Any], names: Iterable[str] | None = None) -> list:
    """Return parameter sets (name of a launch), each of which needs only this launch.

    launches: name -> an object with the attribute `ranks`
    names: the launches to return; without names, all
    """
    chosen = launches if names is None else names
    params = []
    for name in chosen:
        mark = needs((launches[name].ranks, name))
        params.append(pytest.param(name, marks=mark, id=id_of(name)))
    return params


def selected_launches(request: pytest.FixtureRequest, launches: dict[str, Any]) -> dict[str, Any]:
    """Return the launches that the selected tests need, in the order of `launches`."""
    selected = set().union(*selected_cases(request).values())
    unknown = selected - launches.keys()
    assert not unknown, f"no launches are named {sorted(unknown)}"
    return {name: launch for name, launch in launches.items() if name in selected}


def id_of(name: str) -> str:
    """Return a test's id for a case: its name without spaces, so that -k can select it."""
    return name.replace(" ", "_")


def selected_cases(request: pytest.FixtureRequest) -> dict[int, list[str]]:
    """Return the cases that the selected tests need, by number of ranks, in the order of the tests.

    Only tests that use the requesting fixture count: two workers may have cases of the same name.
    """
    selected: dict[int, list[str]] = {}
    for item in request.session.items:
        if request.fixturename not in getattr(item, "fixturenames", ()):
            continue
        for mark in item.iter_markers("needs"):
            for num_ranks, name in mark.args:
                names = selected.setdefault(num_ranks, [])
                if name not in names:
                    names.append(name)
    return selected


@dataclass
class Registry:
    """The cases that a worker can run, in the order in which it runs them.

    functions: case -> the function that runs it and returns what the tests judge
    """

    functions: dict[CaseKey, Callable[..., Any]] = field(default_factory=dict)

    def add(self, num_ranks: int, name: str, function: Callable[..., Any]) -> None:
        assert (num_ranks, name) not in self.functions, f"two cases named {name}"
        self.functions[num_ranks, name] = function

    def case(self, *numbers_of_ranks: int) -> Callable[[Callable], Callable]:
        """Decorate a function as a case of its name, for each of these numbers of ranks."""

        def register(function: Callable) -> Callable:
            for num_ranks in numbers_of_ranks:
                self.add(num_ranks, function.__name__, function)
            return function

        return register

    def run(self, num_ranks: int, names: Iterable[str], *arguments) -> dict[str, Any]:
        """Run the named cases and return their results by name.

        arguments: passed to every function
        """
        unknown = [name for name in names if (num_ranks, name) not in self.functions]
        assert not unknown, f"no cases on {num_ranks} ranks are named {unknown}"
        return {
            name: function(*arguments)
            for (ranks, name), function in self.functions.items()
            if ranks == num_ranks and name in names
        }
