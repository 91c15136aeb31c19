"""Play episodes in worker processes, many at once, and return their rewards in order."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from config import InputError
from data.chat.losses import is_empty
from data.prompts import without_reply
from data.rows import read_messages, template_inputs
from data.shapes import read_shape
from rollout.episodes.jobs import EpisodeJob, EpisodeResult, EpisodeStream, number_of
from rollout.grading.clock import StoppableClock
from rollout.grading.pool import EVENT_LOOP_DELAY, WorkerPool, check_environment, check_weights
from rollout.grading.process import Call, Program, WorkerProcess, worker_environment

WORKER = "rollout.episodes.worker"
MIN_PYTHON = (3, 11)
LOOPBACK = "127.0.0.1,localhost"


class EpisodeRunner(WorkerPool):
    """Worker processes that play episodes with the function or class in rollout.episode.

    The constructor starts the first worker. The function's output goes to
    {output_dir}/reward_output/rank_{rank}.txt.

    Args:
        startup_timeout: the seconds allowed for starting Python and importing the function.

    Attributes:
        clock: measures the time of the episodes of a stream, and may be stopped.
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
        clock_file = StoppableClock.make_file()
        self.clock = StoppableClock(clock_file)
        program = Program(
            name=f"rollout.episode={rollout.episode}",
            command=[
                *(rollout.episode_python or sys.executable, "-P", "-m", WORKER),
                str(clock_file),
            ],
            environment=episode_environment(config.reward.env),
            settings=self.settings,
            files=[clock_file],
        )
        super().__init__(program, rollout.episode_workers, startup_timeout)
        self.concurrency = math.ceil(rollout.max_concurrent_episodes / rollout.episode_workers)
        self.seconds_per_call = rollout.episode_timeout + EVENT_LOOP_DELAY
        ready = self.idle[0].ready
        self.notice = ready["notice"]
        self.tool_errors: list[int] = []
        self._stream: EpisodeStream | None = None
        self._threads: list[threading.Thread] = []
        self._needs_messages = ready["is_environment"]
        self._at_default = ready["at_default"]

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
        requests = [self.request(row, base_url) for row in rows]
        job = EpisodeJob(requests, new_key, self.config.rollout.limit_score, max_failures)
        self.run(job)
        self.tool_errors = job.tool_errors
        return job.results

    def request(self, row: dict, base_url: str) -> dict:
        """Return the request of an episode, without number and API key."""
        request = {"row": row, "base_url": base_url}
        if self._needs_messages:
            request["messages"] = self._messages(row)
            arguments = template_inputs(row, set(), self.config.data).arguments
            request["template_kwargs"] = arguments
        return request

    def open_stream(self, new_key: Callable[[int], str]) -> EpisodeStream:
        """Return a stream that can be given episodes. They are played until close().

        play() may be called meanwhile. It then uses processes of its own.

        new_key: as for play().
        """
        self._is_closed = False
        self.clock.start()
        self._stream = EpisodeStream(new_key, self.config.rollout.limit_score, self.clock)
        for _ in range(self.num_workers):
            # A trainer that ends with an error must not wait for these threads.
            arguments = (self._stream,)
            thread = threading.Thread(target=self._play_stream, args=arguments, daemon=True)
            thread.start()
            self._threads.append(thread)
        return self._stream

    def _play_stream(self, stream: EpisodeStream) -> None:
        try:
            self._work(stream)
        except BaseException as error:  # stream.take_ended() raises it in the trainer's thread
            stream.fail(error)

    def close(self) -> None:
        """End all workers and the stream. Episodes that are being played get no results."""
        if self._stream:
            self._stream.close()
        super().close()
        for thread in self._threads:
            thread.join()
        self._stream = None
        self._threads = []

    def check(self, row: dict, columns: Iterable[str] = ()) -> str:
        """Return a notice about how rows reach the user's code, or "".

        Args:
            columns: the columns that have a value in any row.

        Raises:
            InputError: the user's class needs a prompt, and the row has none; or something in the
                rows or in the configuration would not reach the user's function.
        """
        filled = {name for name, value in row.items() if not is_empty(value)} | {*columns}
        if self._needs_messages:
            self._messages(row)
            return self.notice + self._notice_of_tools(filled)
        self._check_function(filled)
        return self.notice

    def _notice_of_tools(self, columns: set[str]) -> str:
        """Return the end of the notice about a class, if rows have tools of their own."""
        key = self.config.data.tools_key
        if key not in columns:
            return ""
        return f"; those in the column {key} of the rows are not used"

    def _check_function(self, columns: set[str]) -> None:
        """Raise InputError for anything that would not reach a function."""
        setting = self.program.name
        system_prompt = self.config.data.system_prompt
        if system_prompt:
            raise InputError(
                f"data.system_prompt={system_prompt} does nothing with {setting}, a function, "
                "which writes the messages itself: leave it out, and write it in the function"
            )
        for name in self._at_default:
            if name in columns:
                raise InputError(
                    f"{setting}: its parameter {name} would keep its default, although rows have a "
                    f'column of this name: read row.get("{name}"), or rename the parameter'
                )

    def _messages(self, row: dict) -> list[dict]:
        """Return the prompt of a row as messages, for a class that plays with it."""
        options = self.config.data
        standard_row, _ = read_shape(row, options, with_response=False)
        messages = read_messages(standard_row, True, options)
        return without_reply(messages, standard_row, options)

    def find_culprit(self, calls: list[Call], worker: WorkerProcess) -> tuple[Call, str] | None:
        """Return the episode that certainly ended a worker, and the trace of its failure, or None.

        This includes an episode whose code has blocked the event loop for more than half of the
        time limit. Repeating it would take as long again.
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
        description = ".".join(map(str, version)) or printed.stderr.strip()[-200:]
        raise InputError(f"{setting} is {description}: use Python 3.11 or newer")


def episode_environment(names: Sequence[str]) -> dict[str, str]:
    """Return a reward worker's environment, in which requests to the gateway avoid any proxy."""
    environment = worker_environment(names)
    for name in ("no_proxy", "NO_PROXY"):
        hosts = [environment.get(name), LOOPBACK]
        environment[name] = ",".join(filter(None, hosts))
    return environment
