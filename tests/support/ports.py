"""Choose ports for processes that a test starts."""

import random
import socket

# The system gives higher ports to outgoing connections, of which one could take a port before the
# test's process listens on it.
PORTS = range(10_000, 30_000)


def unused_port() -> str:
    """Return a TCP port that nobody uses, as a string for MASTER_PORT."""
    generator = random.SystemRandom()  # tests in other processes may have the same seed
    while True:
        port = generator.choice(PORTS)
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
        return str(port)
