"""Make sure that only one run writes to its directory, and that all nodes see this directory."""

import atexit
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from common import disk
from config import InputError
from engines.parallel.device import gather_values, on_rank0

TOUCH_SECONDS = 5.0  # how often a process touches its lock file
WATCH_SECONDS = 20.0  # how long to wait for another host to touch its lock file
LOOK_SECONDS = 1.0  # how often to look whether it has


class Lock:
    """A lock file, {directory}/.lock, which names the process that writes to the directory.

    The process holds the lock with flock, and touches the file for as long as it lives. On file
    systems without flock, or without flock across hosts, a file that is no longer touched is stale.
    If the file is deleted, the process takes the lock again.
    """

    def __init__(self, directory: Path):
        """Take the lock; raises InputError if another run is writing to the directory."""
        self.path = directory / ".lock"
        self.record = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "token": secrets.token_hex(8),
        }
        self.file = open_file(self.path)
        holder = self._find_holder()
        if holder is not None:
            raise InputError(
                f"output_dir={directory} is in use by process {holder.get('pid')} on "
                f"{holder.get('host')}, since {holder.get('since')}: wait until it ends, or choose "
                "another output_dir"
            )
        self._write_record()
        self.ended = threading.Event()
        atexit.register(self.release)
        threading.Thread(target=self._touch, daemon=True).start()

    def _find_holder(self) -> dict | None:
        """Return the record of the process that holds the lock, or None if it is free.

        If it is free and the file system supports flock, this process holds it from now on.
        """
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            has_flock = True
        except BlockingIOError:
            return self._read_record() or {}
        except OSError:  # the file system has no flock
            has_flock = False
        record = self._read_record()
        if record is None:
            return None
        is_own_host = record.get("host") == socket.gethostname()
        if has_flock and is_own_host:
            return None  # that process is dead, otherwise it would still hold the flock
        return record if self._is_touched() else None

    def _is_touched(self) -> bool:
        """Wait up to WATCH_SECONDS, and return whether a process touches the file."""
        before = self.path.stat().st_mtime_ns
        deadline = time.monotonic() + WATCH_SECONDS
        while time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            if self.path.stat().st_mtime_ns != before:
                return True
        return False

    def _read_record(self) -> dict | None:
        try:
            self.file.seek(0)
            return json.load(self.file)
        except ValueError:  # the file is empty: its last holder has released it
            return None

    def _write_record(self) -> None:
        self.file.seek(0)
        self.file.truncate()
        json.dump(self.record, self.file)
        self.file.flush()

    def _touch(self) -> None:
        while not self.ended.wait(TOUCH_SECONDS):
            # A network file system may not answer for a while, and a disk may be full: try again.
            # A file that release() has closed gives a ValueError.
            with suppress(OSError, ValueError):
                record = self._record_at_path()
                if record == self.record:
                    os.utime(self.path)
                elif record is None:
                    self._take_again()

    def _record_at_path(self) -> dict | None:
        """Return what the lock's file says now. It may have been deleted, or be another run's."""
        try:
            return json.loads(self.path.read_text())
        except (FileNotFoundError, ValueError):
            return None

    def _take_again(self) -> None:
        """Take the lock after its file has been deleted, unless another run has done so."""
        deleted = self.file
        self.file = open_file(self.path)
        deleted.close()
        if self._find_holder() is None and not self.ended.is_set():
            self._write_record()

    def release(self) -> None:
        atexit.unregister(self.release)
        self.ended.set()
        if self._record_at_path() == self.record:
            self.file.truncate(0)
        self.file.close()


def open_file(path: Path) -> TextIO:
    """Open a file for reading and writing. Create it if it does not exist."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+")


def claim(directory: Path) -> Lock | None:
    """Lock the directory until the process ends. Called by all ranks; rank 0 returns the lock.

    Raises InputError if another run is writing to it.
    """
    locks = []

    def lock() -> None:
        with disk.writing(directory):
            locks.append(Lock(directory))

    on_rank0(lock)
    return locks[0] if locks else None


def check_shared(directory: Path, key: str, seconds: float = 10.0) -> None:
    """Raise InputError unless rank 0 can write to the directory and all nodes see its files.

    Otherwise, ranks of other nodes would write their parts of a checkpoint to a different
    directory. Called by all ranks.

    Args:
        key: the configuration key that names the directory.
        seconds: how long to wait for a new file, which a network file system may show late.
    """
    name = f".shared-{secrets.token_hex(8)}"

    def write_marker() -> str:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / name).touch()
        except OSError as error:
            raise InputError(
                f"{key}={directory} cannot be written: {error.strerror}; set {key} to a directory "
                "in which you may write"
            ) from None
        return name

    marker = directory / on_rank0(write_marker)
    deadline = time.monotonic() + seconds
    is_visible = marker.exists()
    while not is_visible and time.monotonic() < deadline:
        time.sleep(0.1)
        is_visible = marker.exists()
    hosts = gather_values(None if is_visible else socket.gethostname())
    if dist.get_rank() == 0:
        marker.unlink()
    blind_hosts = sorted({host for host in hosts if host})
    if blind_hosts:
        raise InputError(
            f"{key}={directory} on {', '.join(blind_hosts)} is not the directory that rank 0 "
            "writes to: choose one on a file system that all nodes share"
        )
