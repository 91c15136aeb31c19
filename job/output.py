"""A run's directory: written by one run at a time, and the same directory on every node."""

import atexit
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path

import torch.distributed as dist

from common import disk
from config import InputError
from engines.parallel.device import on_rank0

TOUCH_SECONDS = 5.0  # between two signs of life in the lock file
WATCH_SECONDS = 20.0  # how long a lock of another host is watched for one


class Lock:
    """{directory}/.lock names the process that writes there, and is touched while it lives.

    flock holds it where the file system has such locks for all hosts. Where it has them for one host alone, or none, a file
    that nobody touches is a lock left behind.
    """

    def __init__(self, directory: Path):
        """Raises InputError where another run is writing."""
        self.path, self.ended = directory / ".lock", threading.Event()
        self.file = open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644), "r+")
        holder = self._holder()
        if holder is not None:
            raise InputError(
                f"output_dir={directory} is in use by process {holder.get('pid')} on {holder.get('host')}, since "
                f"{holder.get('since')}: wait until it ends, or give another output_dir"
            )
        self.file.seek(0)
        self.file.truncate()
        json.dump(
            {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            },
            self.file,
        )
        self.file.flush()
        atexit.register(self.release)
        threading.Thread(target=self._touch, daemon=True).start()

    def _holder(self) -> dict | None:
        """Who has the lock; None: nobody does, and if the file system can, this process has it from now on."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except BlockingIOError:
            return self._record() or {}
        except OSError:  # a file system without locks
            locked = False
        record = self._record()
        if record is None:
            return None
        if locked and record.get("host") == socket.gethostname():
            return None
        before, end = self.path.stat().st_mtime_ns, time.monotonic() + WATCH_SECONDS
        while time.monotonic() < end:
            time.sleep(1)
            if os.stat(self.path).st_mtime_ns != before:
                return record
        return None

    def _record(self) -> dict | None:
        try:
            self.file.seek(0)
            return json.load(self.file)
        except ValueError:  # empty: its run has ended as it should
            return None

    def _touch(self) -> None:
        while not self.ended.wait(TOUCH_SECONDS):
            os.utime(self.path)

    def release(self) -> None:
        atexit.unregister(self.release)
        self.ended.set()
        self.file.truncate(0)
        self.file.close()


def claim(directory: Path) -> Lock | None:
    """Make the directory this run's alone, until the process ends. Called by all ranks; returns the lock on rank 0.

    Raises InputError where another run is writing there.
    """
    locks = []

    def lock() -> None:
        with disk.writing(directory):
            locks.append(Lock(directory))

    on_rank0(lock)
    return locks[0] if locks else None


def check_shared(directory: Path, key: str, seconds: float = 10.0) -> None:
    """Raise InputError unless rank 0 can write to the directory and all nodes see what it writes: elsewhere a rank would write
    its part of a checkpoint where nobody finds it. Called by all ranks; key: what names the directory."""
    name = f".shared-{secrets.token_hex(8)}"

    def write() -> str:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / name).touch()
        except OSError as error:
            raise InputError(f"{key}={directory} cannot be written: {error.strerror}") from None
        return name

    file = directory / on_rank0(write)
    end = time.monotonic() + seconds  # a network file system may show a new file late
    while not (found := file.exists()) and time.monotonic() < end:
        time.sleep(0.1)
    hosts = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, None if found else socket.gethostname())
    if dist.get_rank() == 0:
        file.unlink()
    missing = sorted({host for host in hosts if host})
    if missing:
        raise InputError(
            f"{key}={directory} on {', '.join(missing)} is not the directory that rank 0 writes to: give one on a "
            "file system that all nodes share"
        )
