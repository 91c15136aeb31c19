"""Worker processes that call one function of the user, and the threads that wait for them."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from config import InputError
from rollout.grading.process import Call, Program, WorkerProcess
from rollout.grading.results import Failure, Reward

# Seconds that an event loop may take to cancel a call that has timed out.
EVENT_LOOP_DELAY = 5.0

Item = tuple[str, str, dict]  # prompt, response, row


class Job:
    """Calls of the user's function, shared by the threads that wait for workers.

    Args:
        num_results: the number of samples or episodes.
        calls: the indices that each call returns answers for.
        max_failures: after more failures than this, the remaining calls are not made.

    Attributes:
        results: what the calls returned; None for calls that were not made.
        clock: measures the time of the calls.
    """

    def __init__(self, num_results: int, calls: Sequence[Call], max_failures: float):
        self.results: list = [None] * num_results
        self.num_calls = len(calls)
        self.clock: Callable[[], float] = time.monotonic
        self._calls = iter(calls)
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

    def wait_for_calls(self) -> bool:
        """Wait until there are calls again. Returns False if there will be none."""
        return False

    def has_answer(self, worker: WorkerProcess) -> bool:
        """Wait for a worker's answer. Returns False if there may be further calls for it first."""
        return True

    def request(self, call: Call) -> dict:
        """Return the request that makes a call. Called again if the call is repeated."""
        raise NotImplementedError

    def result(self, i: int, answer: dict):
        """Turn a worker's answer into a result."""
        raise NotImplementedError

    def record(self, call: Call, answers: list[dict]) -> None:
        """Keep the results of a call, and count its failures."""
        for i, answer in zip(call, answers, strict=True):
            self.results[i] = self.result(i, answer)
            if isinstance(self.results[i], Failure):
                with self._lock:
                    self._num_failures += 1


