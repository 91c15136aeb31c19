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


class SharedLaunchScheduling(LoadFileScheduling):
    """Gives the tests of a file, or of files that share launches, to one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        for name, pattern in FILES_THAT_SHARE_LAUNCHES.items():
            if fnmatch(file, pattern):
                return name
        return file
