"""Which messages about episodes reach which draw, and when. The gateway is a small program.

test_episode_director.py plays episodes with the real gateway.
"""

import time

import pytest
from omegaconf import OmegaConf

from config import load
from rollout.episodes.director import Cast, Director
from rollout.episodes.jobs import Limit
from rollout.episodes.runner import EpisodeRunner
from rollout.grading.results import Reward
from tests.rollout.episode_gateway import SAMPLING
from tests.rollout.small_gateway import start_gateway

SECONDS = 20
LIMITS = {"max_turns": 3, "max_episode_tokens": 70}
AGENT = """
import asyncio
from pathlib import Path
from rollout.episodes.client import EpisodeLimit

async def play(row, llm):
    while row.get("file") and not Path(row["file"]).exists():
        await asyncio.sleep(0.005)
    if row.get("fails"):
        raise ValueError
    if row.get("is_limited"):
        raise EpisodeLimit("max_turns")
    return row["value"]
"""
TRAINING = OmegaConf.create(SAMPLING | {"stop": ["x"]})
VALIDATION = OmegaConf.create(SAMPLING | {"temperature": 0.5, "max_tokens": 9})


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Return a function that makes a director, whose workers play one episode at a time."""
    (tmp_path / "agent.py").write_text(AGENT)
    made = []

    def make(num_workers: int) -> Director:
        config = load(
            "ppo.yaml",
            [
                "model.path=unused",
                "data.train_files=unused",
                f"output_dir={tmp_path}",
                f"rollout.episode={tmp_path}/agent.py:play",
                f"rollout.episode_workers={num_workers}",
                f"rollout.max_concurrent_episodes={num_workers}",
                "rollout.limit_score=-0.5",
            ],
        )
        server = start_gateway(tmp_path, monkeypatch)
        made.append(Director(server, EpisodeRunner(config), LIMITS))
        return made[-1]

    yield make
    for director in made:
        threads = [*director.runner._threads]
        director.close()
        assert director.server.process.poll() is not None
        assert director.runner.idle == []
        assert not any(thread.is_alive() for thread in threads)


@pytest.fixture
def director(make):
    return make(num_workers=1)


def receive_until(director: Director, cast: Cast, condition) -> list[dict]:
    """Return the messages about a cast, until one of them meets a condition."""
    messages: list[dict] = []
    deadline = time.monotonic() + SECONDS
    while not any(map(condition, messages)):
        assert time.monotonic() < deadline
        messages += director.receive(cast, 0.02)
    return messages


def is_last(message: dict) -> bool:
    return message.get("is_over", False)


def results_in(messages: list[dict]) -> dict:
    ended = [episode for message in messages for episode in message.get("ended", [])]
    assert len({episode.number for episode in ended}) == len(ended), "a result came twice"
    return {episode.number: episode.result for episode in ended}


def test_a_draw_has_all_results_once_after_all_that_the_gateway_reports(director):
    """And is over once. The gateway learns of each attempt on which terms it is played."""
    rows = [{"value": 2.0}, {"value": 1.0}, {"value": 5.0}]
    cast = director.start(rows, VALIDATION, 0, "validation")
    messages = receive_until(director, cast, is_last)
    kinds = [next(iter(message)) for message in messages]
    assert kinds.count("ended") == 1
    assert kinds[-1] == "ended"
    assert results_in(messages) == {i: Reward(row["value"], {}) for i, row in enumerate(rows)}
    attempts = {m["attempt"]: m["index"] for m in messages if "attempt" in m}
    assert [*attempts.values()] == [0, 1, 2]
    begun = [message["begun"] for message in messages if "begun" in message]
    assert [message["begin"] for message in begun] == [[key] for key in attempts]
    sampling = SAMPLING | {"temperature": 0.5, "max_tokens": 9}
    assert begun[0] == {**begun[0], "sampling": sampling, "section": "validation", **LIMITS}
    for _ in range(2):
        assert director.receive(cast, 0.01) == []
    assert (director.cast_of, director.endings, cast.keys) == ({}, {}, {})


def test_a_draw_without_episodes_is_over_at_once(director):
    """A replica may have none, if there are fewer prompts than replicas."""
    cast = director.start([], VALIDATION, 0, "validation")
    messages = receive_until(director, cast, is_last)
    assert messages == [{"ended": [], "is_over": True}]
    assert director.receive(cast, 0.01) == []


def test_an_attempt_is_known_before_its_messages(director):
    """A request may arrive while its key is being announced."""
    cast = director.open(TRAINING)
    send = director.server.send

    def send_and_hear_at_once(message: dict) -> None:
        send(message)
        for key in message.get("begin", ()):
            director.deliver({"episode": key, "id": 7})

    director.server.send = send_and_hear_at_once
    key = director.new_key(cast, 3)
    messages = receive_until(director, cast, lambda m: "begun" in m)
    assert messages[:2] == [{"attempt": key, "index": 3}, {"episode": key, "id": 7}]
    begun = messages[2]["begun"]
    assert (begun["section"], begun["sampling"]["stop"]) == ("rollout", ["x"])


def test_messages_wait_for_the_draw_that_they_are_about(director, tmp_path):
    """An episode of the first cast ends while the second cast receives."""
    file = tmp_path / "go on"
    training = director.open(TRAINING)
    director.add(training, 4, {"value": 4.0, "file": str(file)})
    attempt = receive_until(director, training, lambda m: "begun" in m)[0]
    file.touch()
    validation = director.start([{"value": 1.0}], VALIDATION, 0, "validation")
    messages = receive_until(director, validation, is_last)
    assert results_in(messages) == {0: Reward(1.0, {})}
    assert {m["episode"] for m in messages if "begun" in m}.isdisjoint({attempt["attempt"]})
    messages = receive_until(director, training, lambda m: "ended" in m)
    assert results_in(messages) == {4: Reward(4.0, {})}
    assert not any(map(is_last, messages)), "it goes on"
    assert director.receive(training, 0.01) == []


def test_the_gateway_forgets_all_attempts_of_an_episode(director):
    cast = director.open(TRAINING)
    keys = [director.new_key(cast, 5), director.new_key(cast, 6), director.new_key(cast, 5)]
    forgotten = []
    deliver = director.deliver

    def deliver_and_note(message: dict) -> None:
        forgotten.extend(message.get("keys", ()))
        deliver(message)

    director.deliver = deliver_and_note
    director.forget(cast, [5], {"ended": [], "is_over": False})
    receive_until(director, cast, lambda m: "ended" in m)
    assert forgotten == [keys[0], keys[2]]
    assert [*director.cast_of] == [keys[1]]


def test_messages_that_wait_are_returned_at_once(director):
    cast = director.open(TRAINING)
    cast.mailbox.append({"episode": "key"})
    start = time.monotonic()
    assert director.receive(cast, SECONDS) == [{"episode": "key"}]
    assert time.monotonic() - start < SECONDS / 2
    assert director.receive(cast, 0.0) == []


def test_an_episode_that_is_given_up_has_no_result_and_makes_room(director, tmp_path):
    """One of them plays and one waits for it; the third one is wanted."""
    file = tmp_path / "go on"
    cast = director.open(TRAINING)
    for number in range(3):
        director.add(cast, number, {"value": 1.0 + number, "file": str(file)})
    receive_until(director, cast, lambda m: "begun" in m)
    (key,) = director.cast_of
    for number in range(2):
        director.give_up(cast, number)
    messages = []
    while director.endings:
        messages += director.receive(cast, SECONDS)
    assert results_in(messages) == {}
    assert key not in director.cast_of, "the gateway rejects its calls of the model"
    before = [*director.cast_of]
    director.new_key(cast, 0)
    assert [*director.cast_of] == before, "a repeated attempt cannot call the model, either"
    file.touch()
    messages = receive_until(director, cast, lambda m: m.get("ended"))
    assert results_in(messages) == {2: Reward(3.0, {})}


def test_no_episodes_of_a_draw_begin_after_too_many_failures(director):
    rows = [{"fails": True}, {"value": 1.0}, {"fails": True}, {"value": 2.0}]
    cast = director.start(rows, TRAINING, 1, "rollout")
    messages = receive_until(director, cast, is_last)
    results = results_in(messages)
    assert [type(results[i]).__name__ for i in range(4)] == [
        "Failure",
        "Reward",
        "Failure",
        "NoneType",
    ]
    assert [message["index"] for message in messages if "attempt" in message] == [0, 1, 2]


def test_all_workers_play_the_episodes_of_a_stream(make, tmp_path):
    """Each of the two episodes waits until the other one has begun."""
    director = make(num_workers=2)
    file = tmp_path / "go on"
    cast = director.open(TRAINING)
    for number in range(2):
        director.add(cast, number, {"value": 1.0, "file": str(file)})
    begun = []
    while len(begun) < 2:
        begun += receive_until(director, cast, lambda m: "begun" in m)
        begun = [message for message in begun if "begun" in message]
    file.touch()
    results = {}
    while len(results) < 2:
        results |= results_in(receive_until(director, cast, lambda m: "ended" in m))
    assert results == {0: Reward(1.0, {}), 1: Reward(1.0, {})}


def test_a_stream_plays_after_the_runner_was_closed(director):
    """Its clock runs. A limit has the score of the settings."""
    director.runner.close()
    director.runner.clock.stop()
    cast = director.open(TRAINING)
    before = director.runner.clock()
    director.add(cast, 0, {"is_limited": True})
    messages = receive_until(director, cast, lambda m: "ended" in m)
    assert results_in(messages) == {0: Limit("max_turns", -0.5)}
    assert director.runner.clock() > before


def test_a_worker_that_cannot_start_again_is_an_error_of_the_draw(director, tmp_path):
    """Otherwise the draw would never end."""
    cast = director.open(TRAINING)
    for number in range(2):
        director.add(cast, number, {"value": 1.0, "file": "nowhere"})
    receive_until(director, cast, lambda m: "begun" in m)
    (tmp_path / "agent.py").write_text("import nothing_of_this_name")
    (worker,) = director.runner._busy
    worker.interrupt()
    with pytest.raises(RuntimeError, match="cannot start a new process"):
        receive_until(director, cast, is_last)