class WorkerPool:
    """Worker processes that run one program.

    The constructor starts the first worker. More start when there is work for them, or to replace
    workers that died.

    Args:
        num_workers: the largest number of workers.
        startup_timeout: the seconds allowed for starting Python and importing the function.

    Attributes:
        concurrency: the number of calls in flight in one worker.
        seconds_per_call: the time after which a worker is killed that has not answered a call.
        parts: the names of the parts that every reward must have; None before the first reward.

    Raises:
        InputError: the function cannot be imported or called.
    """

    def __init__(self, program: Program, num_workers: int, startup_timeout: float):
        self.program = program
        self.num_workers = num_workers
        self.startup_timeout = startup_timeout
        self.concurrency = 1
        self.seconds_per_call = math.inf
        self.parts: list[str] | None = None
        self.idle = [WorkerProcess(program, startup_timeout)]
        self._busy: set[WorkerProcess] = set()
        self._is_closed = False
        self._lock = threading.Lock()

    def run(self, job: Job) -> None:
        """Make the calls of a job, as many at once as there are workers and calls in flight.

        It returns early if close() is called meanwhile, in another thread.
        """
        self._is_closed = False
        num_threads = min(self.num_workers, math.ceil(job.num_calls / self.concurrency))
        with ThreadPoolExecutor(max(num_threads, 1)) as pool:  # one thread per worker
            threads = [pool.submit(self._work, job) for _ in range(num_threads)]
            for thread in threads:
                thread.result()

    def check_parts(self, items: Sequence[Item], results: Sequence) -> list:
        """Turn rewards whose parts differ from the first reward's into failures.

        A missing part is not the same as a part of 0.
        """
        rewards = [result for result in results if isinstance(result, Reward)]
        if self.parts is None and rewards:
            self.parts = sorted(rewards[0].parts)
        checked = []
        for (_, response, row), result in zip(items, results, strict=True):
            if isinstance(result, Reward) and sorted(result.parts) != self.parts:
                returned = ", ".join(sorted(result.parts)) or "none"
                expected = ", ".join(self.parts) or "none"
                trace = f"the function returned the parts {returned}, but at first {expected}"
                result = Failure("different parts", trace, row, response)
            checked.append(result)
        return checked

    def close(self) -> None:
        """End all workers. Calls that are in flight get no results."""
        with self._lock:
            self._is_closed = True
            for worker in self._busy:
                worker.interrupt()
        while self.idle:
            self.idle.pop().kill()

    def _work(self, job: Job) -> None:
        """Make calls of a job until none is left. Replaces a worker that dies."""
        worker: WorkerProcess | None = None
        while True:
            num_pending = len(worker.pending) if worker else 0
            num_free = 0 if self._is_closed else self.concurrency - num_pending
            for call in job.next_calls(num_free):
                if worker is None:
                    worker = self._take_worker()
                worker.send(job.request(call), self.seconds_per_call, call, job.clock)
            if worker is None or not worker.pending:
                self._release(worker)
                worker = None
                if not job.wait_for_calls():
                    break
                continue
            if not job.has_answer(worker):
                continue
            received = worker.receive()
            if received is not None:
                call, answer = received
                job.record(call, answer["answers"])
            else:
                self._handle_ending(worker, job)
            if not worker.alive:
                self._release(worker)
                worker = None

    def _handle_ending(self, worker: WorkerProcess, job: Job) -> None:
        """Record the failure of the call that ended a worker, if it is known.

        Else any of the calls in flight may be the cause, so they are repeated.
        """
        if self._is_closed:
            return
        calls = list(worker.pending.values())
        culprit = self.find_culprit(calls, worker)
        if culprit is not None:
            call, trace = culprit
            calls.remove(call)
            job.record(call, [{"kind": worker.ending.kind, "trace": trace}] * len(call))
        for group in self.regroup(calls, worker):
            self._repeat(group, job)

    def find_culprit(self, calls: list[Call], worker: WorkerProcess) -> tuple[Call, str] | None:
        """Return the call that certainly ended a worker, and the trace of its failure, or None."""
        is_sure = len(calls) == 1 and worker.expired in (None, *worker.pending)
        return (calls[0], worker.ending.trace) if is_sure else None

    def regroup(self, calls: list[Call], worker: WorkerProcess) -> list[list[Call]]:
        """Return the groups in which the calls in flight are repeated after their worker ended.

        Every call is a group of its own, so the next one that ends a worker is known.
        """
        return [[call] for call in calls]

    def _repeat(self, calls: list[Call], job: Job) -> None:
        """Repeat calls, all at the same time in one worker."""
        worker = self._take_worker()
        for call in calls:
            worker.send(job.request(call), self.seconds_per_call, call, job.clock)
        while worker.alive and worker.pending:
            received = worker.receive()
            if received is not None:
                call, answer = received
                job.record(call, answer["answers"])
            else:
                self._handle_ending(worker, job)
        self._release(worker)

    def _take_worker(self) -> WorkerProcess:
        """Return an idle worker, or start one."""
        try:
            worker = self.idle.pop()
        except IndexError:
            worker = self._start_worker()
        with self._lock:
            self._busy.add(worker)
            if self._is_closed:
                worker.interrupt()
        return worker

    def _release(self, worker: WorkerProcess | None) -> None:
        """Take back a worker, if any, that has no pending calls or has ended."""
        if worker is None:
            return
        with self._lock:
            self._busy.discard(worker)
            if worker.alive:
                self.idle.append(worker)

    def _start_worker(self) -> WorkerProcess:
        try:
            return WorkerProcess(self.program, self.startup_timeout)
        except InputError as error:
            # The function could be imported before, so this is not the user's mistake.
            raise RuntimeError(f"cannot start a new process for {self.program.name}") from error


def check_weights(weights: Mapping) -> None:
    """Check the values in reward.weights.

    Raises:
        InputError: a value has the wrong type.
    """
    for name, value in weights.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise InputError(f"reward.weights.{name}={value} must be a number")


def check_environment(names: Sequence[str]) -> None:
    """Check the names in reward.env.

    Raises:
        InputError: a variable is not set.
    """
    for name in names:
        if name not in os.environ:
            raise InputError(
                f"reward.env names {name}, which is not set in the environment: set it, or remove "
                "it from reward.env"
            )
