"""Worker cases that run only if a selected test needs them.

Starting torchrun and importing an engine takes longer than most cases, so all cases for one
number of ranks share a launch. A test names the cases whose results it judges, and `pytest -k` then
launches those alone:

    @needs((2, "offload"), (2, "dp2"))
    def test_offload(results): ...

    @pytest.mark.parametrize("world, name", case_params(CASES))
    def test_training(results, world, name): ...

The fixture that launches the worker calls selected_cases(request) to learn which cases to run.
"""

from collections.abc import Callable, Iterable

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
        params.append(pytest.param(num_ranks, name, marks=mark, id=f"{num_ranks}-{name}"))
    return params


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
