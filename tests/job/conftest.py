"""Fixtures of the tests in this room."""

import signal

import pytest

HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


@pytest.fixture
def own_signals():
    """Restore this process's signal handlers, which an Agreement replaces."""
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
