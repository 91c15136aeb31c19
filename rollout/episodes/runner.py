"""Play episodes in worker processes, many at once, and return their rewards in order."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from config import InputError
from data.prompts import without_reply
from data.rows import read_messages
from data.shapes import read_shape
from rollout.grading.pool import (
    EVENT_LOOP_DELAY,
    Job,
    WorkerPool,
    check_environment,
    check_weights,
)
from rollout.grading.process import Call, Program, WorkerProcess, worker_environment
from rollout.grading.results import Failure, Reward

WORKER = "rollout.episodes.worker"
MIN_PYTHON = (3, 11)
LOOPBACK = "127.0.0.1,localhost"


@dataclass(frozen=True)
class Limit:
    """An episode that ended because EpisodeLimit left the user's function: it is truncated.

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
        return {**self._requests[i], "number": number_of(call), "api_key": self._new_key(i)}

    def result(self, i: int, answer: dict) -> EpisodeResult:
        answer = dict(answer)
        self.tool_errors[i] = answer.pop("tool_errors", 0)
        if "score" in answer:
            return Reward(**answer)
        if "limit" in answer:
            return Limit(answer["limit"], self._limit_score)
        return Failure(**answer, row=self._requests[i]["row"], response="")


def number_of(call: Call) -> int:
    """Return the number by which a worker notes an episode, which is above 0."""
    return call[0] + 1


class EpisodeRunner(WorkerPool):
    """Worker processes that play episodes with the function or class in rollout.episode.

    The constructor starts the first worker. The function's output goes to
    {output_dir}/reward_output/rank_{rank}.txt.

    Args:
        startup_timeout: the seconds allowed for starting Python and importing the function.

    Attributes:
        notice: a line about how the user's class is called, or "".
        tool_errors: for each episode of the last play(), the calls of tools whose result is an
            error. They are known only for classes, whose tools we call.
        parts: the names of the parts that every reward must have; None before the first reward.

    Raises:
        InputError: the function cannot be imported or has unknown parameters.
    """

    def __init__(self, config: DictConfig, startup_timeout: float = 300.0):
        self.config = config
        rollout = config.rollout
        check_weights(config.reward.weights)
        check_environment(config.reward.env)
        if rollout.episode_python:
            check_interpreter(rollout.episode_python)
        rank = os.environ.get("RANK", 0)
        output = Path(config.output_dir, "reward_output", f"rank_{rank}.txt").absolute()
        self.settings = {
            "episode": rollout.episode,
            "timeout": rollout.episode_timeout,
            "weights": OmegaConf.to_container(config.reward.weights),
            "memory_gib": config.reward.memory_gib,
            "output": str(output),
        }
        program = Program(
            name=f"rollout.episode={rollout.episode}",
            command=[rollout.episode_python or sys.executable, "-P", "-m", WORKER],
            environment=episode_environment(config.reward.env),
            settings=self.settings,
        )
        super().__init__(program, rollout.episode_workers, startup_timeout)
        self.concurrency = math.ceil(rollout.max_concurrent_episodes / rollout.episode_workers)
        self.seconds_per_call = rollout.episode_timeout + EVENT_LOOP_DELAY
        ready = self.idle[0].ready
        self.notice = ready["notice"]
        self.tool_errors: list[int] = []
        self._needs_messages = ready["is_environment"]

    def play(
        self,
        rows: Sequence[dict],
        base_url: str,
        new_key: Callable[[int], str],
        max_failures: float = math.inf,
    ) -> list[EpisodeResult | None]:
        """Play an episode with each row, and return their results in the same order.

        If close() is called meanwhile, in another thread, the remaining results are None.

        Args:
            rows: the rows, which must be representable in JSON.
            base_url: the URL of the gateway's API.
            new_key: called in any thread with an episode's index right before the episode is sent
                to a worker, also when it is repeated because its worker has ended. Returns the API
                key for this attempt.
            max_failures: after more failures than this, no further episodes begin, and their
                results are None.
        """
        requests = []
        for row in rows:
            request = {"row": row, "base_url": base_url}
            if self._needs_messages:
                request["messages"] = self._messages(row)
            requests.append(request)
        job = EpisodeJob(requests, new_key, self.config.rollout.limit_score, max_failures)
        self.run(job)
        self.tool_errors = job.tool_errors
        return job.results

    def check(self, row: dict) -> str:
        """Return a notice about how rows reach the user's code, or "".

        Raises:
            InputError: the user's class needs a prompt, and the row has none.
        """
        if self._needs_messages:
            self._messages(row)
        return self.notice

    def _messages(self, row: dict) -> list[dict]:
        """Return the prompt of a row as messages, for a class that plays with it."""
        options = self.config.data
        standard_row, _ = read_shape(row, options, with_response=False)
        messages = read_messages(standard_row, True, options)
        return without_reply(messages, standard_row, options)

    def find_culprit(self, calls: list[Call], worker: WorkerProcess) -> tuple[Call, str] | None:
        """Return the episode that certainly ended a worker, and the trace of its failure, or None.

        This includes an episode whose code has blocked the event loop for most of the time that
        the others had. Repeating it would take this time again.
        """
        if worker.ending.kind == "timed out" and len(calls) > 1:
            seconds = time.monotonic() - worker.last_note.since
            blocking = [call for call in calls if number_of(call) == worker.last_note.call]
            if blocking and seconds > self.seconds_per_call / 2:
                trace = (
                    f"blocked its process for {seconds:.0f} s, in which no other episode could "
                    "continue: await async functions, or call it with asyncio.to_thread()"
                )
                return blocking[0], trace
        return super().find_culprit(calls, worker)

    def regroup(self, calls: list[Call], worker: WorkerProcess) -> list[list[Call]]:
        """Return the groups in which episodes are repeated after their worker ended.

        The episode whose code ran last is the likely cause, and is repeated alone. If none is
        known, each half is repeated, so that few groups have to end a worker again.
        """
        suspects = [call for call in calls if number_of(call) == worker.last_note.call]
        if suspects:
            innocent = [call for call in calls if call not in suspects]
            groups = [innocent, suspects]
        else:
            middle = math.ceil(len(calls) / 2)
            groups = [calls[:middle], calls[middle:]]
        return [group for group in groups if group]


def check_interpreter(python: str) -> None:
    """Raise InputError if rollout.episode_python is not a Python interpreter that we can use."""
    setting = f"rollout.episode_python={python}"
    code = "import sys; print(*sys.version_info[:2])"
    try:
        printed = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
        version = tuple(int(number) for number in printed.stdout.split())
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise InputError(f"{setting} cannot be run as a Python interpreter: {error}") from error
    if version < MIN_PYTHON:
        found = ".".join(map(str, version)) or printed.stderr.strip()[-200:]
        raise InputError(f"{setting} is {found}: use Python 3.11 or newer")


def episode_environment(names: Sequence[str]) -> dict[str, str]:
    """Return the environment of an episode's worker: a reward worker's, with a direct loopback."""
    environment = worker_environment(names)
    for name in ("no_proxy", "NO_PROXY"):
        hosts = [environment.get(name), LOOPBACK]
        environment[name] = ",".join(filter(None, hosts))
    return environment
