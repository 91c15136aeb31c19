"""Episodes as calls for workers: what a worker is asked for, and what becomes of its answers."""

import os
import threading
import time

import pytest

from rollout.episodes.jobs import EndedEpisode, EpisodeJob, EpisodeStream, Limit
from rollout.grading.clock import StoppableClock
from rollout.grading.results import Failure, Reward

SECONDS = 5


def key_of(i: int) -> str:
    return f"key {i}"


@pytest.fixture
def stream():
    clock = StoppableClock(StoppableClock.make_file())
    stream = EpisodeStream(key_of, -1.0, clock)
    yield stream
    stream.close()
    if threading.get_ident() in stream._wakers:
        stream.wait_for_calls()
    os.close(clock.file)


def request(i: int) -> dict:
    return {"row": {"number": i}, "base_url": "http://x"}


@pytest.mark.parametrize(
    "answer, result, tool_errors",
    [
        ({"score": 2.0, "parts": {}, "tool_errors": 3}, Reward(2.0, {}), 3),
        ({"limit": "max_turns"}, Limit("max_turns", -1.0), 0),
        (
            {"kind": "raised", "trace": "no", "tool_errors": 1},
            Failure("raised", "no", {"number": 4}, ""),
            1,
        ),
    ],
)
def test_answers_are_read(answer, result, tool_errors):
    before = dict(answer)
    ended = EndedEpisode.read(7, answer, {"number": 4}, -1.0)
    assert ended == EndedEpisode(7, result, tool_errors)
    assert answer == before


def test_each_episode_of_a_job_has_its_request_key_and_tool_errors():
    job = EpisodeJob([request(0), request(1)], key_of, None, 5)
    assert job.request([1]) == {**request(1), "number": 2, "api_key": "key 1"}
    answer = {"limit": "max_turns", "tool_errors": 3}
    assert job.result(1, answer) == Limit("max_turns", None)
    assert job.tool_errors == [0, 3]


def test_episodes_begin_in_order_and_as_many_as_are_wanted(stream):
    stream.add({5: request(5), 3: request(3)})
    stream.add({8: request(8)})
    assert stream.next_calls(2) == [[5], [3]]
    assert stream.next_calls(-1) == []
    assert stream.wait_for_calls()
    assert stream.next_calls(9) == [[8]]
    assert stream.request([3]) == {
        **request(3),
        "is_stoppable": True,
        "number": 4,
        "api_key": "key 3",
    }


def test_time_between_draws_is_not_an_episodes(stream):
    """Otherwise the trainer's watch would kill a worker whose episode waits for the next draw."""
    stream.clock.stop()
    stopped_at = stream.clock()
    time.sleep(0.01)
    assert stream.clock() == stopped_at
    job = EpisodeJob([request(0)], key_of, None, 5)
    start = job.clock()
    time.sleep(0.01)
    assert job.clock() > start, "all episodes of a job are played in one draw"


def test_results_are_taken_once(stream):
    stream.add({5: request(5), 3: request(3)})
    stream.next_calls(2)
    stream.record([3], [{"kind": "raised", "trace": "no"}])
    assert stream.take_ended() == [EndedEpisode(3, Failure("raised", "no", {"number": 3}, ""), 0)]
    stream.record([5], [{"limit": "max_turns"}])
    assert stream.take_ended() == [EndedEpisode(5, Limit("max_turns", -1.0), 0)]
    assert stream.take_ended() == []


def test_an_episode_that_is_given_up_does_not_begin_or_has_no_result(stream):
    """Its number is unknown afterwards; giving it up later does no harm."""
    stream.add({1: request(1), 2: request(2), 3: request(3)})
    stream.give_up(2)
    assert stream.next_calls(9) == [[1], [3]]
    stream.give_up(1)
    for number in (1, 3):
        stream.record([number], [{"limit": "max_turns"}])
    assert [ended.number for ended in stream.take_ended()] == [3]
    stream.give_up(1)
    assert not stream._requests
    assert not stream._given_up


def test_no_episode_begins_in_a_closed_stream(stream):
    stream.add({1: request(1)})
    stream.close()
    assert stream.next_calls(1) == []
    assert not stream.wait_for_calls()


def test_a_thread_that_waits_for_episodes_is_woken(stream):
    """By the first one, and by the end, after which it forgets its waker."""
    seen = []

    def work() -> None:
        while stream.wait_for_calls():
            seen.append(stream.next_calls(1))
            begun.set()

    begun = threading.Event()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    stream.add({1: request(1)})
    assert begun.wait(SECONDS)
    (waker,) = stream._wakers.values()
    os.set_blocking(waker, False)
    stream.add({})
    assert os.eventfd_read(waker) == 1, "it may wait for a worker's answer instead"
    time.sleep(0.1)  # until it waits
    stream.close()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert seen == [[[1]]]
    assert stream._wakers == {}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.eventfd_write(waker, 1)


def test_an_error_of_a_thread_is_raised_and_ends_the_stream(stream):
    stream.add({1: request(1)})
    stream.fail(OSError("no memory"))
    with pytest.raises(OSError, match="no memory"):
        stream.take_ended()
    assert stream.next_calls(1) == []
