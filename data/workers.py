"""The processes that tokenize: forks of rank 0, which end when it ends."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from config import die_with

# The id of this process while it forks workers, for die_with_parent().
PARENT_OF_WORKERS: list[int] = []


def die_with_parent() -> None:
    for parent in PARENT_OF_WORKERS:
        die_with(parent)


os.register_at_fork(after_in_child=die_with_parent)


@contextmanager
def forking_workers() -> Iterator[None]:
    """Within this block, make forked processes end when this process ends."""
    # Imported modules hold a million objects, which the workers' garbage collectors would visit
    # again and again. What the caller has frozen stays frozen: Python can only unfreeze
    # everything at once.
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    PARENT_OF_WORKERS.append(os.getpid())
    try:
        yield
    finally:
        PARENT_OF_WORKERS.clear()
        if not was_frozen:
            gc.unfreeze()
