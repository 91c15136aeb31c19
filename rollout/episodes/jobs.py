"""Episodes as calls for the workers: those of one draw, and those that continue in later draws."""

from __future__ import annotations

import math
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollout.grading.clock import StoppableClock
from rollout.grading.pool import Job
from rollout.grading.process import Call, WorkerProcess
from rollout.grading.results import Failure, Reward


@dataclass(frozen=True)
class Limit:
    """The result of a truncated episode, whose function did not catch EpisodeLimit.

    Attributes:
        code: max_turns or max_episode_tokens.
        score: rollout.limit_score; None if the episode is left out of training.
    """

    code: str
    score: float | None


EpisodeResult = Reward | Failure | Limit


class EpisodeJob(Job):
    """The episodes of one play().

    Args:
        requests: the requests of the episodes, without number and API key.
        new_key: called with an episode's index; returns the API key for one attempt.
        limit_score: see Limit.

    Attributes:
        tool_errors: for each episode, the calls of tools whose result is an error.
    """

    def __init__(
        self,
        requests: Sequence[dict],
        new_key: Callable[[int], str],
        limit_score: float | None,
        max_failures: float,
    ):
        super().__init__(len(requests), [[i] for i in range(len(requests))], max_failures)
        self._requests = requests
        self._new_key = new_key
        self._limit_score = limit_score
        self.tool_errors = [0] * len(requests)

    def request(self, call: Call) -> dict:
        (i,) = call
        return request_of(call, self._requests[i], self._new_key(i))

    def result(self, i: int, answer: dict) -> EpisodeResult:
        ended = EndedEpisode.read(i, answer, self._requests[i]["row"], self._limit_score)
        self.tool_errors[i] = ended.tool_errors
        return ended.result


class EpisodeStream(Job):
    """Episodes that arrive one after another, and may go on while the trainer trains.

    Args:
        new_key, limit_score: as for EpisodeJob.
        clock: measures the time of the episodes.
    """

    def __init__(
        self,
        new_key: Callable[[int], str],
        limit_score: float | None,
        clock: StoppableClock,
    ):
        super().__init__(0, [], math.inf)
        self.clock = clock
        self._ended: queue.SimpleQueue[EndedEpisode] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._new_key = new_key
        self._limit_score = limit_score
        self._requests: dict[int, dict] = {}
        self._given_up: set[int] = set()
        self._waiting: deque[int] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._wakers: dict[int, int] = {}  # thread -> eventfd

    def add(self, requests: dict[int, dict]) -> None:
        """Begin episodes. requests: by the numbers of the episodes, each of which is used once."""
        with self._changed:
            self._requests |= requests
            self._waiting += requests
            self._wake()

    def give_up(self, i: int) -> None:
        """Ignore an episode's result, and do not begin the episode if it has not begun."""
        with self._changed:
            if i in self._waiting:
                self._waiting.remove(i)
                del self._requests[i]
            elif i in self._requests:
                self._given_up.add(i)

    def close(self) -> None:
        """Make the threads end. No further episodes begin."""
        with self._changed:
            self._is_closed = True
            self._wake()

    def take_ended(self) -> list[EndedEpisode]:
        """Return the episodes that have ended since the last call.

        Raises the error of a thread that cannot play episodes any more.
        """
        if self._error is not None:
            raise self._error
        return [self._ended.get() for _ in range(self._ended.qsize())]

    def _wake(self) -> None:
        """Wake all threads. The caller holds the lock."""
        self._changed.notify_all()
        for waker in self._wakers.values():
            os.eventfd_write(waker, 1)

    # -- called by the threads that wait for workers -----------------------------------------------

    def next_calls(self, count: int) -> list[Call]:
        with self._changed:
            # From now on, add() wakes this thread, wherever it waits.
            self._waker()
            num_taken = 0 if self._is_closed else max(0, min(count, len(self._waiting)))
            return [[self._waiting.popleft()] for _ in range(num_taken)]

    def wait_for_calls(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if self._is_closed:
                os.close(self._wakers.pop(threading.get_ident()))
            return not self._is_closed

    def has_answer(self, worker: WorkerProcess) -> bool:
        with self._changed:
            waker = self._waker()
        return worker.wait_for_answer(waker)

    def _waker(self) -> int:
        """Return the eventfd of this thread. The caller holds the lock."""
        thread = threading.get_ident()
        if thread not in self._wakers:
            self._wakers[thread] = os.eventfd(0)
        return self._wakers[thread]

    def request(self, call: Call) -> dict:
        (i,) = call
        request = self._requests[i] | {"is_stoppable": True}
        return request_of(call, request, self._new_key(i))

    def record(self, call: Call, answers: list[dict]) -> None:
        (i,) = call
        (answer,) = answers
        with self._changed:
            request = self._requests.pop(i)
            is_given_up = i in self._given_up
            self._given_up.discard(i)
        if not is_given_up:
            self._ended.put(EndedEpisode.read(i, answer, request["row"], self._limit_score))

    def fail(self, error: BaseException) -> None:
        """Make take_ended() raise an error. No episode continues after it."""
        self._error = error
        self.close()


@dataclass(frozen=True)
class EndedEpisode:
    """The result of an episode, and its calls of tools that raised an error.

    These are known only for classes, whose tools we call.
    """

    number: int
    result: EpisodeResult
    tool_errors: int

    @staticmethod
    def read(number: int, answer: dict, row: dict, limit_score: float | None) -> EndedEpisode:
        """Return the result in a worker's answer. limit_score: see Limit."""
        fields = dict(answer)
        tool_errors = fields.pop("tool_errors", 0)
        if "score" in fields:
            result = Reward(**fields)
        elif "limit" in fields:
            result = Limit(fields["limit"], limit_score)
        else:
            result = Failure(**fields, row=row, response="")
        return EndedEpisode(number, result, tool_errors)


def request_of(call: Call, request: dict, key: str) -> dict:
    """Return the request that starts an episode in a worker. key: the API key of this attempt."""
    return {**request, "number": number_of(call), "api_key": key}


def number_of(call: Call) -> int:
    """Return the number that stands for an episode in a worker's note; it is above 0."""
    return call[0] + 1
