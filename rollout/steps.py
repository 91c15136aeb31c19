"""Rewards of steps: from characters of a response, where functions place them, to tokens."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rollout.grading.results import Result, Reward

INCOMPLETE = "\ufffd"  # decoded from the first bytes of a character
BLOCK = 64


class StepRewards(NamedTuple):
    """The rewards of the steps of some responses, over their T tokens.

    rewards  [T] fp32: at the last token of each step
    ends     [T] fp32: 1 at the last token of each step, even if its reward is 0
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
        counts = CharacterCounts(tokenizer, ids, skip_special_tokens) if steps else None
        first = 0
        for end, reward in steps:
            first = counts.token_at(end, first)
            rewards[start + first] += reward
            ends[start + first] = 1
        start += len(ids)
    return StepRewards(rewards, ends)


class CharacterCounts:
    """Counts the characters of a response up to its tokens.

    It decodes only the block of BLOCK tokens or more that a token is in, since decoding a response
    from its first token on takes long.

    Attributes:
        decode: returns the text of token ids.
        ids: the tokens of the response.
        starts: the first token of each block.
        before: the number of characters before each block.
    """

    def __init__(self, tokenizer, ids: list[int], skip_special_tokens: bool):
        self.decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self.ids = ids
        self.starts = [0]
        self.before = [0]
        text = ""
        for end in range(BLOCK, len(ids), BLOCK):
            block = self.decode(ids[self.starts[-1] : end])
            # A block does not end within a character.
            if block.endswith(INCOMPLETE):
                continue
            text += block
            self.starts.append(end)
            self.before.append(len(text))
        text += self.decode(ids[self.starts[-1] :])
        if text != self.decode(ids):
            # The text of a token depends on those before it, such as spaces that are left out.
            self.starts = [0]
            self.before = [0]

    def up_to(self, token: int) -> int:
        """Return the number of characters that are complete after a token."""
        block = bisect_right(self.starts, token) - 1
        text = self.decode(self.ids[self.starts[block] : token + 1])
        return self.before[block] + len(text.rstrip(INCOMPLETE))

    def token_at(self, num_characters: int, first: int) -> int:
        """Return the first token, from `first` on, that completes this many characters."""
        # If the response itself ends with INCOMPLETE, no token may complete the last character.
        candidates = range(first, len(self.ids) - 1)
        return first + bisect_left(candidates, num_characters, key=self.up_to)
