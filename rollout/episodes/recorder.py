"""The tokens of episodes, exactly as vLLM sampled them.

An episode is a sequence of turns. In each turn the model continues a prompt, which is a list of
token ids. Nothing else is known about a prompt: neither its messages nor where it comes from. If it
begins with all tokens of an earlier turn, it continues that turn's branch. Otherwise, it begins a
branch of its own: the agent has edited or shortened its history, or asks the same again.

A branch becomes one training sequence. Its loss mask is 1 on sampled tokens and 0 on all others, so
every sampled token is trained exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from data.batching.batch import Batch, make_cu_seqlens
from engines.model.routes import joined_parts
from rollout.partial.groups import OpenResponse


@dataclass
class Branch:
    """Tokens that were read or sampled one after another.

    Attributes:
        token_ids: all tokens so far.
        is_sampled: for every token, whether the model sampled it.
        log_probs: for every token, its log-probability under the distribution that it was sampled
            from; 0 if it was not sampled.
        rewards: for every token, the reward that was given at it; 0 for most.
        versions: for every sampled token, the number of steps that had trained the weights which
            sampled it.
        candidates: for every sampled token, the token ids that it was sampled from (see Batch);
            empty unless rollout.top_k is set.
        is_open: whether a turn of this branch has begun and not ended.
        routes: with rollout.routing_replay, the experts of every token (engines/model/routes.py);
            None without, or before the first turn has ended.
    """

    token_ids: list[int]
    is_sampled: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    candidates: list[np.ndarray] = field(default_factory=list)
    is_open: bool = False
    routes: np.ndarray | None = None

    def continues_in(self, prompt_ids: list[int]) -> bool:
        """Return whether a prompt begins with all tokens of this branch."""
        length = len(self.token_ids)
        return not self.is_open and prompt_ids[:length] == self.token_ids

    def read(self, prompt_ids: list[int]) -> None:
        """Append the tokens with which a prompt continues this branch."""
        num_new = len(prompt_ids) - len(self.is_sampled)
        self.token_ids = list(prompt_ids)
        self.is_sampled += [False] * num_new
        self.log_probs += [0.0] * num_new
        self.rewards += [0.0] * num_new

    def cut(self, length: int) -> None:
        """Forget the tokens from a position on. None of them may be sampled."""
        for values in (self.token_ids, self.is_sampled, self.log_probs, self.rewards):
            del values[length:]

    @property
    def num_sampled(self) -> int:
        return sum(self.is_sampled)


@dataclass(frozen=True)
class Turn:
    """A turn that has begun.

    Attributes:
        branch: the model continues it.
        start: the number of tokens that the branch had before.
        response: the tokens that were sampled so far. They belong to the branch when the turn ends.
    """

    branch: Branch
    start: int
    response: OpenResponse


class Episode:
    """The branches of one episode.

    Attributes:
        branches: in the order in which they began.
        is_truncated: whether the turn that ended last was cut off.
        num_turns: the turns that have begun.
        open_turns: those that have not ended, with the tokens that they have so far.
    """

    def __init__(self):
        self.branches: list[Branch] = []
        self.is_truncated = False
        self.num_turns = 0
        self.open_turns: list[Turn] = []
        self._num_turns_of_prompt: dict[tuple[int, ...], int] = {}
        # Where the turn that ended last has its last token.
        self._last: tuple[Branch, int] | None = None

    def count(self, prompt_ids: list[int]) -> int:
        """Return how many turns with this prompt have begun before; count this one, too."""
        key = tuple(prompt_ids)
        number = self._num_turns_of_prompt.get(key, 0)
        self._num_turns_of_prompt[key] = number + 1
        return number

    def begin(self, prompt_ids: list[int], seed: int) -> Turn:
        """Begin a turn in the longest branch that the prompt continues, or in a new branch.

        seed: of its random numbers.
        """
        self.num_turns += 1
        continued = [branch for branch in self.branches if branch.continues_in(prompt_ids)]
        if continued:
            branch = max(continued, key=lambda branch: len(branch.token_ids))
        else:
            branch = Branch([])
            self.branches.append(branch)
        start = len(branch.token_ids)
        branch.read(prompt_ids)
        branch.is_open = True
        turn = Turn(branch, start, OpenResponse(seed))
        self.open_turns.append(turn)
        return turn

    def end(self, turn: Turn, is_cut: bool) -> None:
        """Append the sampled tokens of a turn to its branch.

        is_cut: whether the turn reached its maximum number of tokens.
        """
        branch = turn.branch
        response = turn.response
        num_tokens = len(response)
        branch.token_ids += response.tokens.tolist()
        branch.is_sampled += [True] * num_tokens
        branch.log_probs += response.log_probs.tolist()
        branch.rewards += [0.0] * num_tokens
        branch.versions += response.versions.tolist()
        if response.candidates.size:
            branch.candidates.append(response.candidates)
        if response.routes is not None:
            branch.routes = joined_parts(branch.routes, response.routes)
        branch.is_open = False
        self._forget_open(turn)
        self.is_truncated = is_cut
        self._last = (branch, len(branch.token_ids) - 1)

    def drop(self, turn: Turn) -> None:
        """Forget an aborted turn and its prompt, and its branch if the turn was its first."""
        branch = turn.branch
        branch.cut(turn.start)
        if not branch.num_sampled:
            self.branches = [other for other in self.branches if other is not branch]
        branch.is_open = False
        self._forget_open(turn)

    def _forget_open(self, turn: Turn) -> None:
        self.open_turns = [other for other in self.open_turns if other is not turn]

    def reward(self, value: float) -> None:
        """Give a reward at the last token of the turn that ended last.

        Raises:
            ValueError: no turn has ended.
        """
        if self._last is None:
            raise ValueError("a reward before the first turn has ended")
        branch, position = self._last
        branch.rewards[position] += value

    @property
    def reward_sum(self) -> float:
        """The sum of the rewards that were given at turns."""
        return sum(sum(branch.rewards) for branch in self.branches)

    @property
    def num_sampled(self) -> int:
        return sum(branch.num_sampled for branch in self.branches)

    @property
    def oldest_version(self) -> int | None:
        """The version of the weights that sampled the oldest token; None without any token."""
        versions = [branch.versions[0] for branch in self.branches if branch.versions]
        versions_in_open_turns = [turn.response.oldest_version for turn in self.open_turns]
        versions += [version for version in versions_in_open_turns if version is not None]
        return min(versions, default=None)


def pack(branches: Sequence[Branch], num_candidates: int, version: int | None = None) -> Batch:
    """Lay branches end to end.

    The batch has the fields loss_mask, rollout_log_probs and turn_rewards, fp32 [T] each, and
    candidate_ids, int32 [T, 1 + num_candidates], if num_candidates is not 0. With the version of
    the current weights, it also has age, fp32 [T]: how many steps have trained the weights since
    they sampled the token.
    """
    lengths = torch.tensor([len(branch.token_ids) for branch in branches], dtype=torch.int64)
    cu_seqlens = make_cu_seqlens(lengths)
    loss_mask = float32([branch.is_sampled for branch in branches])
    fields = {
        "loss_mask": loss_mask,
        "rollout_log_probs": float32([branch.log_probs for branch in branches]),
        "turn_rewards": float32([branch.rewards for branch in branches]),
    }
    if version is not None:
        age = torch.zeros_like(loss_mask)
        age[loss_mask > 0] = version - float32([branch.versions for branch in branches])
        fields["age"] = age
    if num_candidates:
        candidates = np.full((len(loss_mask), 1 + num_candidates), -1, np.int32)
        sampled = [rows for branch in branches for rows in branch.candidates]
        if sampled:
            candidates[loss_mask.bool().numpy()] = np.concatenate(sampled)
        fields["candidate_ids"] = torch.from_numpy(candidates)
    token_ids = np.array(flatten([branch.token_ids for branch in branches]), np.int64)
    return Batch(torch.from_numpy(token_ids), cu_seqlens, fields)


def float32(values: Sequence[list[float]]) -> torch.Tensor:
    # NumPy reads lists faster than torch does.
    return torch.from_numpy(np.array(flatten(values), np.float32))


def flatten(parts: Sequence[list]) -> list:
    return [value for part in parts for value in part]
