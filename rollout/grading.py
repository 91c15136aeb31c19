"""Grades samples in child processes that can be killed, since a reward function may hang, crash or take all memory.

A child is a new program, neither a fork (this process holds a GPU and threads) nor multiprocessing. It gets one JSON
line an item, [prompt, response, row], and answers with one. It runs in a session of its own, so that what it started is
killed with it.
"""

import contextlib
import faulthandler
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from config import InputError
from rewards import find

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Failure:
    """A sample that has no reward, which is not a reward of 0.

    kind: raised, timed out, died, or not a number. trace: the traceback, or a sentence.
    """
    kind: str
    trace: str
    row: dict
    response: str


class Grader:
    """num_workers child processes that call one reward function (a name as rewards.find takes it), timeout [s] an item.

    The first starts here, so that a function that cannot be imported is an InputError at once; the others when there is
    work for them, and in place of those that died. startup_timeout [s] is for Python and the function's imports.
    """

    def __init__(self, function: str, num_workers: int, timeout: float, startup_timeout: float = 300.0):
        self.function, self.num_workers = function, num_workers
        self.timeout, self.startup_timeout = timeout, startup_timeout
        self.idle = [Worker(function, startup_timeout)]

    def grade(self, items: list[tuple[str, str, dict]]) -> list[float | Failure]:
        """The rewards of (prompt, response, row), in this order; a row must be what JSON can hold."""
        with ThreadPoolExecutor(self.num_workers) as pool:      # a thread waits for each worker
            return list(pool.map(self._grade_one, items))

    def close(self) -> None:
        """End the workers."""
        while self.idle:
            self.idle.pop().kill()

    def _grade_one(self, item: tuple[str, str, dict]) -> float | Failure:
        request = json.dumps(item).encode() + b"\n"
        try:
            worker = self.idle.pop()
        except IndexError:
            try:
                worker = Worker(self.function, self.startup_timeout)
            except InputError as error:         # it was importable before: this is one rank's trouble alone, no mistake
                raise RuntimeError(f"a new process for reward.function={self.function} could not be started") from error
        answer = worker.ask(request, self.timeout)
        if worker.alive:
            self.idle.append(worker)
        return answer["reward"] if "reward" in answer else Failure(**answer, row=item[2], response=item[1])


class Worker:
    """One child, ready for items. Raises InputError when it cannot get ready, with the cause."""

    def __init__(self, function: str, startup_timeout: float):
        # Nothing is ever written to this pipe: the child dies when our end closes, however we end.
        its_end, self.lifeline = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rollout.grading", function, str(its_end)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            pass_fds=[its_end], start_new_session=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
                 "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])})
        os.close(its_end)
        self.alive, self.expired = True, False
        answer = self.ask(b"", startup_timeout)
        if answer:
            self.kill()
            raise InputError(answer.get("error") or
                             f"reward.function={function}: while it was imported, its process {answer['trace']}")

    def ask(self, request: bytes, seconds: float) -> dict:
        """Send a line and return the answer, or the kind and trace of a failure after which the worker is not alive."""
        timer = threading.Timer(seconds, self.expire)
        timer.daemon = True
        timer.start()
        with contextlib.suppress(BrokenPipeError):      # it died between two items: reading says so too
            self.process.stdin.write(request)
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        timer.cancel()
        timer.join()
        if self.expired or not line.endswith(b"\n"):
            self.kill()
        if line.endswith(b"\n"):
            return json.loads(line)
        code = self.process.returncode
        if self.expired and code == -signal.SIGKILL:
            return {"kind": "timed out", "trace": f"took more than {seconds:g} s"}
        died = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return {"kind": "died", "trace": f"ended {died}" + " (out of memory?)" * (code == -signal.SIGKILL)}

    def expire(self) -> None:
        self.expired = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the child and what it started, unless that has left its session."""
        self.alive = False
        if self.process.returncode is None:     # not waited for yet, so the number is still its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            os.close(self.lifeline)
            self.process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()


def check_failures(results: list[float | Failure], max_failure_rate: float) -> None:
    """Raises InputError, with the first trace, when more than this share of the results are failures."""
    failures = [result for result in results if isinstance(result, Failure)]
    if failures and len(failures) > max_failure_rate * len(results):
        first = failures[0]
        raise InputError(f"{len(failures)} of {len(results)} samples ({len(failures) / len(results):.1%}) could not be "
                         f"graded, more than reward.max_failure_rate={max_failure_rate}; the first: {first.kind}: "
                         f"{first.trace.strip()}, for the response {first.response[:200]!r}")


# ---- in the child ----

def serve(function: str, lifeline: int) -> None:
    """Grade items from stdin until it ends."""
    # Asynchronous I/O on a pipe: the kernel signals our whole process group when its other end closes, even while the
    # function holds the interpreter's lock, as a regular expression does. A thread could not, and PR_SET_PDEATHSIG
    # comes already when the thread ends that started us.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    os.set_inheritable(lifeline, False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):      # slurm's, to all: the parent decides what to do
        signal.signal(number, lambda *_: None)      # not SIG_IGN, which programs that the function starts would inherit
    faulthandler.enable()
    # What the function reads and prints is not the protocol.
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    os.register_at_fork(after_in_child=answers.close)       # a child left behind must not keep the pipe open

    def say(message: dict) -> None:
        print(json.dumps(message), file=answers, flush=True)
    try:
        reward = find(function)
    except InputError as error:
        return say({"error": str(error)})
    say({})
    for line in requests:
        say(reward_of(reward, *json.loads(line)))


def reward_of(function: Callable, prompt: str, response: str, row: dict) -> dict:
    try:
        value = function(prompt, response, row)
        try:        # numbers of numpy and torch too, but not what float() would parse
            number = math.nan if isinstance(value, (str, bytes, bytearray)) else float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            number = math.nan
        if math.isfinite(number):
            return {"reward": number}
        return {"kind": "not a number", "trace": f"the function returned {value!r:.200}"}
    except BaseException:       # sys.exit() in a function is its failure, not the end of this process
        return {"kind": "raised", "trace": traceback.format_exc()}


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
