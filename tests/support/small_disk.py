"""A disk with little room, which only the runs of one test see."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Mounts the disk, copies $BEGUN to it, fills it up to $FREE bytes, and keeps the mount until the
# standard input ends. Then copies the disk to $KEPT.
KEEP_DISK = """set -e; mount -t tmpfs -o size=32m tmpfs $DISK
    if [ -d $BEGUN ]; then cp -r $BEGUN $DISK/out; fi
    head -c $(($(df --output=avail -B1 $DISK | tail -1) - $FREE)) /dev/zero > $DISK/filler
    echo mounted; read -r _ || true
    rm $DISK/filler; cp -r $DISK $KEPT"""


@contextmanager
def small_disk(disk: Path, kept: Path, begun: Path, free_bytes: int) -> Iterator[int]:
    """Yield the number of a process in whose mount namespace there is a disk, for run(mounts_of=).

    Users other than root get a user namespace, too.

    Args:
        disk: the empty directory where the disk is mounted.
        kept: where the disk's files are copied to in the end.
        begun: the folder of a run, which the disk has as DISK/out if the folder exists.
        free_bytes: free space on the disk.
    """
    user_namespace = [] if os.geteuid() == 0 else ["--map-root-user"]
    paths = {"DISK": str(disk), "KEPT": str(kept), "BEGUN": str(begun), "FREE": str(free_bytes)}
    keeper = subprocess.Popen(
        ["unshare", "--mount", *user_namespace, "bash", "-c", KEEP_DISK],
        env={**os.environ, **paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert keeper.stdout.readline() == "mounted\n"
        yield keeper.pid
    finally:
        keeper.stdin.close()
        code = keeper.wait()
    assert code == 0
