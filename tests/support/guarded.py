"""Engines without the check that they keep sequences apart, where it would only be repeated."""

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from engines.model import guard

GUARDED: set[Hashable] = set()


@contextmanager
def unguarded() -> Iterator[None]:
    """Within this block, engines skip the check that they keep sequences apart."""
    check = guard.check_isolation
    guard.check_isolation = lambda engine: None
    try:
        yield
    finally:
        guard.check_isolation = check


def guarded_once(*traits: Hashable) -> AbstractContextManager:
    """Return a block whose engines are checked if one of these traits is new in this process.

    The check takes as long as a few steps of training. Every model and every layout passes it once,
    but not every combination of them.
    """
    is_new = not GUARDED.issuperset(traits)
    GUARDED.update(traits)
    return nullcontext() if is_new else unguarded()
