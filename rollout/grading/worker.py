"""The program of a reward worker. It calls one reward function for rollout/grading/process.py.

Requests are read from standard input and answers are written to standard output, one line of JSON
each. A request contains a random token, which its answer must repeat. The function does not know
the token, so neither the function nor a program that it starts can forge an answer by writing to
our file descriptors.
"""

import asyncio
import faulthandler
import fcntl
import inspect
import json
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from config import InputError
from rewards import REWARDS, find
from rollout.grading.signature import Signature

FP32_MAX = (2 - 2**-23) * 2.0**127
MAX_PRINTED_BYTES = 2**20  # of the output before the first call, this much is kept


def main(lifeline: int) -> None:
    """Answer requests until standard input ends.

    The first request contains the settings: the section `reward`, and what Grader adds to it.
    """
    die_with_parent(lifeline)
    ignore_signals()
    faulthandler.enable()
    # The function must not read requests, and its output must not mix with the answers.
    requests = os.fdopen(os.dup(0))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    # A process that outlives the worker must not keep the pipe open.
    os.register_at_fork(after_in_child=answers.close)

    def reply(token: str, **answer) -> None:
        print(json.dumps({"token": token, **answer}), file=answers, flush=True)

    settings = json.loads(requests.readline())
    limit_memory(int(settings["memory_gib"] * 2**30))
    try:
        reward = RewardFunction(settings)
    except InputError as error:
        reply(settings["token"], error=str(error))
        return
    takes_groups = reward.signature.convention.takes_groups
    reply(settings["token"], takes_groups=takes_groups, is_async=reward.is_async)
    if reward.is_async:
        asyncio.run(serve_async(reward, requests, reply))
    else:
        serve(reward, requests, reply)


def serve(reward: "RewardFunction", requests, reply: Callable) -> None:
    """Answer one request after another."""
    for line in requests:
        request = json.loads(line)
        if request["check"]:
            answer = reward.check(request)
        else:
            answer = {"answers": reward.grade(request)}
        reply(request["token"], **answer)


