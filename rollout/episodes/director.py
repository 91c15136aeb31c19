"""Start the episodes of one replica, and pass on what workers and gateway report about them.

Episodes that are drawn together are a cast. The cast of an ordinary draw is over when all of its
episodes have ended. With rollout.partial there is one cast for the whole run, whose episodes
continue in the next draw. Between two draws, a validation may have a cast of its own. Messages
about episodes of another cast wait for that cast's next draw.
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
        announcement: the fields that the gateway gets with every API key.
        poll: returns the episodes that have ended since the last call, and whether these are the
            last ones.
        keys: the API keys of all attempts of an episode, by the episode's number.
        attempts: messages about new attempts, which receive() has not returned yet.
        mailbox: messages of the gateway, which receive() has not returned yet.
        stream: gets further episodes; None for the cast of an ordinary draw.
        given_up: the numbers of episodes whose results are no longer wanted.
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
    """Keys that the gateway is forgetting, and the message to deliver once it has done so."""

    cast: Cast
    keys: list[str]
    message: dict


class Director:
    """Starts the episodes of one replica, on its first rank, and passes messages on.

    Args:
        server: the gateway.
        runner: the worker processes.
        limits: max_turns and max_episode_tokens, by name.
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
        section: str,
    ) -> Cast:
        """Start playing one episode for each row, in another thread.

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
        """Return a cast without episodes, to which add() adds them one by one."""
        cast = Cast(self.announcement(sampling, "rollout"))
        cast.stream = self.runner.open_stream(partial(self.new_key, cast))
        cast.poll = lambda: (cast.stream.take_ended(), False)
        return cast

    def add(self, cast: Cast, number: int, row: dict) -> None:
        """Start another episode of an open cast."""
        cast.stream.add({number: self.runner.request(row, self.server.base_url)})

    def give_up(self, cast: Cast, number: int) -> None:
        """Stop waiting for an episode of an open cast. From now on, its model calls fail."""
        cast.given_up.add(number)
        cast.stream.give_up(number)
        self.forget(cast, [number], {"ended": [], "is_over": False})

    def announcement(self, sampling: DictConfig, section: str) -> dict:
        """Return the fields that the gateway gets with the keys of a cast."""
        keys = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop")
        settings = {key: sampling[key] for key in keys}
        settings["stop"] = list(sampling.stop)
        return {"sampling": settings, "section": section, **self.limits}

    def new_key(self, cast: Cast, number: int) -> str:
        """Return the API key for an attempt of an episode. Called in any thread."""
        key = secrets.token_hex(16)
        if number in cast.given_up:
            return key  # no episode has this key
        # Register the attempt first: once the gateway has the key, requests may arrive.
        self.cast_of[key] = cast
        cast.keys.setdefault(number, []).append(key)
        cast.attempts.put({"attempt": key, "index": number})
        self.server.send({"begin": [key], **cast.announcement})
        return key

    # -- messages ----------------------------------------------------------------------------------

    def receive(self, cast: Cast, seconds: float) -> list[dict]:
        """Return the messages about a cast since the last call.

        If there are none, wait for some, but at most this many seconds.

        When episodes have ended, the gateway is told to forget them. It confirms this after all
        earlier messages about them. Only then are their results returned.
        """
        ended, is_over = cast.poll()
        if ended or is_over:
            numbers = [episode.number for episode in ended]
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
        """Tell the gateway to forget episodes. The message is delivered once it has done so."""
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
