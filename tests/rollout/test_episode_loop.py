"""Draws of episodes, whose messages arrive between the steps of a rollout without a model.

vLLM draws episodes in test_rollout_episodes.py, and in test_partial_reference.py.
"""

import random
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rollout.episodes.jobs import EndedEpisode
from rollout.episodes.stepping import WAIT_SECONDS, EpisodeLoop
from rollout.grading.results import Reward
from rollout.vllm.continuing import RandomStreams
from tests.rollout.seeded_rollout import SeededRollout
from tests.support.samples import configure

BUSY = 0.0  # how long the inbox waits while vLLM has requests


@pytest.fixture(autouse=True)
def one_rank():
    """Only the first rank shows progress."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Gateway:
    """Messages that arrive one batch after another, and the answers to them.

    Attributes:
        waits: the seconds that the loop was willing to wait for each batch.
    """

    def __init__(self, *batches: list[dict]):
        self.batches = [*batches]
        self.waits: list[float] = []
        self.answers: list[dict] = []

    def receive(self, seconds: float) -> list[dict]:
        self.waits.append(seconds)
        assert len(self.waits) < 1000, "the draw does not end"
        time.sleep(seconds)
        return self.batches.pop(0) if self.batches else []


def make_loop(rollout: SeededRollout, gateway: Gateway, is_partial: bool = False) -> EpisodeLoop:
    streams = RandomStreams(rollout) if is_partial else None
    sampling = configure("rollout.max_tokens=50").rollout
    loop = EpisodeLoop(rollout, sampling, gateway.receive, gateway.answers.append, streams)
    for number in range(2):
        loop.add(number, (3, 1, number))
    return loop


ATTEMPTS = [{"attempt": "a", "index": 0}, {"attempt": "b", "index": 1}]


def ask(key: str, number: int, max_tokens: int, prompt_ids=(1, 2), stop=()) -> dict:
    request = {"prompt_ids": [*prompt_ids], "max_tokens": max_tokens, "stop": [*stop]}
    return {"id": number, "episode": key, **request}


def ended(*numbers: int, is_over: bool = True) -> dict:
    results = [EndedEpisode(number, Reward(1.0, {}), 0) for number in numbers]
    return {"ended": results, "is_over": is_over}


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_draw_goes_on_until_all_episodes_have_ended(is_closed):
    """vLLM works on two requests of each episode at once."""
    rollout = SeededRollout(is_closed, has_recorder=True)
    first = [ask("a", 1, 3), ask("b", 2, 2), ask("a", 3, 3), ask("b", 4, 2)]
    gateway = Gateway(ATTEMPTS, first, [], [], [ended(0, is_over=False)], [ended(1)])
    loop = make_loop(rollout, gateway)
    loop.run()
    assert gateway.waits == [WAIT_SECONDS, WAIT_SECONDS, BUSY, BUSY, WAIT_SECONDS, WAIT_SECONDS]
    assert (loop.num_steps, loop.num_tokens, loop.num_ended) == (3, 3 + 2 + 3 + 2, 2)
    assert rollout.batches == [is_closed, is_closed], "it has begun and ended"
    answers = {answer["id"]: answer for answer in gateway.answers}
    assert {number: len(a["token_ids"]) for number, a in answers.items()} == {
        1: 3,
        2: 2,
        3: 3,
        4: 2,
    }
    assert {answer["finish_reason"] for answer in gateway.answers} == {"length"}
    for number, playing in loop.playing.items():
        requests = (1, 3) if number == 0 else (2, 4)
        for branch, request in zip(playing.episode.branches, requests, strict=True):
            tokens = answers[request]["token_ids"]
            assert branch.token_ids == [1, 2, *tokens]
            assert branch.log_probs[2:] == pytest.approx(np.array(tokens) / -10)
            num_tokens = 2 + len(tokens)
            assert branch.routes.flatten().tolist() == [num_tokens] * (num_tokens - 1) + [255]


def test_the_time_in_which_vllm_has_no_request_is_idle():
    rollout = SeededRollout()
    gateway = Gateway(ATTEMPTS, [ask("a", 1, 4)], [], [], [], [ended(0, 1)])
    step = rollout.engine.step

    def slow_step() -> list:
        time.sleep(0.03)
        return step()

    rollout.engine.step = slow_step
    loop = make_loop(rollout, gateway)
    loop.run()
    assert 3 * WAIT_SECONDS <= loop.times.idle
    assert loop.times.idle + 4 * 0.03 <= loop.times.total


@pytest.mark.parametrize("is_closed", [False, True])
def test_interruptions_change_no_token(is_closed):
    """Turns continue in later draws, in which weights of other versions draw their tokens.

    Another one begins beside them. Without an interruption, the tokens are the same.
    """
    requests = [ask("a", 1, 6), ask("b", 2, 6, [9]), ask("b", 3, 6, [7]), ask("b", 4, 3, [8])]
    new = ask("a", 5, 2, [6])
    whole = Gateway(ATTEMPTS, [*requests, new], *[[]] * 8, [ended(0, 1)])
    make_loop(SeededRollout(), whole).run()

    rollout = SeededRollout(is_closed)
    gateway = Gateway(ATTEMPTS + requests)
    loop = make_loop(rollout, gateway, is_partial=True)
    for version, num_steps in ((3, 2), (4, 0), (6, 1)):
        loop.run(lambda: loop.num_steps >= num_steps, version)
        assert loop.num_steps == num_steps
        assert loop.num_tokens == 4 * num_steps
        assert rollout.engine.requests == {}, "vLLM is left without requests"
        assert rollout.engine.batch_queue == [], "and without steps"
        assert loop.streams.num_skipped == {}
    assert [answer["id"] for answer in gateway.answers] == [4]
    assert loop.playing[0].episode.oldest_version == 3
    gateway.waits.clear()
    gateway.batches.append([new])
    loop.run(lambda: len(gateway.answers) == 5, 7)
    assert gateway.waits == [BUSY] * 3, "they continue at once"
    assert rollout.batches == [is_closed] * 8
    order = {answer["id"]: answer for answer in whole.answers}
    assert {answer["id"]: answer for answer in gateway.answers} == order
    first, second = loop.playing[0].episode.branches
    assert first.versions == [3, 3, 6, 7, 7, 7]
    assert second.versions == [7, 7]


def test_a_stop_string_may_have_begun_in_an_earlier_draw():
    rollout = SeededRollout()
    whole = Gateway(ATTEMPTS, [ask("a", 1, 6)], *[[]] * 5, [ended(0, 1)])
    make_loop(rollout, whole).run()
    tokens = whole.answers[0]["token_ids"][:3]
    stop = rollout.engine.tokenizer.decode(tokens)

    gateway = Gateway(ATTEMPTS, [ask("a", 1, 6, stop=[stop])])
    loop = make_loop(SeededRollout(), gateway, is_partial=True)
    loop.run(lambda: loop.num_steps >= 2)
    loop.run(lambda: bool(gateway.answers))
    (answer,) = gateway.answers
    assert (answer["token_ids"], answer["finish_reason"]) == (tokens, "stop")


def test_the_random_state_of_this_process_stays():
    gateway = Gateway(ATTEMPTS, [ask("a", 1, 2)], [], [ended(0, 1)])
    loop = make_loop(SeededRollout(), gateway)
    before = (random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[2])
    loop.run()
    after = (random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[2])
    assert loop.num_steps == 2
    assert after == before
