"""The numbers of episodes that all ranks know, and the metrics that are made of them."""

import numpy as np
import torch

from data.prompts import Prompt
from rollout.episodes.drawing import EpisodeNumbers, Kept
from rollout.episodes.jobs import Limit
from rollout.episodes.stepping import Playing
from rollout.grading.results import Failure, Reward

PROMPT = [1, 2]


def play(*lengths: int, is_cut: bool = False, **numbers) -> Playing:
    """Return an episode whose turns have these lengths, each in a branch of its own."""
    playing = Playing(seed=(0,), **numbers)
    for number, length in enumerate(lengths):
        turn = playing.episode.begin([*PROMPT, 10 + number], seed=0)
        turn.response.append(np.full(length, 5), np.zeros(length), None, version=0)
        is_last = number == len(lengths) - 1
        playing.episode.end(turn, is_cut=is_cut and is_last)
    return playing


def test_numbers_of_episodes_and_their_metrics():
    rewarded = play(3, 4, num_tool_calls=4, num_tool_errors=1)
    rewarded.episode.reward(0.5)
    playing = [
        rewarded,
        play(2, is_cut=True, num_tool_calls=2),
        play(1, 1, 1, limit="max_turns", num_tool_calls=3, num_tool_errors=2),
        play(6),
    ]
    results = [
        Reward(1.0, {"right": 2.0}),
        Reward(-1.0, {"right": 3.0}),
        Limit("max_turns", None),
        Failure("raised", "", {}, ""),
    ]
    prompts = [Prompt(PROMPT, "", {})] * 4
    numbers = EpisodeNumbers.of(Kept(torch.arange(4), playing, results, prompts), ["right"])
    expected = {
        "branches": [2, 1, 0, 0],
        "score": [1.5, -1, 0, 0],
        "truncated": [0, 1, 1, 0],
        "tokens": [7, 2, 3, 6],
        "turns": [2, 1, 3, 1],
        "tool_calls": [4, 2, 3, 0],
        "tool_errors": [1, 0, 2, 0],
        "limited": [0, 0, 1, 0],
        "left_out": [0, 0, 1, 0],
    }
    assert {name: getattr(numbers, name).tolist() for name in expected} == expected
    assert numbers.parts["right"].tolist() == [2, 3, 0, 0]
    assert numbers.metrics() == {
        "episodes/turns/mean": 1.75,
        "episodes/turns/max": 3.0,
        "episodes/tool_calls/mean": 2.25,
        "episodes/tool_errors": 3.0,
        "episodes/limited": 0.25,
        "episodes/left_out": 0.25,
    }
