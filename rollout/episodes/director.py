"""Start the episodes of one replica, and pass on what the workers and the gateway report of them.

Episodes that are drawn together are a cast. The cast of an ordinary draw is over when all of its
episodes have ended. With rollout.partial there is one cast for the whole run, whose episodes go on
in the next draw. Between two draws, a validation may have a cast of its own. The messages about
episodes that are not drawn right now wait for the next draw.
"""

from __future__ import annotations

import queue
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from omegaconf import DictConfig

from rollout.episodes.jobs import EndedEpisode, EpisodeStream
from rollout.episodes.runner import EpisodeRunner
from rollout.episodes.server import GatewayServer

Poll = Callable[[], tuple[list[EndedEpisode], bool]]


@dataclass
class Cast:
    """Episodes that are drawn together.

    Attributes:
        announcement: what the gateway is told with every API key.
        poll: returns the episodes that have ended since the last call, and whether these are the
            last ones.
        keys: the API keys of all attempts of an episode, by its number.
        attempts: messages about attempts that were not received yet.
        mailbox: messages that have arrived and were not received yet.
        stream: gets further episodes; None for the cast of an ordinary draw.
        given_up: the numbers of episodes that nobody waits for any more.
    """

    announcement: dict
    poll: Poll | None = None
    keys: dict[int, list[str]] = field(default_factory=dict)
    attempts: queue.SimpleQueue[dict] = field(default_factory=queue.SimpleQueue)
    mailbox: list[dict] = field(default_factory=list)
    stream: EpisodeStream | None = None
    given_up: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Ending:
    """Episodes whose keys the gateway was told to forget, with the message that follows."""

    cast: Cast
    keys: list[str]
    message: dict


class Director:
    """Starts the episodes of one replica, on its first rank, and passes messages on.

    Args:
        server: the gateway.
        runner: the worker processes.
        limits: max_turns and max_episode_tokens, as the gateway wants them.
    """

    def __init__(self, server: GatewayServer, runner: EpisodeRunner, limits: dict):
        self.server = server
        self.runner = runner
        self.limits = limits
        self.pool = ThreadPoolExecutor(1)
        self.cast_of: dict[str, Cast] = {}  # by API key
        self.endings: dict[int, Ending] = {}  # by the numbers of messages to the gateway
        self.num_endings = 0

    # -- casts -------------------------------------------------------------------------------------

    def start(
        self,
        rows: list[dict],
        sampling: DictConfig,
        max_failures: float,
        section: str = "rollout",
    ) -> Cast:
        """Start to play one episode for each row, in another thread.

        section: see Request.
        """
        cast = Cast(self.announcement(sampling, section))
        new_key = partial(self.new_key, cast)
        results = self.pool.submit(
            self.runner.play, rows, self.server.base_url, new_key, max_failures
        )
        cast.poll = partial(self.poll_results, results)
        return cast

    def poll_results(self, results: Future) -> tuple[list[EndedEpisode], bool]:
        """Return the results of all episodes of a draw when the last one has ended."""
        if not results.done():
            return [], False
        rewards = results.result()
        ended = map(EndedEpisode, range(len(rewards)), rewards, self.runner.tool_errors)
        return list(ended), True

    def open(self, sampling: DictConfig) -> Cast:
        """Return a cast without episodes, which gets them one after another."""
        cast = Cast(self.announcement(sampling, "rollout"))
        cast.stream = self.runner.open_stream(partial(self.new_key, cast))
        cast.poll = lambda: (cast.stream.take_ended(), False)
        return cast

    def add(self, cast: Cast, number: int, row: dict) -> None:
        """Start another episode of an open cast."""
        cast.stream.add({number: self.runner.request(row, self.server.base_url)})

    def give_up(self, cast: Cast, number: int) -> None:
        """Stop to wait for an episode of an open cast. From now on, its calls of the model fail."""
        cast.given_up.add(number)
        cast.stream.give_up(number)
        self.forget(cast, [number], {"ended": [], "is_over": False})

    def announcement(self, sampling: DictConfig, section: str) -> dict:
        """Return what the gateway is told with the keys of a cast."""
        keys = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop")
        settings = {key: sampling[key] for key in keys}
        settings["stop"] = list(sampling.stop)
        return {"sampling": settings, "section": section, **self.limits}

    def new_key(self, cast: Cast, number: int) -> str:
        """Return the API key for an attempt of an episode. Called in any thread."""
        key = secrets.token_hex(16)
        if number in cast.given_up:
            return key  # which names no episode
        # In this order: no request with a key may arrive before its attempt is known.
        self.cast_of[key] = cast
        cast.keys.setdefault(number, []).append(key)
        cast.attempts.put({"attempt": key, "index": number})
        self.server.send({"begin": [key], **cast.announcement})
        return key

    # -- messages ----------------------------------------------------------------------------------

    def receive(self, cast: Cast, seconds: float) -> list[dict]:
        """Return what has happened to a cast since the last call.

        If nothing has, wait for something, but at most this many seconds.

        When episodes have ended, the gateway is told to forget them. Its answer comes after
        everything that it has sent before, so nothing is missing when their results come.
        """
        ended, is_over = cast.poll()
        if ended or is_over:
            numbers = [one.number for one in ended]
            self.forget(cast, numbers, {"ended": ended, "is_over": is_over})
            if is_over:
                cast.poll = lambda: ([], False)
        for message in self.server.receive(0.0 if cast.mailbox else seconds):
            self.deliver(message)
        attempts = [cast.attempts.get() for _ in range(cast.attempts.qsize())]
        messages = cast.mailbox
        cast.mailbox = []
        return attempts + messages

    def forget(self, cast: Cast, numbers: list[int], message: dict) -> None:
        """Tell the gateway to forget episodes. The message comes when it has."""
        keys = []
        for number in numbers:
            keys += cast.keys.pop(number, [])
        self.num_endings += 1
        self.endings[self.num_endings] = Ending(cast, keys, message)
        self.server.send({"end": keys, "number": self.num_endings})

    def deliver(self, message: dict) -> None:
        """Put a message of the gateway into the mailbox of its cast."""
        if "ended" in message:
            ending = self.endings.pop(message["ended"])
            ending.cast.mailbox.append(ending.message)
            for key in ending.keys:
                del self.cast_of[key]
        else:
            self.cast_of[message["episode"]].mailbox.append(message)

    def close(self) -> None:
        self.server.close()
        self.runner.close()
        self.pool.shutdown()
