"""A clock that can be stopped, for the time limits of episodes that continue in the next draw.

It is a file in memory that a worker inherits, so the trainer and its workers read the same time,
and no message is needed to stop it. This module needs only the standard library, because workers
also run in other Python environments.
"""

import os
import struct
import time

LAYOUT = struct.Struct("=d")


class StoppableClock:
    """Counts seconds as time.monotonic() does, except while it is stopped.

    The file has a single number, so that no reader sees half of a change. While the clock runs,
    it is the seconds for which the clock was stopped so far. While it is stopped, it is the time
    that the clock shows, with a minus sign.

    Args:
        file: a descriptor from StoppableClock.make_file(), in any process.
    """

    def __init__(self, file: int):
        self.file = file

    @staticmethod
    def make_file() -> int:
        """Return the file of a new clock, which runs."""
        file = os.memfd_create("clock")
        os.pwrite(file, LAYOUT.pack(0.0), 0)
        return file

    def __call__(self) -> float:
        """Return the time, in seconds."""
        number = self._read()
        return -number if number < 0 else time.monotonic() - number

    def stop(self) -> None:
        """Stop, unless the clock is stopped already."""
        number = self._read()
        if number >= 0:
            self._write(number - time.monotonic())

    def start(self) -> None:
        """Go on from the time at which the clock was stopped, unless it runs already."""
        number = self._read()
        if number < 0:
            self._write(time.monotonic() + number)

    def _read(self) -> float:
        (number,) = LAYOUT.unpack(os.pread(self.file, LAYOUT.size, 0))
        return number

    def _write(self, number: float) -> None:
        os.pwrite(self.file, LAYOUT.pack(number), 0)
