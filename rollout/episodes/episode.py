"""An episode as the gateway knows it: its conversations, its limits, and what it has used."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rollout.episodes.rendering import Session
from rollout.episodes.requests import Sampling


@dataclass(frozen=True)
class Terms:
    """How an episode samples, and its limits, which the trainer announces with its key.

    Attributes:
        sampling: the parameters that requests may repeat, but not change.
        max_turns, max_episode_tokens: limits of the episode, or None.
    """

    sampling: Sampling
    max_turns: int | None
    max_episode_tokens: int | None


@dataclass
class Episode:
    """An episode that is being played, or that waits for the trainer's next draw.

    Attributes:
        key: its API key.
        session: the recorded conversations.
        terms: its limits, and how it samples.
        num_turns: the number of requests for tokens that were accepted.
        num_sampled: the number of tokens that were sampled.
        num_reserved: the number of tokens that are reserved for turns being sampled.
        num_ended: the number of turns that have ended.
        limit: the limit that was reported to the trainer, or None.
        turn_ended: notified when a turn has ended.
    """

    key: str
    session: Session
    terms: Terms
    num_turns: int = 0
    num_sampled: int = 0
    num_reserved: int = 0
    num_ended: int = 0
    limit: str | None = None
    turn_ended: asyncio.Condition = field(default_factory=asyncio.Condition)
