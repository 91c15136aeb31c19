"""Show failures at once, keep `make quick` free of torchrun, and launch no case twice."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.support.launch import QuickGuard


class ShowFailures:
    """Prints a failure when it happens.

    Pytest prints failures at its end, which a run that is stopped by a time limit never reaches.
    """

    def __init__(self, config: pytest.Config):
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            reporter = self.config.pluginmanager.get_plugin("terminalreporter")
            reporter.write_line(f"\n{report.nodeid} ({report.when})\n{report.longreprtext}")


def pytest_configure(config: pytest.Config) -> None:
    # Threads would mostly wait for each other: tensors are small, and several tests run at once.
    # Torch reads this when it is imported, which is later.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Imports make no garbage, but millions of objects, through which the collector would look again
    # and again: first while tests are collected, and then in each of them.
    gc.disable()
    gc.set_threshold(20_000, 20, 20)
    load_hypothesis_profile()
    is_worker = hasattr(config, "workerinput")
    if is_worker:
        # The last thing that happens at exit. Nobody reads a worker's exit code, and Python would
        # take seconds to delete all objects.
        atexit.register(os._exit, 0)
    else:
        atexit.register(gc.unfreeze)  # otherwise extensions would report leaks
        config.pluginmanager.register(ShowFailures(config))


def load_hypothesis_profile() -> None:
    """Let tests over generated inputs take as long as they need: a busy machine is no failure."""
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("patient")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from tests.support.lengthy import LENGTHY, mark_lengthy
    from tests.support.scheduling import start_order
    from tests.support.tables import unused_entries
    from tests.support.thorough import THOROUGH, mark_thorough

    if config.args == ["tests"]:
        test_ids = [item.nodeid for item in items]
        unused = [*unused_entries(test_ids, THOROUGH), *unused_entries(test_ids, LENGTHY)]
        assert not unused, f"tests/support/thorough.py or lengthy.py name no test: {unused}"
    mark_thorough(items)
    mark_lengthy(items)
    items.sort(key=lambda item: start_order(item.nodeid.partition("::")[0]))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    # After this hook pytest collects garbage five times, which would take ten seconds with all
    # objects of all packages. Some test may have undone the first gc.freeze().
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    QuickGuard.item = item if is_quick(item.config) else None


def is_quick(config: pytest.Config) -> bool:
    """Return whether slow tests are left out, as by `make quick`."""
    return "not slow" in config.option.markexpr


@pytest.fixture(scope="module", autouse=True)
def forget_meshes() -> None:
    """Clear DTensor's cache, which could return a mesh of another module's process group."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Restore this process's signal handlers, which an Agreement replaces.

    An Agreement leaves ignored signals alone, and a shell's background jobs ignore Ctrl-C.
    """
    from job.signals import STOPPING

    handlers = {number: signal.getsignal(number) for number in STOPPING}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    from tests.support.scheduling import QuickScheduling, SharedLaunchScheduling

    scheduling = QuickScheduling if is_quick(config) else SharedLaunchScheduling
    return scheduling(config, log)
