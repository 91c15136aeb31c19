"""The parts that all worker programs share: they answer requests of rollout/grading/process.py.

Requests are read from standard input and answers are written to standard output, one line of JSON
each. A request contains a random token, which its answer must repeat. The user's function does not
know the token, so neither the function nor a program that it starts can forge an answer by writing
to our file descriptors.

This module needs only the standard library, because workers also run in other Python environments.
"""

import asyncio
import faulthandler
import fcntl
import json
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MAX_PRINTED_BYTES = 2**20  # of the output before the first call, this much is kept


class Channel:
    """Reads requests from standard input, and writes answers to standard output.

    The user's function must not read requests, and its output must not mix with the answers. So
    afterwards standard input is empty, and standard output goes to standard error.
    """

    def __init__(self):
        self.requests = os.fdopen(os.dup(0))
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        # A process that outlives the worker must not keep the pipe open.
        os.register_at_fork(after_in_child=self.answers.close)

    def read(self) -> dict:
        """Return the next request."""
        return json.loads(self.requests.readline())

    def reply(self, token: str, **answer) -> None:
        print(json.dumps({"token": token, **answer}), file=self.answers, flush=True)


def start(lifeline: int) -> Channel:
    """Prepare this process for calls of the user's function.

    Args:
        lifeline: the end of a pipe that closes when the parent ends.
    """
    die_with_parent(lifeline)
    ignore_signals()
    faulthandler.enable()
    return Channel()


def serve(channel: Channel, respond: Callable[[dict], dict]) -> None:
    """Answer one request after another."""
    for line in channel.requests:
        request = json.loads(line)
        channel.reply(request["token"], **respond(request))


async def serve_async(channel: Channel, respond: Callable[[dict], Awaitable[dict]]) -> None:
    """Answer all requests that the parent sends concurrently, in one event loop."""

    async def answer(request: dict) -> None:
        channel.reply(request["token"], **await respond(request))

    loop = asyncio.get_running_loop()
    # Read in a thread of its own: the function may occupy all threads of the event loop.
    reader = ThreadPoolExecutor(1)
    tasks = set()
    while line := await loop.run_in_executor(reader, channel.requests.readline):
        task = asyncio.create_task(answer(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


class OutputFile:
    """The file to which the output of the user's function goes."""

    def __init__(self, path: str):
        self._path = Path(path)
        self._is_open = False

    def redirect(self) -> None:
        """At the first call, redirect all further output of this process to the file.

        The output of the import is copied to the file first.
        """
        if self._is_open:
            return
        self._is_open = True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "ab", buffering=0) as file:
            file.write(os.pread(2, MAX_PRINTED_BYTES, 0))
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)


def ignore_signals() -> None:
    """Ignore the signals that Slurm and terminals send to all processes: the parent handles them.

    This uses an empty handler, because programs that the function starts would inherit SIG_IGN.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)


def die_with_parent(lifeline: int) -> None:
    """Make the kernel kill our process group when the other end of this pipe closes.

    Asynchronous I/O works even while the function holds the interpreter's lock, for example in a
    regular expression. A thread would have to wait for the lock, and PR_SET_PDEATHSIG would fire
    too early, when the thread that started this process ends.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    os.set_inheritable(lifeline, False)


def limit_memory(num_bytes: int) -> None:
    """Limit this process's memory, and make it the first to be killed when memory runs out.

    Allocations beyond the limit raise MemoryError.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    Path("/proc/self/oom_score_adj").write_text("1000")
