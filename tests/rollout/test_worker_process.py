"""The trainer's end of a worker process: answers, deadlines and the reasons of its end."""

import json
import os
import sys
import threading
import time

import pytest

from config import InputError
from rollout.grading import process
from rollout.grading.clock import StoppableClock
from rollout.grading.process import Ending, Program, WorkerProcess, describe_exit

# Answers each request with what it asks for: an answer, after `late` further requests, or text.
WORKER = """
import json, sys
waiting = []
for line in sys.stdin:
    request = json.loads(line)
    if "text" in request:
        sys.stdout.write(request["text"])
    if "exit" in request:
        sys.exit(request["exit"])
    if "answer" in request:
        waiting.append([request.get("late", 0), {**request["answer"], "token": request["token"]}])
    due = [answer for late, answer in waiting if late == 0]
    waiting = [[late - 1, answer] for late, answer in waiting if late]
    sys.stdout.write("".join(json.dumps(answer) + "\\n" for answer in due))
    sys.stdout.flush()
"""
SECONDS = 20


def start(settings: dict) -> WorkerProcess:
    command = [sys.executable, "-S", "-c", WORKER]
    program = Program("reward.function=f.py:f", command, dict(os.environ), settings)
    return WorkerProcess(program, SECONDS)


@pytest.fixture
def worker():
    worker = start({"answer": {"ready": True}})
    yield worker
    worker.kill()


def test_answers_belong_to_their_calls_in_any_order(worker):
    """Two of them arrive together; the second one is read without waiting for the worker."""
    assert worker.ready == {"ready": True}
    for call, late in (([0], 3), ([1, 2], 2), ([3], 0)):
        worker.send({"answer": {"of": call}, "late": late}, SECONDS, call)
    assert worker.receive() == ([3], {"of": [3]})
    assert len(worker.pending) == len(worker.deadlines) == 2
    worker.send({}, SECONDS, [4])
    assert worker.receive() == ([0], {"of": [0]})
    assert worker.receive() == ([1, 2], {"of": [1, 2]})
    assert [*worker.pending.values()] == [[4]]
    assert worker.alive


@pytest.mark.parametrize("times", [(SECONDS, 0.1), (0.1, SECONDS), (0.1, 0.3)])
def test_the_call_with_the_least_time_left_times_out(worker, times):
    """Whichever was sent first. The other call is pending when the worker has ended."""
    begin = time.monotonic()
    for number, seconds in enumerate(times):
        worker.send({}, seconds, [number])
    assert worker.receive() is None
    assert time.monotonic() - begin < SECONDS / 2
    expired = times.index(0.1)
    assert worker.pending[worker.expired] == [expired]
    assert worker.ending == Ending("timed out", "took more than 0.1 s")
    assert not worker.alive


def test_an_answered_call_has_no_deadline(worker):
    worker.send({"answer": {}}, 0.5, [0])
    worker.send({}, SECONDS, [1])
    assert worker.receive() == ([0], {})
    waker = os.eventfd(1, os.EFD_NONBLOCK)
    time.sleep(0.6)
    assert not worker.wait_for_answer(waker), "another thread has interrupted"
    with pytest.raises(BlockingIOError):
        os.eventfd_read(waker)
    os.close(waker)
    assert worker.expired is None


def test_a_call_has_no_time_limit_while_its_clock_is_stopped(worker):
    clock = StoppableClock(StoppableClock.make_file())
    clock.stop()
    worker.send({}, 0.05, [0], clock)
    waker = os.eventfd(0)
    timer = threading.Timer(0.3, os.eventfd_write, [waker, 1])
    timer.start()
    assert not worker.wait_for_answer(waker)
    assert worker.expired is None
    clock.start()
    assert worker.receive() is None
    assert worker.ending == Ending("timed out", "took more than 0.05 s")
    timer.join()
    os.close(waker)
    os.close(clock.file)


def test_waiting_ends_with_an_answer_and_leaves_later_interruptions(worker):
    waker = os.eventfd(0)
    worker.send({"answer": {"late": 1}, "late": 1}, SECONDS, [0])
    worker.send({"answer": {"late": 0}}, SECONDS, [1])
    for _ in range(2):
        assert worker.wait_for_answer(waker)
        assert worker.receive() is not None
    os.eventfd_write(waker, 1)
    assert not worker.wait_for_answer(waker)
    os.close(waker)


@pytest.mark.parametrize(
    "request_of_call, kind, trace",
    [
        ({"exit": 3}, "died", "ended with exit code 3"),
        ({"text": "no JSON\n"}, "forged", "wrote to the pipe for answers"),
        ({"text": json.dumps({"token": "0"}) + "\n"}, "forged", "wrote to the pipe for answers"),
        ({"text": "[]\n"}, "forged", "wrote to the pipe for answers"),
        # It was ended in the middle of an answer.
        ({"text": '{"token": ', "exit": 3}, "died", "ended with exit code 3"),
    ],
)
def test_the_reason_why_a_worker_has_ended(worker, request_of_call, kind, trace):
    worker.send(request_of_call, SECONDS, [0])
    assert worker.receive() is None
    assert worker.ending == Ending(kind, trace)
    assert not worker.alive
    assert [*worker.pending.values()] == [[0]]


def test_a_worker_whose_last_answer_came_after_its_time_is_not_used_again(worker):
    """It was killed, although its answer was already in the pipe."""
    for call in ([0], [1]):
        worker.send({"answer": {"of": call}}, SECONDS, call)
    assert worker.receive() == ([0], {"of": [0]})
    waker = os.eventfd(0)
    assert worker.wait_for_answer(waker)
    os.close(waker)
    (worker.expired,) = worker.pending
    worker.interrupt()
    assert worker.receive() == ([1], {"of": [1]})
    assert not worker.alive


def test_an_answer_without_end_is_forged(worker, monkeypatch):
    """It is read up to a limit, not until memory is full. The worker still runs."""
    monkeypatch.setattr(process, "MAX_ANSWER_BYTES", 1000)
    worker.send({"text": "x" * 1200}, SECONDS, [0])
    assert worker.receive() is None
    assert worker.ending == Ending("forged", "wrote to the pipe for answers")


def test_a_long_answer_is_cut_before_it_is_read_as_json(worker, monkeypatch):
    monkeypatch.setattr(process, "MAX_ANSWER_BYTES", 1000)
    worker.send({"answer": {"text": "x" * 1200}}, SECONDS, [0])
    assert worker.receive() is None
    assert worker.ending == Ending("forged", "wrote to the pipe for answers")


def test_a_worker_that_cannot_start_is_an_error():
    with pytest.raises(InputError, match="^no such function$"):
        start({"answer": {"error": "no such function"}})
    message = "^reward.function=f.py:f: while it was imported, its process ended with exit code 5$"
    with pytest.raises(InputError, match=message):
        start({"exit": 5})


def test_exit_codes_are_described():
    assert describe_exit(-9) == "ended by signal SIGKILL (out of memory?)"
    assert describe_exit(-11) == "ended by signal SIGSEGV"
    assert describe_exit(0) == "ended with exit code 0"
