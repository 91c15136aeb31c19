"""Full disks: recognised in errors, and reported in one line with the path and the bytes needed."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from config import InputError

FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file reached the limit of its size (ulimit -f)",
}


@contextmanager
def writing(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Around code that writes num_bytes (None: unknown) to path: raises InputError if the disk is full."""
    try:
        yield
        return
    except Exception as error:
        reason = why_full(error)
        if reason is None:
            raise
    needed = f"more than {amount(size(path))}" if num_bytes is None else amount(num_bytes)
    # Not in the except clause: without the other error as its context it passes through another writing() as it is.
    raise InputError(
        f"{reason}: {path} needs {needed}, {amount(free(path))} are free; make room and run the same command "
        "again, nothing that was complete is lost"
    )


def require(path: Path, num_bytes: int) -> None:
    """Raise InputError if there is no room for num_bytes at path."""
    with writing(path, num_bytes):
        if num_bytes > free(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def why_full(error: BaseException | None) -> str | None:
    """What is full according to this error, or to one that led to it; None if nothing is."""
    while error is not None:
        in_rust = re.search(r"\(os error (\d+)\)", str(error))  # safetensors has no errno
        number = error.errno if isinstance(error, OSError) else in_rust and int(in_rust[1])
        if number in FULL:
            return FULL[number]
        error = error.__cause__ or error.__context__
    return None


def free(path: Path) -> int:
    """Free bytes on the disk of path, which need not exist."""
    return shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free


def size(path: Path) -> int:
    """Bytes of a file, or of all files in a directory."""
    return sum(p.stat().st_size for p in (path, *path.rglob("*")) if p.is_file())


def amount(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes:,} bytes"
