"""The program of a reward's worker: it calls one reward function with what rollout/grading/grader.py sends, a line of JSON per call.

A request has a random token, which its answer repeats and the function does not know: nothing that the function, or what
it has started, writes into our descriptors passes for an answer.
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
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from config import InputError
from rewards import REWARDS, find
from rollout.grading.signature import Signature

FP32_MAX = (2 - 2**-23) * 2.0**127


def main(lifeline: int) -> None:
    """Answer requests from stdin until it ends. The first holds the settings: the group `reward` and what Grader adds."""
    die_with_parent(lifeline)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGUSR1,
    ):  # slurm's, to all: the parent decides what to do
        signal.signal(
            number, lambda *_: None
        )  # not SIG_IGN, which programs that the function starts would inherit
    faulthandler.enable()
    # What the function reads and prints is not the protocol.
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    os.register_at_fork(
        after_in_child=answers.close
    )  # a child left behind must not keep the pipe open

    def say(token: str, **answer) -> None:
        print(json.dumps({"token": token, **answer}), file=answers, flush=True)

    settings = json.loads(requests.readline())
    limit_memory(int(settings["memory_gib"] * 2**30))
    try:
        reward = RewardFunction(settings)
    except InputError as error:
        return say(settings["token"], error=str(error))
    say(settings["token"], takes_groups=reward.signature.convention.lists, is_async=reward.is_async)
    if reward.is_async:
        return asyncio.run(serve(reward, requests, say))
    for line in requests:
        request = json.loads(line)
        say(
            request["token"],
            **(reward.check(request) if request["check"] else {"answers": reward.grade(request)}),
        )


async def serve(reward, requests, say) -> None:
    """As many calls at a time as the parent sends, all in one event loop."""

    async def answer(request):
        say(
            request["token"],
            **(
                reward.check(request)
                if request["check"]
                else {"answers": await reward.grade_async(request)}
            ),
        )

    tasks, reader = set(), ThreadPoolExecutor(1)  # its own thread: the function may fill the loop's
    while line := await asyncio.get_running_loop().run_in_executor(reader, requests.readline):
        tasks.add(task := asyncio.create_task(answer(json.loads(line))))
        task.add_done_callback(tasks.discard)


class RewardFunction:
    """A function, called as its parameters want, and what it returns as answers: one for each response of a call,
    {"score", "parts"} or the {"kind", "trace"} of a failure."""

    def __init__(self, settings: dict):
        self.settings, self.name, self.output = (
            settings,
            f"reward.function={settings['function']}",
            settings["output"],
        )
        self.function = find(settings["function"])
        if inspect.isclass(self.function):
            raise InputError(f"{self.name} is a class: name a function, or an object of the class")
        try:
            self.signature = Signature(
                self.function, settings["kwargs"], settings["conversation_keys"]
            )
        except ValueError as error:  # of inspect, for what is written in C
            raise InputError(f"{self.name}: {error}") from error
        self.is_async = any(
            map(inspect.iscoroutinefunction, (self.function, self.function.__call__))
        )

    def check(self, request: dict) -> dict:
        """{"error"} when the row does not have what the function takes, else {"said"}. Only ours, which are quick, are called."""
        ours = self.function in REWARDS.values()
        try:
            said = self.signature.said(self.arguments(request))
            if ours:
                self.function(**self.arguments(request))
        except (KeyError, ValueError) as error:
            return {
                "error": f"{self.name}: {error.args[0]}{'; rename the column, or name a function of yours' * ours}"
            }
        return {"said": f"{self.name}: {said}" if said else ""}

    def grade(self, request: dict) -> list[dict]:
        try:
            self.print_to_file()
            value = self.function(**self.arguments(request))
        except (
            BaseException
        ):  # sys.exit() in a function is its failure, not the end of this process
            return failures(request, "raised", traceback.format_exc())
        return self.answers(value, request)

    async def grade_async(self, request: dict) -> list[dict]:
        seconds = self.settings["timeout"]
        try:
            async with asyncio.timeout(seconds) as limit:
                self.print_to_file()
                value = await self.function(**self.arguments(request))
        except BaseException:
            if limit.expired():
                return failures(request, "timed out", f"took more than {seconds:g} s")
            return failures(request, "raised", traceback.format_exc())
        return self.answers(value, request)

    def arguments(self, request: dict) -> dict:
        return self.signature.arguments(request["prompts"], request["responses"], request["rows"])

    def answers(self, value, request: dict) -> list[dict]:
        if not self.signature.convention.lists:
            return [self.answer(value)]
        count = len(request["responses"])
        try:
            values = [] if isinstance(value, (str, bytes, Mapping)) else list(value)
        except TypeError:
            values = []
        if len(values) != count:
            return failures(
                request,
                "not a list",
                f"the function returned {value!r:.200}, not a list of {count}",
            )
        return [self.answer(value) for value in values]

    def answer(self, value) -> dict:
        parts, weights = value if isinstance(value, Mapping) else {}, self.settings["weights"]
        if parts and self.signature.convention.verls:  # whose texts are for people
            parts = {
                name: part
                for name, part in parts.items()
                if not isinstance(part, (str, list, dict, type(None)))
            }
            weights = weights or {"score": 1.0}
        if missing := [name for name in weights if name not in parts]:
            return {
                "kind": "missing part",
                "trace": f"the function returned {value!r:.200}, without the part {missing[0]!r}",
            }
        try:
            parts = {str(name): finite(part) for name, part in parts.items()}
            score = (
                sum(weights.get(name, 0 if weights else 1) * part for name, part in parts.items())
                if parts
                else value
            )
            return {"score": finite(score), "parts": parts}
        except (TypeError, ValueError, OverflowError, RuntimeError):
            what = (
                "whose parts and sum are not all numbers that are"
                if parts
                else "not a number that is"
            )
            return {
                "kind": "not a number",
                "trace": f"the function returned {value!r:.200}, {what} finite in fp32",
            }

    def print_to_file(self) -> None:
        """From the first call on, prints go to the end of the output file; those of the import come first."""
        if self.output is None:
            return
        path, self.output = Path(self.output), None
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab", buffering=0) as file:
            file.write(os.pread(2, 2**20, 0))
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)


def failures(request: dict, kind: str, trace: str) -> list[dict]:
    return [{"kind": kind, "trace": trace}] * len(request["responses"])


def finite(value) -> float:
    """Numbers of numpy and torch too, but not what float() would parse. Raises ValueError beyond fp32's range."""
    number = math.nan if isinstance(value, (str, bytes, bytearray)) else float(value)
    if not abs(number) <= FP32_MAX:
        raise ValueError
    return number


def die_with_parent(lifeline: int) -> None:
    # Asynchronous I/O on a pipe: the kernel signals our whole process group when its other end closes, even while the
    # function holds the interpreter's lock, as a regular expression does. A thread could not, and PR_SET_PDEATHSIG
    # comes already when the thread ends that started us.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    os.set_inheritable(lifeline, False)


def limit_memory(limit: int) -> None:
    """More [bytes] is a MemoryError here; and where the machine runs out of memory, this process goes before the trainer."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    main(int(sys.argv[1]))
