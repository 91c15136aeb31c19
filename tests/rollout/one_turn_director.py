"""A director of episodes of one turn, which needs neither workers nor a gateway."""

import time

from rollout.episodes.jobs import EndedEpisode
from rollout.grading.clock import StoppableClock
from rollout.grading.pool import WorkerPool
from rollout.grading.results import Reward

# The tokens that the model samples in each episode, by its row.
LENGTHS = [2, 9, 3, 2]
PROMPT_IDS = [1]


class Runner(WorkerPool):
    """Worker processes that the test plays itself."""

    def __init__(self, clock: StoppableClock):
        self.clock = clock
        self.parts = None


class OneTurnDirector:
    """Plays episodes of one turn, whose reward is the number of their row.

    Attributes:
        draw: the sampling, the permitted failures and the section of the last start().
        added: number of an episode -> the row's number.
        is_running: whether the clock has run at all calls of receive().
    """

    def __init__(self, clock: StoppableClock):
        self.server = self
        self.clock = clock
        self.cast = object()
        self.draw: tuple = ()
        self.num_missing = 0
        self.num_calls = 0
        self.added: dict[int, int] = {}
        self.given_up: list[int] = []
        self.messages: list[dict] = []
        self.is_running = True

    def open(self, sampling):
        return self.cast

    def start(self, rows: list[dict], sampling, max_failures: float, section: str):
        """Begin a draw with an episode for each row."""
        self.draw = (sampling, max_failures, section)
        self.num_missing = len(rows)
        for number, row in enumerate(rows):
            self.add(self.cast, number, row)
        return self.cast

    def add(self, cast, number: int, row: dict) -> None:
        assert cast is self.cast
        row_number = row["number"]
        self.added[number] = row_number
        key = f"key {number}"
        request = {"prompt_ids": PROMPT_IDS, "max_tokens": LENGTHS[row_number], "stop": []}
        attempt = {"attempt": key, "index": number}
        self.messages += [attempt, {"id": number, "episode": key, **request}]

    def send(self, answer: dict) -> None:
        number = answer["id"]
        result = Reward(float(self.added[number]), {})
        self.num_missing -= 1
        is_over = self.num_missing == 0
        self.messages.append({"ended": [EndedEpisode(number, result, 0)], "is_over": is_over})

    def receive(self, cast, seconds: float) -> list[dict]:
        assert cast is self.cast
        self.num_calls += 1
        assert self.num_calls < 1000, "the draw does not end"
        before = self.clock()
        time.sleep(0.001)
        self.is_running &= self.clock() > before
        messages = self.messages
        self.messages = []
        return messages

    def give_up(self, cast, number: int) -> None:
        assert cast is self.cast
        self.given_up.append(number)
