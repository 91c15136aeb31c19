"""Start a worker process, send it requests, and kill it if an answer takes too long.

A worker (rollout/grading/worker.py or rollout/episodes/worker.py) is a new program. It is not a
fork, because this process uses threads and an accelerator. It does not use multiprocessing, which
would unpickle whatever the worker sends. A worker runs in its own session, so that all processes
that it starts are killed with it. When memory runs out, the kernel kills workers first.

So that no secret reaches a worker by accident, it gets only the environment variables in
ENVIRONMENT and reward.env. It still has the permissions of this process: code that you do not trust
needs a sandbox.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from config import SECRET, InputError
from rollout.grading.notes import Note

ROOT = Path(__file__).parents[2]
# Variables that programs need to find files and the network, and to choose a language. Variables
# that begin with PYTHON or LC_ are passed on as well, unless they look like secrets.
ENVIRONMENT = """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR VIRTUAL_ENV CONDA_PREFIX
    LD_LIBRARY_PATH LD_PRELOAD XDG_CACHE_HOME HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE NLTK_DATA
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
    http_proxy https_proxy no_proxy all_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY
    RANK LOCAL_RANK WORLD_SIZE
""".split()
MAX_ANSWER_BYTES = 2**26
READ_BYTES = 2**16  # as much as a pipe holds
# The shortest wait before the clock is read again, so a call may be killed this much too late. If
# a clock is stopped right before the end of a call's time, shorter waits would keep a thread busy.
MIN_WAIT_MILLISECONDS = 10.0

Call = list[int]  # the indices of the samples that one call of the function grades


@dataclass(frozen=True)
class Program:
    """A worker's program.

    Attributes:
        name: key=value of the user's function. Error messages begin with it.
        command: the program and its arguments, to which two file descriptors are added: the
            lifeline, and a file in which the worker may note which call's code it runs.
        environment: all environment variables that it gets.
        settings: its first request.
        files: further descriptors that it inherits, with the same numbers.
    """

    name: str
    command: list[str]
    environment: dict[str, str]
    settings: dict
    files: list[int] = field(default_factory=list)


@dataclass
class Ending:
    """Why a worker ended: the kind and the trace of the failure."""

    kind: str
    trace: str


class Deadline(NamedTuple):
    """The end of a call's time.

    time     as the clock gives it
    seconds  how long after the request this is
    clock    time.monotonic, or a StoppableClock
    """

    time: float
    seconds: float
    clock: Callable[[], float]

    @property
    def seconds_left(self) -> float:
        return self.time - self.clock()


class WorkerProcess:
    """One worker, ready for calls.

    Attributes:
        ready: the worker's first answer.
        pending: token -> call, for requests that were not answered yet.
        deadlines: token -> when the worker is killed, for the same requests.
        unread: what the worker has written after its last line.
        expired: the token of the call that has timed out, or None.
        ending: why the worker ended; None while it runs.
        last_note: the worker's last note.

    Raises:
        InputError: the function cannot be imported or called. The message gives the reason.
    """

    def __init__(self, program: Program, startup_timeout: float):
        self.name = program.name
        self.alive = True
        self.expired: str | None = None
        self.ending: Ending | None = None
        self.last_note = Note()
        self.notes = os.memfd_create("notes")
        self.pending: dict[str, Call] = {}
        self.deadlines: dict[str, Deadline] = {}
        self.unread = b""
        self._start(program)
        self.ready = self.query(program.settings, startup_timeout, "while it was imported")

    def _start(self, program: Program) -> None:
        # Nothing is written to this pipe. It closes when this process ends for whatever reason, and
        # then the worker is killed.
        worker_end, self.lifeline = os.pipe()
        # The worker prints to this file until its first call, when it opens the output file.
        with tempfile.TemporaryFile() as early_prints:
            self.process = subprocess.Popen(
                [*program.command, str(worker_end), str(self.notes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=early_prints,
                pass_fds=[worker_end, self.notes, *program.files],
                start_new_session=True,
                env=program.environment,
            )
        os.close(worker_end)
        # A worker that does not read must not block this process for ever: see send().
        os.set_blocking(self.process.stdin.fileno(), False)

    def query(self, request: dict, seconds: float, stage: str) -> dict:
        """Send a request and wait for its answer.

        Args:
            stage: when this happens, for the error message.

        Raises:
            InputError: the answer is an error, or the worker has ended. The worker is killed.
        """
        self.send(request, seconds, [])
        received = self.receive()
        if received is None:
            answer = {"error": f"{self.name}: {stage}, its process {self.ending.trace}"}
        else:
            _, answer = received
        if "error" in answer:
            self.kill()
            raise InputError(answer["error"])
        return answer

    def send(
        self,
        request: dict,
        seconds: float,
        call: Call,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Send a request. Unless it is answered within `seconds`, receive() kills the worker."""
        token = secrets.token_hex(8)
        self.pending[token] = call
        self.deadlines[token] = Deadline(clock() + seconds, seconds, clock)
        unsent = json.dumps({**request, "token": token}).encode() + b"\n"
        pipe = self.process.stdin.fileno()
        # If the worker died after its last answer, the pipe is broken, which receive() will report.
        with contextlib.suppress(BrokenPipeError):
            while unsent:
                self._wait(pipe, select.POLLOUT)
                unsent = unsent[os.write(pipe, unsent) :]

    def receive(self) -> tuple[Call, dict] | None:
        """Wait for the next answer. Returns (call, answer), or None if the worker has ended."""
        line = self._read_line()
        try:
            answer = json.loads(line)
            token = answer.pop("token")
            call = self.pending.pop(token)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            is_whole_line = line.endswith(b"\n") or len(line) == MAX_ANSWER_BYTES
            self.kill(forged=is_whole_line)
            return None
        del self.deadlines[token]
        if self.expired and not self.pending:
            self.kill()
        return call, answer

    def _read_line(self) -> bytes:
        """Return the next line, at most MAX_ANSWER_BYTES of it, or what is left at the end."""
        pipe = self.process.stdout.fileno()
        chunks = [self.unread]
        num_bytes = len(self.unread)
        while b"\n" not in chunks[-1] and num_bytes < MAX_ANSWER_BYTES:
            self._wait(pipe, select.POLLIN)
            chunk = os.read(pipe, READ_BYTES)
            if not chunk:
                break
            chunks.append(chunk)
            num_bytes += len(chunk)
        line, newline, self.unread = b"".join(chunks).partition(b"\n")
        return (line + newline)[:MAX_ANSWER_BYTES]

    def wait_for_answer(self, waker: int) -> bool:
        """Wait until receive() has something to return, or until another thread interrupts this.

        waker: an eventfd. Another thread writes to it, and then this returns False.
        """
        if b"\n" in self.unread:
            return True
        pipe = self.process.stdout.fileno()
        ready = self._wait(pipe, select.POLLIN, waker)
        if waker in ready:
            os.eventfd_read(waker)
        return pipe in ready

    def _wait(self, pipe: int, event: int, waker: int | None = None) -> set[int]:
        """Wait until a pipe is ready, but kill the worker when a call has timed out.

        A pipe of a worker that has ended is ready, too. Returns the descriptors that are ready.
        """
        poll = select.poll()
        poll.register(pipe, event)
        if waker is not None:
            poll.register(waker, select.POLLIN)
        while not (ready := poll.poll(self._milliseconds_left())):
            self._expire()
        return {file for file, _ in ready}

    def _milliseconds_left(self) -> float | None:
        """Return how long to wait for the worker: until its next call times out, or for ever.

        If the call's clock is stopped during the wait, the call has more time left after it.
        """
        if self.expired or not self.deadlines:
            return None
        deadline = self.deadlines[self._next_to_expire()]
        return max(MIN_WAIT_MILLISECONDS, deadline.seconds_left * 1000)

    def _next_to_expire(self) -> str:
        return min(self.deadlines, key=lambda token: self.deadlines[token].seconds_left)

    def _expire(self) -> None:
        """Kill the worker because a call has timed out, unless its clock has been stopped."""
        token = self._next_to_expire()
        if self.deadlines[token].seconds_left > 0:
            return
        self.expired = token
        seconds = self.deadlines[self.expired].seconds
        self.ending = Ending("timed out", f"took more than {seconds:g} s")
        self.interrupt()

    def interrupt(self) -> None:
        """Kill the worker, in any thread. receive() will notice."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self, forged: bool = False) -> None:
        """End the worker, and the processes that it started unless they left its session.

        Args:
            forged: whether the worker sent something that is not an answer.
        """
        if not self.alive:
            return
        self.alive = False
        # Nothing has waited for the process yet, so no other process can have its pid.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self.last_note = Note.read(self.notes)
        os.close(self.notes)
        os.close(self.lifeline)
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if forged:
            self.ending = Ending("forged", "wrote to the pipe for answers")
        elif not self.expired or code != -signal.SIGKILL:
            self.ending = Ending("died", describe_exit(code))


def describe_exit(code: int) -> str:
    """Describe an exit code, which is negative for a signal, as the end of a sentence."""
    if code == -signal.SIGKILL:
        return "ended by signal SIGKILL (out of memory?)"
    if code < 0:
        return f"ended by signal {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def worker_environment(names: list[str]) -> dict[str, str]:
    """Return the environment of a worker: the variables in ENVIRONMENT and in `names`."""

    def is_passed_on(name: str) -> bool:
        if name in ENVIRONMENT or name in names:
            return True
        return name.startswith(("PYTHON", "LC_")) and not SECRET.search(name)

    environment = {name: value for name, value in os.environ.items() if is_passed_on(name)}
    own_path = filter(None, [os.environ.get("PYTHONPATH")])
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *own_path])
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["OMP_NUM_THREADS"] = "1"
    return environment
