"""Tables of tests: which tests of which cases get a mark."""

from collections.abc import Iterable
from fnmatch import fnmatchcase


def entry_of(test_id: str, table: dict[str, Iterable[str] | None]) -> tuple[str, str] | None:
    """Return the entry of a test, such as tests/a/test_b.py::test_c[case], and its case.

    Args:
        table: test, or a pattern -> the cases, as they stand in brackets after its name; None: all.
    """
    name, _, case = test_id.partition("[")
    case = case.removesuffix("]")
    for pattern, cases in table.items():
        if fnmatchcase(name, pattern) and (cases is None or case in cases):
            return pattern, case
    return None


def unused_entries(test_ids: Iterable[str], table: dict[str, Iterable[str] | None]) -> list[str]:
    """Return the entries, and the cases of entries, that none of these tests has.

    Args:
        table: as for entry_of().
    """
    cases_of: dict[str, set[str]] = {}
    for test_id in test_ids:
        name, _, case = test_id.partition("[")
        cases_of.setdefault(name, set()).add(case.removesuffix("]"))
    unused = []
    for pattern, cases in table.items():
        matching = [name for name in cases_of if fnmatchcase(name, pattern)]
        existing_cases = set().union(*(cases_of[name] for name in matching))
        if not matching:
            unused.append(pattern)
        unused += [f"{pattern}[{case}]" for case in cases or () if case not in existing_cases]
    return unused
