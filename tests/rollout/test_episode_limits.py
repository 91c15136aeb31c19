"""How many tokens a turn may have. The gateway is in this process, and has no client."""

import asyncio
import socket
from pathlib import Path

import pytest

from rollout.episodes.episode import Episode, Terms
from rollout.episodes.gateway import Gateway, Turn
from rollout.episodes.link import TrainerLink
from rollout.episodes.rendering import Session
from rollout.episodes.requests import Sampling
from tests.rollout.episode_gateway import gateway_settings

MAX_TOKENS = 50  # rollout.max_tokens
MAX_MODEL_LEN = 100


async def limit_of(model_path: Path, num_prompt: int, max_tokens: int | None) -> int:
    own_end, gateway_end = socket.socketpair()
    with own_end:
        link = await TrainerLink.connect(gateway_end.detach())
        settings = gateway_settings(model_path) | {"max_model_len": MAX_MODEL_LEN}
        gateway = Gateway(link, settings)
        terms = Terms(Sampling(max_tokens=MAX_TOKENS), max_turns=None, max_episode_tokens=None)
        episode = Episode("key", Session(gateway.renderer), terms)
        limit = gateway.limit_of_turn(episode, Turn([5] * num_prompt, max_tokens, stop=[]))
        link.writer.close()
    return limit


@pytest.mark.parametrize(
    "num_prompt, max_tokens, expected",
    [(10, None, MAX_TOKENS), (10, 7, 7), (10, MAX_TOKENS + 9, MAX_TOKENS), (70, None, 30)],
    ids=["the run's", "the request's", "no more than the run's", "the model's"],
)
def test_the_lowest_limit_counts(model_path, num_prompt, max_tokens, expected):
    assert asyncio.run(limit_of(model_path, num_prompt, max_tokens)) == expected
