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
