"""Recognize errors caused by a full disk, and report the path and the bytes needed."""

import errno
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from config import InputError
from configs.environment import has_several_nodes

FULL_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file reached the limit of its size (ulimit -f)",
}


@contextmanager
def writing(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Context manager for writing to `path`: raises InputError if the disk is full.

    Args:
        num_bytes: number of bytes to be written; None if that is unknown.
    """
    try:
        yield
        return
    except Exception as error:
        reason = why_full(error)
        if reason is None:
            raise
    # Raise it outside the except clause. Inside, the original error would become its context, and
    # an enclosing writing() would report the full disk once more.
    if num_bytes is None:
        needed = f"more than {format_bytes(size(path))}"
    else:
        needed = format_bytes(num_bytes)
    # Name the node: at the same path, another node may have its own disk or quota.
    on_node = f" on {socket.gethostname()}" if has_several_nodes() else ""
    raise InputError(
        f"{reason}: {path}{on_node} needs {needed}, {format_bytes(free(path))} are free; make room "
        "and run the same command again; files that were complete are kept"
    )


def require(path: Path, num_bytes: int) -> None:
    """Raise InputError if there is no room for num_bytes at `path`."""
    with writing(path, num_bytes):
        if num_bytes > free(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def replace(path: Path, content: str) -> None:
    """Write a text file, or leave the old one unchanged. Raises InputError if the disk is full."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with writing(path, len(content.encode())):
            temporary.write_text(content)
            temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def why_full(error: BaseException | None) -> str | None:
    """Return which limit caused an error, directly or indirectly; None if the disk is not full."""
    while error is not None:
        reason = FULL_REASONS.get(error_number(error))
        if reason is not None:
            return reason
        error = error.__cause__ or error.__context__
    return None


def error_number(error: BaseException) -> int | None:
    """Return the errno of an error. Errors of safetensors (in Rust) have it only in their text."""
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


def free(path: Path) -> int:
    """Return the number of free bytes on the disk of a path. The path need not exist."""
    existing = next(place for place in (path, *path.parents) if place.exists())
    return shutil.disk_usage(existing).free


def size(path: Path) -> int:
    """Return the size of a file, or the total size of all files in a directory, in bytes."""
    return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())


def format_bytes(num_bytes: int) -> str:
    """Return a readable size: in bytes below 1 MiB, otherwise in MiB."""
    if num_bytes < 2**20:
        return f"{num_bytes:,} bytes"
    return f"{num_bytes / 2**20:,.1f} MiB"
