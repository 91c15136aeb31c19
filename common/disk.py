"""Full disks: recognized in errors, and reported in one line with the path and the bytes needed."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from config import InputError

FULL_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file reached the limit of its size (ulimit -f)",
}


@contextmanager
def writing(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Raise InputError if the disk is full in the block, which writes to `path`.

    Args:
        num_bytes: how much the block writes; None if that is unknown.
    """
    try:
        yield
        return
    except Exception as error:
        reason = why_full(error)
        if reason is None:
            raise
    # Raised outside the except clause: with the other error as its context, the InputError would
    # be recognized once more by an enclosing writing().
    needed = f"more than {amount(size(path))}" if num_bytes is None else amount(num_bytes)
    raise InputError(
        f"{reason}: {path} needs {needed}, {amount(free(path))} are free; make room and run the "
        "same command again; nothing that was complete is lost"
    )


def require(path: Path, num_bytes: int) -> None:
    """Raise InputError if there is no room for num_bytes at `path`."""
    with writing(path, num_bytes):
        if num_bytes > free(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def why_full(error: BaseException | None) -> str | None:
    """Return what is full according to an error or one of its causes, None if nothing is."""
    while error is not None:
        reason = FULL_REASONS.get(error_number(error))
        if reason is not None:
            return reason
        error = error.__cause__ or error.__context__
    return None


def error_number(error: BaseException) -> int | None:
    """Return the errno of an error. Errors of safetensors, written in Rust, have it in the text."""
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


def free(path: Path) -> int:
    """Return the free bytes on the disk of a path, which need not exist."""
    existing = next(place for place in (path, *path.parents) if place.exists())
    return shutil.disk_usage(existing).free


def size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a directory."""
    return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())


def amount(num_bytes: int) -> str:
    """Return a number of bytes as text."""
    if num_bytes < 2**20:
        return f"{num_bytes:,} bytes"
    return f"{num_bytes / 2**20:,.1f} MiB"
