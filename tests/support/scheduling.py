"""How pytest-xdist divides the tests over processes."""

from fnmatch import fnmatch

from xdist.scheduler import LoadFileScheduling

# Session fixtures launch the cases of several files. `make test` divides the files over two
# processes: those that share launches have to run in one, or both would launch the cases.
FILES_THAT_SHARE_LAUNCHES = {
    "fsdp": ("tests/engines/fsdp/*.py",),
    "megatron": ("tests/engines/test_m*.py", "tests/engines/test_routing_replay.py"),
    "rollout": ("tests/rollout/test_rollout*.py",),
    "profiling": ("tests/profiling/*.py",),
}
# Other files that take more than half a minute, the longest first.
LONG_FILES = (
    "tests/job/test_sft.py",
    "tests/rl/test_train_ppo.py",
    "tests/rl/test_distillation.py",
    "tests/preferences/test_train_dpo.py",
    "tests/reward_models/test_train_rm.py",
    "tests/rl/test_reward_model.py",
    "tests/data/test_images.py",
    "tests/engines/test_low_precision.py",
    "tests/rollout/test_adapters.py",
    "tests/rollout/test_speculation.py",
    "tests/rollout/test_episode_gateway.py",
    "tests/rollout/test_routes.py",
    "tests/rl/test_partial_runs.py",
    "tests/rollout/test_partial_reference.py",
    "tests/rl/test_episode_runs.py",
    "tests/rl/test_killed_runs.py",
    "tests/rl/test_partial_episode_runs.py",
    "tests/rl/test_routing_replay.py",
    "tests/repository/test_docs_runs.py",
    "tests/repository/test_examples.py",
    "tests/repository/test_benchmarks.py",
    "tests/job/test_output.py",
)


def group_of(file: str) -> str | None:
    """Return the group of files that share launches with this one, or None."""
    for name, patterns in FILES_THAT_SHARE_LAUNCHES.items():
        if any(fnmatch(file, pattern) for pattern in patterns):
            return name
    return None


def start_order(file: str) -> int:
    """Return a number by which files are sorted, those that take longest first.

    A file goes to a process as a whole, and so does a group. If a long one began last, one process
    would be busy with it while the other one has nothing left to do.
    """
    if group_of(file) is not None:
        return 0
    if file in LONG_FILES:
        return 1 + LONG_FILES.index(file)
    return 1 + len(LONG_FILES)


class QuickScheduling(LoadFileScheduling):
    """Gives the tests of rollout/ to one process, those of engines/ to one, and others by file.

    To import vLLM or megatron-core takes longer than most files, so one process does it for all.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        room = file.split("/")[1]
        return room if room in ("rollout", "engines") else file


class SharedLaunchScheduling(LoadFileScheduling):
    """Gives the tests of a file, or of files that share launches, to one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return group_of(file) or file
