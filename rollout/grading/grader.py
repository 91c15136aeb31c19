"""Grade samples in parallel worker processes, and return the results in order."""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from config import InputError
from rollout.grading.process import Call, WorkerProcess

# Seconds that an event loop may take to cancel a call that has timed out.
EVENT_LOOP_DELAY = 5.0
# Occurs in a traceback in every frame of the worker's own program.
WORKER_FRAME = 'grading/worker.py", line '


@dataclass(frozen=True)
class Reward:
    """The reward of one response.

    Attributes:
        score: the number that advantages are computed from.
        parts: the named parts, whose weighted sum is the score. Empty if there are none.
    """

    score: float
    parts: dict[str, float]


@dataclass(frozen=True)
class Failure:
    """A sample that could not be graded, which is not the same as a reward of 0.

    Attributes:
        kind: raised, timed out, died, forged, not a number, not a list, missing part, or different
            parts.
        trace: the traceback, or a sentence that describes the failure.
    """

    kind: str
    trace: str
    row: dict
    response: str

    @property
    def summary(self) -> str:
        """The kind and the error in one line, with the user's file and line that raised it."""
        _, _, user_frames = self.trace.rpartition(WORKER_FRAME)
        place = re.search(r'File "(.*)", line (\d+)', user_frames)
        after_last_frame = re.split(r'(?m)^  File ".*\n(?:  .*\n)*', self.trace)[-1]
        error = " ".join(after_last_frame.split())
        location = f" ({place[1]}:{place[2]})" if place else ""
        return f"{self.kind}: {error}{location}"


Item = tuple[str, str, dict]  # prompt, response, row
Result = Reward | Failure


class _Job:
    """The calls of one grade(), shared by the threads that wait for workers."""

    def __init__(self, items: Sequence[Item], calls: Iterator[Call], max_failures: float):
        self.items = items
        self.results: list[Result | None] = [None] * len(items)
        self._calls = calls
        self._max_failures = max_failures
        self._num_failures = 0
        self._lock = threading.Lock()

    def next_calls(self, count: int) -> list[Call]:
        """Take up to `count` of the remaining calls, or none if there were too many failures."""
        taken = []
        with self._lock:
            while len(taken) < count and self._num_failures <= self._max_failures:
                call = next(self._calls, None)
                if call is None:
                    break
                taken.append(call)
        return taken

    def request(self, call: Call) -> dict:
        prompts = [self.items[i][0] for i in call]
        responses = [self.items[i][1] for i in call]
        rows = [self.items[i][2] for i in call]
        return {"check": False, "prompts": prompts, "responses": responses, "rows": rows}

    def record(self, call: Call, answers: list[dict]) -> None:
        """Turn a worker's answers into results."""
        for i, answer in zip(call, answers, strict=True):
            _, response, row = self.items[i]
            if "score" in answer:
                self.results[i] = Reward(**answer)
            else:
                self.results[i] = Failure(**answer, row=row, response=response)
                with self._lock:
                    self._num_failures += 1


