"""Notes of a worker about the call whose code it runs, which its parent reads when it has ended.

This module needs only the standard library, because workers also run in other Python environments.
"""

import os
import struct
import time
from dataclasses import dataclass

LAYOUT = struct.Struct("=qd")


@dataclass(frozen=True)
class Note:
    """A note.

    Attributes:
        call: the number of the call whose code runs, or 0 if the worker waits.
        since: when this began, by time.monotonic(), which is the same clock in all processes.
    """

    call: int = 0
    since: float = 0.0

    @staticmethod
    def read(file: int) -> "Note":
        """Return the note in a file; a note without a call if the file is empty."""
        content = os.pread(file, LAYOUT.size, 0)
        return Note(*LAYOUT.unpack(content)) if content else Note()


def write_note(file: int, call: int) -> None:
    """Note the call whose code runs from now on, or 0."""
    os.pwrite(file, LAYOUT.pack(call, time.monotonic()), 0)
