"""Starting, killing and waiting for the processes of a run, orphans included."""

import os
import random
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.launch import TORCHRUN, start

# How a run is killed, and how often in relation to the others.
KILLS = {
    "SIGKILL to all": 5,
    "SIGKILL to a rank": 2,
    "SIGKILL to torchrun": 2,
    "SIGTERM to torchrun": 1,
    "SIGTERM to a rank": 1,
}


def torchrun(log: Path, arguments: list) -> subprocess.Popen:
    """Start a run on two ranks."""
    return start([*TORCHRUN, "--standalone", "--nproc-per-node", "2", *arguments], log, fresh=True)


def descendants(process: subprocess.Popen) -> list[psutil.Process]:
    """Return the living descendants of a process."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
        return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    except psutil.NoSuchProcess:
        return []


def living(processes: list[subprocess.Popen]) -> list[psutil.Process]:
    """Return every living process that was started, orphans too.

    This process adopts orphans (PR_SET_CHILD_SUBREAPER) and reaps the dead ones here.
    """
    started = {process.pid for process in processes}
    for process in processes:
        process.poll()
    alive = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, ChildProcessError):
            if child.status() != psutil.STATUS_ZOMBIE:
                alive.append(child)
            elif child.ppid() == os.getpid() and child.pid not in started:
                os.waitpid(child.pid, os.WNOHANG)
    return alive


def wait_for_all(processes: list[subprocess.Popen], seconds: float) -> list[str]:
    """Wait until no process is alive; kill and name those that are after so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not living(processes):
            return []
        time.sleep(0.02)
    messages = []
    for process in living(processes):
        with suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline()[1:4])
            messages.append(
                f"process {process.pid} ({command}) has not ended after {seconds:.0f} s"
            )
            process.kill()
    for process in processes:
        process.wait()
    return messages


def kill(process: subprocess.Popen, rng: random.Random) -> str:
    """Kill a run in a random way and return the way. The processes that are spared must end too."""
    (way,) = rng.choices(list(KILLS), KILLS.values())
    signal_name, _, victim_name = way.partition(" to ")
    ranks = psutil.Process(process.pid).children()
    if victim_name == "a rank" and not ranks:
        way = f"{signal_name} to torchrun (no rank yet)"
    victims = {
        "all": [*ranks, process],
        "torchrun": [process],
        "a rank": [rng.choice(ranks or [process])],
    }
    for victim in victims[victim_name]:
        with suppress(psutil.NoSuchProcess):
            if signal_name == "SIGTERM":
                victim.terminate()
            else:
                victim.kill()
    return way