class Grader:
    """Worker processes that call one reward function, as configured in the section `reward`.

    The constructor starts the first worker, so a function that cannot be imported or called raises
    InputError at once. More workers start when there is work for them, or to replace workers that
    died. The function's output goes to {output_dir}/reward_output/rank_{rank}.txt.

    Args:
        startup_timeout: the seconds allowed for starting Python and importing the function.

    Attributes:
        takes_groups: whether the function takes all responses of a group at once.
        parts: the names of the parts that every reward must have; None before the first reward.
    """

    def __init__(self, config: DictConfig, startup_timeout: float = 300.0):
        reward = config.reward
        check_reward_settings(reward)
        self.startup_timeout = startup_timeout
        self.function = reward.function
        self.num_workers = reward.num_workers
        self.concurrency = reward.concurrency
        rank = os.environ.get("RANK", 0)
        output = Path(config.output_dir, "reward_output", f"rank_{rank}.txt").absolute()
        self.settings = {
            **OmegaConf.to_container(reward),
            "output": str(output),
            "conversation_keys": [config.data.messages_key, config.data.prompt_key],
        }
        self.parts: list[str] | None = None
        worker = WorkerProcess(self.settings, startup_timeout)
        self.idle = [worker]
        self.takes_groups = worker.ready["takes_groups"]
        is_async = worker.ready["is_async"]
        self.seconds_per_call = reward.timeout + (EVENT_LOOP_DELAY if is_async else 0)
        if self.concurrency > 1 and not is_async:
            raise InputError(
                f"reward.concurrency={self.concurrency} has no effect, because reward.function="
                f"{self.function} is not async: define it with `async def`, or raise "
                "reward.num_workers"
            )

    def check(self, row: dict) -> str:
        """Return a notice about how the function is called, or "" if there is nothing to report.

        Raises:
            InputError: the row lacks a value for one of the function's parameters.
        """
        request = {"check": True, "prompts": [""], "responses": [""], "rows": [row]}
        return self.idle[-1].query(request, self.startup_timeout)["notice"]

    def grade(
        self, items: Sequence[Item], groups: Sequence[int], max_failures: float = math.inf
    ) -> list[Result | None]:
        """Return the results of the items, in the same order.

        Args:
            items: tuples of prompt, response and row. Rows must be representable in JSON.
            groups: the group of each item. A function that takes groups is called once per group.
            max_failures: after more failures than this, the remaining items are not graded, and
                their results are None.
        """
        calls: dict[int, Call] = {}
        for i, group in enumerate(groups):
            key = group if self.takes_groups else i
            calls.setdefault(key, []).append(i)
        job = _Job(items, iter(calls.values()), max_failures)
        num_threads = min(self.num_workers, math.ceil(len(calls) / self.concurrency))
        with ThreadPoolExecutor(max(num_threads, 1)) as pool:  # one thread per worker
            threads = [pool.submit(self._work, job) for _ in range(num_threads)]
            for thread in threads:
                thread.result()
        return job.results

    def check_parts(
        self, items: Sequence[Item], results: Sequence[Result | None]
    ) -> list[Result | None]:
        """Turn rewards whose parts differ from those of the first reward into failures.

        A missing part is not the same as a part of 0.
        """
        rewards = [result for result in results if isinstance(result, Reward)]
        if self.parts is None and rewards:
            self.parts = sorted(rewards[0].parts)
        checked: list[Result | None] = []
        for (_, response, row), result in zip(items, results, strict=True):
            if isinstance(result, Reward) and sorted(result.parts) != self.parts:
                returned = ", ".join(sorted(result.parts)) or "none"
                expected = ", ".join(self.parts) or "none"
                trace = f"the function returned the parts {returned}, but at first {expected}"
                result = Failure("different parts", trace, row, response)
            checked.append(result)
        return checked

    def close(self) -> None:
        """End all workers."""
        while self.idle:
            self.idle.pop().kill()

    def _work(self, job: _Job) -> None:
        """Make calls of a job until none is left. Replaces a worker that dies."""
        worker: WorkerProcess | None = None
        while True:
            num_pending = len(worker.pending) if worker else 0
            for call in job.next_calls(self.concurrency - num_pending):
                if worker is None:
                    worker = self._take_worker()
                worker.send(job.request(call), self.seconds_per_call, call)
            if worker is None or not worker.pending:
                break
            received = worker.receive()
            if received is not None:
                call, answer = received
                job.record(call, answer["answers"])
            else:
                self._handle_ending(worker, job)
            if not worker.alive:
                worker = None
        if worker is not None:
            self.idle.append(worker)

    def _handle_ending(self, worker: WorkerProcess, job: _Job) -> None:
        """Record the failure of the call that ended a worker.

        If several calls were in flight, any of them may be the cause, so each is repeated alone.
        """
        calls = list(worker.pending.values())
        is_sure = len(calls) == 1 and worker.expired in (None, *worker.pending)
        if is_sure:
            failure = {"kind": worker.ending.kind, "trace": worker.ending.trace}
            job.record(calls[0], [failure] * len(calls[0]))
            return
        for call in calls:
            self._grade_alone(call, job)

    def _grade_alone(self, call: Call, job: _Job) -> None:
        worker = self._take_worker()
        worker.send(job.request(call), self.seconds_per_call, call)
        received = worker.receive()
        if received is not None:
            _, answer = received
            job.record(call, answer["answers"])
        else:
            self._handle_ending(worker, job)
        if worker.alive:
            self.idle.append(worker)

    def _take_worker(self) -> WorkerProcess:
        with contextlib.suppress(IndexError):
            return self.idle.pop()
        try:
            return WorkerProcess(self.settings, self.startup_timeout)
        except InputError as error:
            # The function could be imported before, so this is not the user's mistake.
            raise RuntimeError(
                f"cannot start a new process for reward.function={self.function}"
            ) from error


def check_reward_settings(reward: DictConfig) -> None:
    """Check the values in reward.weights and reward.kwargs, and the variables in reward.env.

    Raises:
        InputError: a value has the wrong type, or a variable is not set.
    """
    for name, value in reward.weights.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise InputError(f"reward.weights.{name}={value} must be a number")
    for name, value in reward.kwargs.items():
        if not isinstance(value, str):
            raise InputError(
                f"reward.kwargs.{name}={value} must be the name of a column, or a path in one: "
                "COLUMN.KEY"
            )
    for name in reward.env:
        if name not in os.environ:
            raise InputError(
                f"reward.env names {name}, which is not set in the environment: set it, or remove "
                "it from reward.env"
            )


def check_failures(failures: Sequence[Failure], num_samples: int, max_failure_rate: float) -> None:
    """Raise InputError, which shows the first failure, if too many samples were not graded."""
    if not failures or len(failures) <= max_failure_rate * num_samples:
        return
    first = failures[0]
    raise InputError(
        f"{len(failures)} of {num_samples} samples ({len(failures) / num_samples:.1%}) could not "
        f"be graded, more than reward.max_failure_rate={max_failure_rate}; the first: "
        f"{first.summary}, "
        f"for the response {first.response[:200]!r} (all failures are in failures.jsonl; the "
        "function's output is in reward_output/)"
    )
