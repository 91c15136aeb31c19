"""Grades samples in child processes that can be killed, since a reward function may hang, crash or take all memory.

A child (reward_worker.py) is a new program, neither a fork (this process holds a GPU and threads) nor multiprocessing. It
runs in a session of its own, so that what it started is killed with it; it is the first to go when memory runs out; and of
the environment it gets ENVIRONMENT and reward.env alone, so that no secret reaches it by accident. It has the rights of
this process all the same: code that is not trusted needs a sandbox of its own.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from config import SECRET, InputError

ROOT = Path(__file__).parents[2]
# What programs need to find their files, their language and the network; and all that begins with PYTHON or LC_.
ENVIRONMENT = """PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH LD_PRELOAD
    XDG_CACHE_HOME HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE NLTK_DATA SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
    http_proxy https_proxy no_proxy all_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY RANK LOCAL_RANK WORLD_SIZE""".split()
LATE = 5.0  # seconds by which an event loop may be late in ending a call whose time is up
LONGEST_ANSWER = 2**26  # bytes


@dataclass(frozen=True)
class Reward:
    """score: the number that is learned from. parts: those that it is the weighted sum of; none where it came alone."""

    score: float
    parts: dict[str, float]


@dataclass(frozen=True)
class Failure:
    """A sample that has no reward, which is not a reward of 0.

    kind: raised, timed out, died, forged, not a number, not a list, missing part, or other parts. trace: the traceback,
    or a sentence. said: both in one line, with the line of the function.
    """

    kind: str
    trace: str
    row: dict
    response: str

    @property
    def said(self) -> str:
        place = re.search(
            r'File "(.*)", line (\d+)', self.trace.rpartition('reward_worker.py", line ')[2]
        )
        error = " ".join(
            re.split(r'(?m)^  File ".*\n(?:  .*\n)*', self.trace)[-1].split()
        )  # behind the last frame
        return f"{self.kind}: {error}" + (f" ({place[1]}:{place[2]})" if place else "")


Item = tuple[str, str, dict]  # prompt, response, row
Result = Reward | Failure
Call = list[int]  # places of the items that the function gets at once


class Grader:
    """Processes that call one reward function, as the group `reward` of a configuration says.

    The first starts here, so that a function that cannot be imported or called is an InputError at once; the others when
    there is work for them, and in place of those that died. startup_timeout [s] is for Python and the function's imports.
    What the function prints goes to {output_dir}/reward_output/rank_{rank}.txt.
    """

    def __init__(self, config: DictConfig, startup_timeout: float = 300.0):
        reward, self.startup_timeout = config.reward, startup_timeout
        self.function, self.num_workers, self.concurrency = (
            reward.function,
            reward.num_workers,
            reward.concurrency,
        )
        check_settings(reward)
        output = Path(
            config.output_dir, "reward_output", f"rank_{os.environ.get('RANK', 0)}.txt"
        ).absolute()
        self.settings = {
            **OmegaConf.to_container(reward),
            "output": str(output),
            "conversation_keys": [config.data.messages_key, config.data.prompt_key],
        }
        self.parts: list[str] | None = None
        worker = Worker(self.settings, startup_timeout)
        self.idle, self.takes_groups = [worker], worker.ready["takes_groups"]
        self.seconds = reward.timeout + (LATE if worker.ready["is_async"] else 0)
        if self.concurrency > 1 and not worker.ready["is_async"]:
            raise InputError(
                f"reward.concurrency={self.concurrency} does nothing for reward.function={self.function}, which is "
                "not async: define it with `async def`, or raise reward.num_workers"
            )

    def check(self, row: dict) -> str:
        """What to say at start of the function's parameters; raises InputError when this row lacks what they need."""
        request = {"check": True, "prompts": [""], "responses": [""], "rows": [row]}
        return self.idle[-1].question(request, self.startup_timeout)["said"]

    def grade(
        self, items: Sequence[Item], groups: Sequence[int], max_failures: float = math.inf
    ) -> list[Result | None]:
        """The rewards of (prompt, response, row), in this order; a row must be what JSON can hold. Items with one number in
        groups [n] go into one call of a function that takes groups. Behind more than max_failures nothing is asked: None."""
        calls: dict[int, Call] = {}
        for i, group in enumerate(groups):
            calls.setdefault(group if self.takes_groups else i, []).append(i)
        results: list[Result | None] = [None] * len(items)
        failed: list[int] = []

        def record(call: Call, answers: list[dict]) -> None:
            for i, answer in zip(call, answers, strict=True):
                results[i] = (
                    Reward(**answer)
                    if "score" in answer
                    else Failure(**answer, row=items[i][2], response=items[i][1])
                )
                failed.extend([i] * isinstance(results[i], Failure))

        todo = takewhile(lambda call: len(failed) <= max_failures, calls.values())
        num_threads = min(self.num_workers, math.ceil(len(calls) / self.concurrency))
        with ThreadPoolExecutor(max(num_threads, 1)) as pool:  # a thread waits for each worker
            for thread in [
                pool.submit(self._work, items, todo, record) for _ in range(num_threads)
            ]:
                thread.result()
        return results

    def same_parts(
        self, items: Sequence[Item], results: Sequence[Result | None]
    ) -> list[Result | None]:
        """The results, those as failures whose parts are not those of this grader's first reward: what is missing is no 0."""
        rewards = [result for result in results if isinstance(result, Reward)]
        self.parts = (
            self.parts if self.parts is not None or not rewards else sorted(rewards[0].parts)
        )

        def same(item: Item, result: Result | None) -> Result | None:
            if not isinstance(result, Reward) or sorted(result.parts) == self.parts:
                return result
            had, first = (
                ", ".join(parts) or "none" for parts in (sorted(result.parts), self.parts)
            )
            return Failure(
                "other parts",
                f"the function returned the parts {had}, and at first {first}",
                item[2],
                item[1],
            )

        return list(map(same, items, results))

    def close(self) -> None:
        """End the workers."""
        while self.idle:
            self.idle.pop().kill()

    def _work(self, items: Sequence[Item], todo: Iterator[Call], record: Callable) -> None:
        """Do what there is to do, with one worker after another."""
        worker = None
        while True:
            for call in islice(todo, self.concurrency - (len(worker.asked) if worker else 0)):
                worker = worker or self._take()
                prompts, responses, rows = zip(*(items[i] for i in call))
                worker.ask(
                    {"check": False, "prompts": prompts, "responses": responses, "rows": rows},
                    self.seconds,
                    call,
                )
            if not worker or not worker.asked:
                break
            answered = worker.receive()
            if answered:
                record(answered[0], answered[1]["answers"])
            elif len(worker.asked) == 1 and worker.expired in (None, *worker.asked):
                (call,) = worker.asked.values()
                record(call, [worker.end] * len(call))
            else:  # one of several has ended it, nobody knows which: each is asked again, alone
                for call in worker.asked.values():
                    self._work(items, iter([call]), record)
            worker = worker if worker.alive else None
        if worker:
            self.idle.append(worker)

    def _take(self) -> Worker:
        with contextlib.suppress(IndexError):
            return self.idle.pop()
        try:
            return Worker(self.settings, self.startup_timeout)
        except (
            InputError
        ) as error:  # it was importable before: this is one rank's trouble alone, no mistake
            raise RuntimeError(
                f"a new process for reward.function={self.function} could not be started"
            ) from error


