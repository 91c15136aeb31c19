"""Rewards of steps: from characters of a response, where functions place them, to tokens."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rollout.grading.results import Result, Reward

INCOMPLETE = "\ufffd"  # decoded from the first bytes of a character


class StepRewards(NamedTuple):
    """The rewards of the steps of some responses, over their T tokens.

    rewards  [T] fp32: at the last token of each step
    ends     [T] fp32: 1 at the last token of each step, also if its reward is 0
    """

    rewards: Tensor
    ends: Tensor


def place_steps(
    tokenizer,
    responses: Sequence[list[int]],
    results: Sequence[Result | None],
    skip_special_tokens: bool,
) -> StepRewards:
    """Place the rewards of steps on the tokens of the responses, which are laid end to end.

    A step ends at the token that completes its last character. Several steps may end at one token,
    which then has the sum of their rewards.

    Args:
        responses: the token ids of each response.
        results: of the reward function; a response without a reward has no steps.
        skip_special_tokens: whether the function got the response without special tokens.
    """
    num_tokens = sum(map(len, responses))
    rewards = torch.zeros(num_tokens)
    ends = torch.zeros(num_tokens)
    start = 0
    for ids, result in zip(responses, results, strict=True):
        steps = result.steps if isinstance(result, Reward) else []
        first = 0
        for end, reward in steps:
            first = token_at(tokenizer, ids, end, first, skip_special_tokens)
            rewards[start + first] += reward
            ends[start + first] = 1
        start += len(ids)
    return StepRewards(rewards, ends)


def token_at(
    tokenizer, ids: list[int], num_characters: int, first: int, skip_special_tokens: bool
) -> int:
    """Return the first token, from `first` on, that completes this many characters."""

    def characters_up_to(token: int) -> int:
        text = tokenizer.decode(ids[: token + 1], skip_special_tokens=skip_special_tokens)
        return len(text.rstrip(INCOMPLETE))

    # If the response itself ends with INCOMPLETE, no token may complete the last character.
    candidates = range(first, len(ids) - 1)
    return first + bisect_left(candidates, num_characters, key=characters_up_to)
