"""Episodes that continue after other draws: the gateway and workers are real, the test samples."""

import os
import signal
import threading
import time

import pytest
from omegaconf import OmegaConf

from config import load
from rollout.episodes.director import Cast, Director
from rollout.episodes.runner import EpisodeRunner
from rollout.episodes.server import GatewayServer
from rollout.grading.clock import StoppableClock
from rollout.grading.results import Reward
from tests.rollout.episode_gateway import SAMPLING, gateway_settings

SECONDS = 60
LIMIT = 1.5
PAUSE = 2 * LIMIT
LIMITS = {"max_turns": None, "max_episode_tokens": None}
AGENT = """
import asyncio
import time

async def play(row, llm):
    total = 0
    for seconds in row["tools"]:
        reply = await llm.generate(row["ids"])
        total += sum(reply.token_ids)
        await asyncio.sleep(seconds)
    if row.get("blocks"):
        time.sleep(600)
    return total
"""


class Trainer:
    """The test's part: it receives the messages of a cast, and answers requests.

    Attributes:
        results: number of an episode -> its result.
        requests: the requests that were received, and are not answered.
        attempts: number of an episode -> the API keys of its attempts.
    """

    def __init__(self, director: Director, cast: Cast):
        self.director = director
        self.cast = cast
        self.results: dict = {}
        self.requests: list[dict] = []
        self.attempts: dict[int, list[str]] = {}
        self.is_over = False

    def receive(self) -> None:
        for message in self.director.receive(self.cast, 0.05):
            if "attempt" in message:
                self.attempts.setdefault(message["index"], []).append(message["attempt"])
            elif "ended" in message:
                self.results |= {one.number: one.result for one in message["ended"]}
                self.is_over = message["is_over"]
            elif "id" in message:
                self.requests.append(message)

    def receive_until(self, condition) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline
            self.receive()

    def answer(self, *token_ids: int) -> None:
        """Answer the first request."""
        request = self.requests.pop(0)
        self.director.server.send(
            {
                "id": request["id"],
                "token_ids": token_ids,
                "log_probs": [-0.5] * len(token_ids),
                "finish_reason": "stop",
            }
        )


@pytest.fixture(scope="module")
def server(model_path):
    server = GatewayServer(gateway_settings(model_path))
    yield server
    server.close()


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    file = tmp_path_factory.mktemp("agent") / "agent.py"
    file.write_text(AGENT)
    return file


@pytest.fixture
def make(server, agent, tmp_path):
    """Return a function that makes a director."""
    made = []

    def make(*settings: str) -> Director:
        config = load(
            "ppo.yaml",
            [
                "model.path=unused",
                "data.train_files=unused",
                f"output_dir={tmp_path}",
                f"rollout.episode={agent}:play",
                "rollout.episode_workers=1",
                *settings,
            ],
        )
        made.append(Director(server, EpisodeRunner(config), LIMITS))
        return made[-1]

    yield make
    for director in made:
        director.runner.close()
        director.pool.shutdown()
        # The next test uses the same gateway.
        server.send({"end": list(director.cast_of), "number": 0})
        while {"ended": 0} not in server.receive(1.0):
            pass


def opened(director: Director) -> Trainer:
    return Trainer(director, director.open(OmegaConf.create(SAMPLING)))


def started(director: Director, rows: list[dict]) -> Trainer:
    sampling = OmegaConf.create(SAMPLING | {"max_tokens": 9})
    return Trainer(director, director.start(rows, sampling, 0, "validation"))


def row(*tools: float, **more) -> dict:
    """Return the row of an episode whose tools take these seconds, one after each turn."""
    return {"ids": [5, 6], "tools": tools, **more}


@pytest.mark.slow
def test_a_validation_neither_answers_nor_loses_the_requests_of_others(make):
    """Episode 0 is suspended in its await; the request of episode 1 arrives meanwhile."""
    director = make()
    training = opened(director)
    director.add(training.cast, 0, row(0.0))
    director.add(training.cast, 1, row(0.5, 0.0))
    training.receive_until(lambda: len(training.requests) == 2)
    training.requests.sort(key=lambda r: r["episode"] != training.attempts[1][0])
    training.answer(1)

    validation = started(director, [row(0.0, 0.7, 0.0)] * 2)
    while not validation.is_over:
        validation.receive()
        while validation.requests:
            assert validation.requests[0]["max_tokens"] == 9
            validation.answer(7)
    assert validation.results == {i: Reward(21.0, {}) for i in range(2)}

    held = [message["episode"] for message in training.cast.mailbox if "id" in message]
    assert held == training.attempts[1]
    training.receive_until(lambda: len(training.requests) == 2)
    for _ in range(2):
        training.answer(2)
    training.receive_until(lambda: len(training.results) == 2)
    assert training.results == {0: Reward(2.0, {}), 1: Reward(3.0, {})}
    assert not training.is_over
    assert director.cast_of == {}, "keys of episodes that have ended are forgotten"
    assert director.endings == {}


def test_an_episode_may_end_between_two_draws(make):
    director = make()
    training = opened(director)
    director.add(training.cast, 0, row(0.3))
    training.receive_until(lambda: training.requests)
    training.answer(4)
    validation = started(director, [row(0.8)])
    validation.receive_until(lambda: validation.requests)
    validation.answer(1)
    validation.receive_until(lambda: validation.is_over)
    assert training.results == {}
    training.receive_until(lambda: training.results)
    assert training.results == {0: Reward(4.0, {})}


