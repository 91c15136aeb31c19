"""Show failures at once, keep `make quick` free of torchrun, and launch no case twice."""

import pytest

from tests.support.launch import ROOT, QuickGuard

# Session fixtures that launch cases for several files. `make test` divides the tests over two
# processes: those of one fixture have to run in one process, or both would launch the cases.
LAUNCHING_FIXTURES = ("megatron_folder", "rollout_folder")
# The same, for a folder all of whose files share one fixture.
LAUNCHING_FOLDER = ROOT / "tests" / "engines" / "fsdp"


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
    is_worker = hasattr(config, "workerinput")
    if not is_worker:
        config.pluginmanager.register(ShowFailures(config))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    is_quick_run = "not slow" in item.config.option.markexpr
    QuickGuard.item = item if is_quick_run else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tell pytest-xdist (--dist loadgroup) which tests have to run in one process."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))


def group_of(item: pytest.Item) -> str:
    if LAUNCHING_FOLDER in item.path.parents:
        return LAUNCHING_FOLDER.name
    for fixture in LAUNCHING_FIXTURES:
        if fixture in getattr(item, "fixturenames", ()):
            return fixture
    return str(item.path.relative_to(ROOT))
