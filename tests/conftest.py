class Failures:
    """Shows a failure when it happens: pytest does so at its end, which a run that is stopped does not reach."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        if report.failed:
            reporter = self.config.pluginmanager.get_plugin("terminalreporter")
            reporter.write_line(f"\n{report.nodeid} ({report.when})\n{report.longreprtext}")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(config))