@pytest.mark.slow
def test_time_between_draws_does_not_count(make):
    """But the time of draws does, and that of other episodes meanwhile."""
    director = make(f"rollout.episode_timeout={LIMIT}")
    clock = director.runner.clock
    training = opened(director)
    director.add(training.cast, 0, row(0.0))
    director.add(training.cast, 1, row(0.0, 600))
    training.receive_until(lambda: len(training.requests) == 2)
    clock.stop()
    validation = started(director, [row(600)])
    validation.receive_until(lambda: validation.requests)
    validation.answer(1)
    validation.receive_until(lambda: validation.is_over)
    assert validation.results[0].kind == "timed out"
    time.sleep(PAUSE)
    clock.start()
    start = time.monotonic()
    for _ in range(2):
        training.answer(3)
    training.receive_until(lambda: len(training.results) == 2 or training.requests)
    if training.requests:
        training.answer(3)
    training.receive_until(lambda: len(training.results) == 2)
    assert training.results[0] == Reward(3.0, {})
    assert training.results[1].kind == "timed out"
    assert training.results[1].trace.endswith(f"took more than {LIMIT} s")
    assert time.monotonic() - start < PAUSE


@pytest.mark.slow
def test_a_process_that_is_blocked_is_killed_when_the_time_of_draws_is_over(make):
    """The trainer's own watch does not count the time between draws, either."""
    director = make(f"rollout.episode_timeout={LIMIT}")
    training = opened(director)
    director.add(training.cast, 0, row(0.0, blocks=True))
    training.receive_until(lambda: training.requests)
    training.answer(3)
    time.sleep(0.3)
    director.runner.clock.stop()
    time.sleep(LIMIT + 6)
    training.receive()
    assert training.results == {}
    director.runner.clock.start()
    training.receive_until(lambda: training.results)
    assert training.results[0].kind == "timed out"


def test_episodes_whose_worker_dies_between_draws_begin_anew(make):
    director = make()
    training = opened(director)
    for number in range(2):
        director.add(training.cast, number, row(0.0, 0.0))
    training.receive_until(lambda: len(training.requests) == 2)
    training.answer(1)
    training.receive_until(lambda: len(training.requests) == 2)
    director.runner.clock.stop()
    (worker,) = director.runner._busy
    os.killpg(worker.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + SECONDS
    while worker.alive:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    director.runner.clock.start()
    training.requests.clear()
    for token in (10, 20, 30, 40):
        training.receive_until(lambda: training.requests)
        second_attempts = [keys[1:] for keys in training.attempts.values()]
        assert [training.requests[0]["episode"]] in second_attempts
        training.answer(token)
    training.receive_until(lambda: len(training.results) == 2)
    assert sorted(result.score for result in training.results.values()) == [30.0, 70.0]


def test_an_episode_that_was_alone_when_its_worker_died_has_failed(make):
    director = make()
    training = opened(director)
    director.add(training.cast, 0, row(0.0))
    training.receive_until(lambda: training.requests)
    director.runner.clock.stop()
    (worker,) = director.runner._busy
    os.killpg(worker.process.pid, signal.SIGKILL)
    training.receive_until(lambda: training.results)
    assert training.results[0].kind == "died"


def test_episodes_that_are_given_up_make_room_for_others(make):
    director = make("rollout.max_concurrent_episodes=1")
    training = opened(director)
    for number in range(3):
        director.add(training.cast, number, row(0.0))
    training.receive_until(lambda: training.requests)
    assert list(training.attempts) == [0], "one at a time"
    director.give_up(training.cast, 0)
    director.give_up(training.cast, 1)
    training.requests.clear()
    training.receive_until(lambda: training.requests)
    assert list(training.attempts) == [0, 2]
    training.answer(6)
    training.receive_until(lambda: training.results)
    assert training.results == {2: Reward(6.0, {})}


def test_close_ends_episodes_that_are_suspended(make):
    director = make()
    training = opened(director)
    for number in range(5):
        director.add(training.cast, number, row(0.0))
    training.receive_until(lambda: len(training.requests) == 5)
    director.runner.clock.stop()
    processes = [worker.process for worker in director.runner._busy]
    num_threads = threading.active_count()
    director.runner.close()
    assert [process.poll() for process in processes] == [-signal.SIGKILL] * len(processes)
    assert threading.active_count() < num_threads
    assert training.results == {}


def test_a_worker_that_cannot_start_any_more_is_an_error_of_the_trainer(make, agent):
    director = make()
    training = opened(director)
    for number in range(2):
        director.add(training.cast, number, row(0.0))
    training.receive_until(lambda: len(training.requests) == 2)
    content = agent.read_text()
    agent.write_text("import nothing_of_this_name")
    try:
        (worker,) = director.runner._busy
        os.killpg(worker.process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="cannot start a new process"):
            training.receive_until(lambda: training.results)
    finally:
        agent.write_text(content)


def test_a_clock_that_is_stopped():
    file = StoppableClock.make_file()
    clock = StoppableClock(file)
    other = StoppableClock(file)
    assert clock() == pytest.approx(time.monotonic(), abs=0.01)
    clock.start()
    assert clock() == pytest.approx(time.monotonic(), abs=0.01), "it runs already"
    clock.stop()
    stopped_at = other()
    time.sleep(0.05)
    clock.stop()
    assert other() == clock() == stopped_at
    clock.start()
    time.sleep(0.05)
    assert stopped_at + 0.05 <= other() < time.monotonic() - 0.05
    os.close(file)