async def serve_async(reward: "RewardFunction", requests, reply: Callable) -> None:
    """Answer all requests that the parent sends concurrently, in one event loop."""

    async def respond(request: dict) -> None:
        if request["check"]:
            answer = reward.check(request)
        else:
            answer = {"answers": await reward.grade_async(request)}
        reply(request["token"], **answer)

    loop = asyncio.get_running_loop()
    # Read in a thread of its own: the function may occupy all threads of the event loop.
    reader = ThreadPoolExecutor(1)
    tasks = set()
    while line := await loop.run_in_executor(reader, requests.readline):
        task = asyncio.create_task(respond(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


class RewardFunction:
    """The user's function, called with the arguments that it has parameters for.

    Its return values become answers, one for each response of a call: {"score", "parts"}, or
    {"kind", "trace"} for a failure.
    """

    def __init__(self, settings: dict):
        self.settings = settings
        self.name = f"reward.function={settings['function']}"
        self.output: str | None = settings["output"]
        self.function = find(settings["function"])
        if inspect.isclass(self.function):
            raise InputError(f"{self.name} is a class: use a function, or an instance of the class")
        try:
            self.signature = Signature(
                self.function, settings["kwargs"], settings["conversation_keys"]
            )
        except ValueError as error:  # inspect cannot read functions that are written in C
            raise InputError(f"{self.name}: {error}") from error
        callables = (self.function, self.function.__call__)
        self.is_async = any(inspect.iscoroutinefunction(f) for f in callables)

    def check(self, request: dict) -> dict:
        """Check that a row has everything the function needs. Calls the function if it is built in.

        Returns:
            {"error": message}, or {"notice": a notice for the user, or ""}.
        """
        is_built_in = self.function in REWARDS.values()
        try:
            arguments = self.arguments(request)
            notice = self.signature.notice(arguments)
            if is_built_in:
                self.function(**arguments)
        except (KeyError, ValueError) as error:
            return {"error": f"{self.name}: {error.args[0]}"}
        return {"notice": f"{self.name}: {notice}" if notice else ""}

    def grade(self, request: dict) -> list[dict]:
        try:
            self.redirect_prints()
            value = self.function(**self.arguments(request))
        except BaseException:  # sys.exit() in the function must not end the worker
            return failures(request, "raised", traceback.format_exc())
        return self.answers(value, request)

    async def grade_async(self, request: dict) -> list[dict]:
        seconds = self.settings["timeout"]
        try:
            async with asyncio.timeout(seconds) as limit:
                self.redirect_prints()
                value = await self.function(**self.arguments(request))
        except BaseException:
            if limit.expired():
                return failures(request, "timed out", f"took more than {seconds:g} s")
            return failures(request, "raised", traceback.format_exc())
        return self.answers(value, request)

    def arguments(self, request: dict) -> dict:
        return self.signature.arguments(request["prompts"], request["responses"], request["rows"])

    def answers(self, value, request: dict) -> list[dict]:
        """Turn a return value into one answer per response."""
        if not self.signature.convention.takes_groups:
            return [self.answer(value)]
        num_responses = len(request["responses"])
        values = as_list(value)
        if len(values) != num_responses:
            trace = f"the function returned {value!r:.200}, not a list of {num_responses}"
            return failures(request, "not a list", trace)
        return [self.answer(value) for value in values]

    def answer(self, value) -> dict:
        """Turn the function's return value for one response into a score and its parts."""
        parts = value if isinstance(value, Mapping) else {}
        weights = self.settings["weights"]
        if parts and self.signature.convention.is_verl:
            parts = numeric_parts(parts)
            weights = weights or {"score": 1.0}
        for name in weights:
            if name not in parts:
                trace = f"the function returned {value!r:.200}, without the part {name!r}"
                return {"kind": "missing part", "trace": trace}
        try:
            parts = {str(name): finite(part) for name, part in parts.items()}
            score = weighted_sum(parts, weights) if parts else value
            return {"score": finite(score), "parts": parts}
        except (TypeError, ValueError, OverflowError, RuntimeError):
            problem = "which is not a finite number in fp32"
            if parts:
                problem = "whose parts and sum are not all finite numbers in fp32"
            trace = f"the function returned {value!r:.200}, {problem}"
            return {"kind": "not a number", "trace": trace}

    def redirect_prints(self) -> None:
        """At the first call, redirect all further output to the output file.

        The output of the import is copied to the file first.
        """
        if self.output is None:
            return
        path = Path(self.output)
        self.output = None
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab", buffering=0) as file:
            file.write(os.pread(2, MAX_PRINTED_BYTES, 0))
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)


def as_list(value) -> list:
    """Return the values of a list, tuple, array, tensor or generator; [] for anything else.

    A set has no order that could match that of the responses.
    """
    if isinstance(value, str | bytes | Mapping | Set):
        return []
    try:
        return list(value)
    except TypeError:
        return []


def numeric_parts(parts: Mapping) -> dict:
    """Remove the texts for people that functions written for verl may return."""
    texts = (str, list, dict, type(None))
    return {name: part for name, part in parts.items() if not isinstance(part, texts)}


def weighted_sum(parts: dict[str, float], weights: dict[str, float]) -> float:
    """Return the weighted sum of the parts. If there are no weights, every weight is 1."""
    default = 0 if weights else 1
    return sum(weights.get(name, default) * part for name, part in parts.items())


def failures(request: dict, kind: str, trace: str) -> list[dict]:
    """Return the same failure for every response of a call."""
    return [{"kind": kind, "trace": trace}] * len(request["responses"])


def finite(value) -> float:
    """Convert a number of Python, numpy or torch to float. Rejects text, even if it is numeric.

    Raises:
        ValueError: the value is text, or not finite in fp32.
    """
    is_text = isinstance(value, str | bytes | bytearray)
    number = math.nan if is_text else float(value)
    if not abs(number) <= FP32_MAX:
        raise ValueError
    return number


def ignore_signals() -> None:
    """Ignore the signals that Slurm and terminals send to all processes: the parent handles them.

    This uses an empty handler, because programs that the function starts would inherit SIG_IGN.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)


def die_with_parent(lifeline: int) -> None:
    """Let the kernel kill our process group when the other end of this pipe closes.

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


if __name__ == "__main__":
    main(int(sys.argv[1]))
