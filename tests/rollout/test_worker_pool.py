"""Several workers, and the calls that they make. The workers of a few lines import nothing."""

import math
import os
import sys
import threading
import time

import pytest

from rollout.grading.pool import Job, WorkerPool
from rollout.grading.process import Call, Program
from rollout.grading.results import Failure, Reward

# Notes that it has started. Then it sleeps, and ends or answers with the double of each index.
WORKER = """
import json, os, sys, time
settings = json.loads(sys.stdin.readline())
with open(settings["starts"], "a") as file:
    file.write("x")
print(json.dumps({"token": settings["token"]}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    time.sleep(request["seconds"])
    if request["exit"]:
        os._exit(request["exit"])
    answers = [{"score": 2 * i} for i in request["call"]]
    print(json.dumps({"token": request["token"], "answers": answers}), flush=True)
"""
SECONDS = 20  # for an answer, on a busy machine


class Calls(Job):
    """Calls that take some seconds; some of them end their worker.

    requests: the calls that were made, in their order.
    """

    def __init__(self, calls: list[Call], seconds: float = 0.0, ending: Call = ()):
        super().__init__(sum(map(len, calls)), calls, math.inf)
        self.seconds = seconds
        self.ending = ending
        self.requests: list[Call] = []

    def request(self, call: Call) -> dict:
        self.requests.append(call)
        code = 3 if set(call) & set(self.ending) else 0
        return {"call": call, "seconds": self.seconds, "exit": code}

    def result(self, i: int, answer: dict):
        if "score" in answer:
            return answer["score"]
        return Failure(**answer, row={}, response="")


@pytest.fixture
def make_pool(tmp_path):
    pools = []

    def make(num_workers: int, concurrency: int = 1, seconds: float = SECONDS) -> WorkerPool:
        command = [sys.executable, "-S", "-c", WORKER]
        settings = {"starts": str(tmp_path / "starts")}
        program = Program("reward.function=f.py:f", command, dict(os.environ), settings)
        pool = WorkerPool(program, num_workers, SECONDS)
        pool.concurrency = concurrency
        pool.seconds_per_call = seconds
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def num_starts(tmp_path):
    """A function: how many workers have started."""
    return lambda: len((tmp_path / "starts").read_text())


@pytest.mark.parametrize("num_calls, concurrency, expected", [(1, 4, 1), (5, 4, 2), (8, 4, 2)])
def test_as_many_workers_start_as_calls_need(
    make_pool, num_starts, num_calls, concurrency, expected
):
    pool = make_pool(3, concurrency)
    job = Calls([[i] for i in range(num_calls)], seconds=0.05)
    pool.run(job)
    assert job.results == [2 * i for i in range(num_calls)]
    assert num_starts() <= expected
    assert all(worker.alive for worker in pool.idle)


def test_a_call_that_ends_its_worker_fails_alone(make_pool, num_starts):
    """The others that were in flight are made again. A call may grade several samples."""
    pool = make_pool(1, concurrency=4)
    job = Calls([[0], [1, 2], [3], [4], [5]], ending=[2])
    pool.run(job)
    assert [job.results[i] for i in (0, 3, 4, 5)] == [0, 6, 8, 10]
    failures = job.results[1:3]
    assert [(f.kind, f.trace) for f in failures] == [("died", "ended with exit code 3")] * 2
    assert all(worker.alive for worker in pool.idle), "no worker that has ended is used again"
    assert num_starts() == 3, "one in place of each of the two that have ended"
    again = Calls([[0], [1]])
    pool.run(again)
    assert again.results == [0, 2]
    assert num_starts() == 3, "workers that have repeated calls are used again"


class OneWrong(Calls):
    """Calls of which the last one cannot be requested; the first one is not requested before."""

    def __init__(self, calls: list[Call]):
        super().__init__(calls)
        self.has_failed = threading.Event()

    def request(self, call: Call) -> dict:
        if call == [len(self.results) - 1]:
            self.has_failed.set()
            raise RuntimeError(f"call {call[0]} is wrong")
        assert self.has_failed.wait(SECONDS)
        return super().request(call)


def test_an_error_in_any_thread_is_raised(make_pool):
    """Otherwise its results would be missing without a word."""
    pool = make_pool(2)
    with pytest.raises(RuntimeError, match="call 1 is wrong"):
        pool.run(OneWrong([[0], [1]]))


def test_after_close_no_further_call_is_made(make_pool, num_starts):
    pool = make_pool(1)
    job = Calls([[i] for i in range(100)], seconds=0.05)
    thread = threading.Thread(target=pool.run, args=[job])
    thread.start()
    deadline = time.monotonic() + SECONDS
    while job.results[0] is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pool.close()
    thread.join(SECONDS)
    assert not thread.is_alive()
    num_requests = len(job.requests)
    assert num_requests < 50
    assert job.results[num_requests - 1 :] == [None] * (101 - num_requests)
    assert num_starts() == 1, "none to replace the one that was ended"
    assert pool.idle == []
    later = Calls([[0]])
    pool.run(later)
    assert later.results == [0]


def test_a_worker_that_a_thread_takes_while_the_pool_closes_is_ended(make_pool):
    """The end of a run does not wait for a call that begins too late."""
    pool = make_pool(1)
    pool.close()
    worker = pool._take_worker()
    start = time.monotonic()
    worker.send({"call": [0], "seconds": SECONDS, "exit": 0}, 2 * SECONDS, [0])
    assert worker.receive() is None
    assert time.monotonic() - start < SECONDS / 2
    assert not worker.alive


def test_a_call_whose_time_is_up_while_another_one_ends_is_not_blamed(make_pool):
    """The first call takes too long, but its answer arrives before its worker is killed.

    Then it is not known whether the second one, which was in flight, would have ended the worker.
    """
    pool = make_pool(1)
    worker = pool._take_worker()
    worker.send({"call": [0], "seconds": 0, "exit": 0}, SECONDS, [0])
    worker.send({"call": [1], "seconds": 0, "exit": 3}, SECONDS, [1])
    first, second = worker.pending
    worker.expired = first
    assert worker.receive()[0] == [0]
    assert worker.receive() is None
    calls = list(worker.pending.values())
    assert calls == [[1]]
    assert pool.find_culprit(calls, worker) is None
    worker.expired = second
    assert pool.find_culprit(calls, worker) == ([1], "ended with exit code 3")
    worker.expired = None
    assert pool.find_culprit(calls, worker) == ([1], "ended with exit code 3")
    assert pool.find_culprit([[1], [2]], worker) is None


def test_the_order_of_parts_does_not_matter(make_pool):
    rewards = [Reward(3.0, {"b": 1.0, "a": 2.0}), Reward(3.0, {"a": 1.0, "b": 2.0})]
    pool = make_pool(1)
    items = [("prompt", "response", {})] * 4
    fewer = Reward(1.0, {"a": 1.0})
    more = Reward(6.0, {"a": 1.0, "b": 2.0, "c": 3.0})
    *checked, lacks_one, has_one_more = pool.check_parts(items, [*rewards, fewer, more])
    assert checked == rewards
    assert lacks_one.trace == "the function returned the parts a, but at first a, b"
    assert has_one_more.trace == "the function returned the parts a, b, c, but at first a, b"
