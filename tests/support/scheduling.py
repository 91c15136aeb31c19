"""How pytest-xdist divides the tests over processes."""

from fnmatch import fnmatch

from xdist.scheduler import LoadFileScheduling

# Session fixtures launch the cases of several files. `make test` divides the files over two
# processes: those that share launches have to run in one, or both would launch the cases.
FILES_THAT_SHARE_LAUNCHES = {
    "fsdp": "tests/engines/fsdp/*.py",
    "megatron": "tests/engines/test_m*.py",
    "rollout": "tests/rollout/test_rollout*.py",
    "profiling": "tests/profiling/*.py",
}


def group_of(file: str) -> str | None:
    """Return the group of files that share launches with this one, or None."""
    for name, pattern in FILES_THAT_SHARE_LAUNCHES.items():
        if fnmatch(file, pattern):
            return name
    return None


def is_long(file: str) -> bool:
    """Return whether a file belongs to a group that takes minutes.

    Groups go to a process as a whole, so they should begin first: otherwise one process would be
    busy with the last group while the other one has nothing left to do.
    """
    return group_of(file) is not None


class SharedLaunchScheduling(LoadFileScheduling):
    """Gives the tests of a file, or of files that share launches, to one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return group_of(file) or file