def check_settings(reward: DictConfig) -> None:
    """Raise InputError for a value that a free group cannot have, and for a variable that is not set."""
    for key, kind, kind_name in (
        ("weights", (int, float), "a number"),
        ("kwargs", str, "a column of the rows, or a place: a.b"),
    ):
        for name, value in reward[key].items():
            if not isinstance(value, kind) or isinstance(value, bool):
                raise InputError(f"reward.{key}.{name}={value} must be {kind_name}")
    for name in reward.env:
        if name not in os.environ:
            raise InputError(f"reward.env names {name}, which the environment does not have")


class Worker:
    """One child, ready for calls. Raises InputError when it cannot get ready, with the cause.

    ready: what it said then. asked: token -> call, of what it has not answered. When it has ended: `expired`, the token of
    the call whose time was up, and `end`, the kind and trace of that failure.
    """

    def __init__(self, settings: dict, startup_timeout: float):
        # Nothing is ever written to this pipe: the child dies when our end closes, however we end.
        its_end, self.lifeline = os.pipe()
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in (*ENVIRONMENT, *settings["env"])
            or name.startswith(("PYTHON", "LC_"))
            and not SECRET.search(name)
        }
        with (
            tempfile.TemporaryFile() as printed
        ):  # until its first call, which knows a better place
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rollout.grading.worker", str(its_end)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                pass_fds=[its_end],
                start_new_session=True,
                env={
                    **kept,
                    "CUDA_VISIBLE_DEVICES": "",
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join(
                        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
                    ),
                },
            )
        os.close(its_end)
        self.name, self.alive = f"reward.function={settings['function']}", True
        self.expired: str | None = None
        self.end: dict = {}
        self.asked: dict[str, Call] = {}
        self.timers: dict[str, threading.Timer] = {}
        self.ready = self.question(settings, startup_timeout)

    def question(self, request: dict, seconds: float) -> dict:
        """Ask and wait. An error is an InputError, and the end of the child."""
        self.ask(request, seconds, [])
        _, answer = self.receive() or (
            None,
            {"error": f"{self.name}: while it was imported, its process {self.end['trace']}"},
        )
        if "error" in answer:
            self.kill()
            raise InputError(answer["error"])
        return answer

    def ask(self, request: dict, seconds: float, call: Call) -> None:
        """Send a request. The child is killed when it is not answered in time."""
        token = secrets.token_hex(8)
        self.asked[token], self.timers[token] = (
            call,
            threading.Timer(seconds, self.expire, [token, seconds]),
        )
        self.timers[token].daemon = True
        self.timers[token].start()
        with contextlib.suppress(
            BrokenPipeError
        ):  # it died since the last answer: reading says so too
            self.process.stdin.write(json.dumps({**request, "token": token}).encode() + b"\n")
            self.process.stdin.flush()

    def receive(self) -> tuple[Call, dict] | None:
        """Wait for the next answer; None when the child has come to its end instead."""
        line = self.process.stdout.readline(LONGEST_ANSWER)
        try:
            answer = json.loads(line)
            token = answer.pop("token")
            call = self.asked.pop(token)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return self.kill(forged=line.endswith(b"\n") or len(line) == LONGEST_ANSWER)
        timer = self.timers.pop(token)
        timer.cancel()
        timer.join()
        if self.expired and not self.asked:
            self.kill()
        return call, answer

    def expire(self, token: str, seconds: float) -> None:
        self.expired, self.end = (
            token,
            {"kind": "timed out", "trace": f"took more than {seconds:g} s"},
        )
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self, forged: bool = False) -> None:
        """End the child and what it started, unless that has left its session."""
        if not self.alive:
            return
        self.alive = False
        for timer in self.timers.values():
            timer.cancel()
            timer.join()
        with contextlib.suppress(
            ProcessLookupError
        ):  # not waited for yet, so the number is still its own
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        os.close(self.lifeline)
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if forged:
            self.end = {"kind": "forged", "trace": "wrote into the pipe of the answers"}
        elif not self.expired or code != -signal.SIGKILL:
            died = (
                f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            )
            self.end = {
                "kind": "died",
                "trace": f"ended {died}" + " (out of memory?)" * (code == -signal.SIGKILL),
            }


def check_failures(failures: Sequence[Failure], num_asked: int, max_failure_rate: float) -> None:
    """Raises InputError, with the first trace, when more than this share of the samples are failures."""
    if failures and len(failures) > max_failure_rate * num_asked:
        first = failures[0]
        raise InputError(
            f"{len(failures)} of {num_asked} samples ({len(failures) / num_asked:.1%}) could not be "
            f"graded, more than reward.max_failure_rate={max_failure_rate}; the first: {first.said}, "
            f"for the response {first.response[:200]!r} (all: failures.jsonl; what the "
            "function printed: reward_output/)"
        )
