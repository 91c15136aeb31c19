"""Samples: the graded responses that one step of reinforcement learning learns from.

Every rank knows the score, the lengths and the group of each response, but its tokens and its text
are only on one rank.

A response of a single turn is one sequence. An episode of several turns may have several sequences,
its branches: a new one begins wherever the conversation does not continue the tokens of an earlier
one. The branches share the outcome of their episode, and everything that counts responses counts
the episode once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from data.batching.batch import Batch
from data.prompts import Prompt
from rollout.grading.grader import Failure


@dataclass(frozen=True)
class Episodes:
    """Which of n sequences belong to the same episode; there are E episodes.

    index  [n] int64: the episode of each sequence, in 0..E-1
    first  [E] int64: the first sequence of each episode
    """

    index: Tensor
    first: Tensor

    @staticmethod
    def of(numbers: Tensor) -> Episodes:
        """Return the episodes of sequences with these episode numbers: [n] int64."""
        values, index = numbers.unique(return_inverse=True)
        positions = torch.arange(len(numbers))
        first = torch.zeros_like(values).scatter_reduce(
            0, index, positions, "amin", include_self=False
        )
        return Episodes(index, first)

    @staticmethod
    def of_one_sequence(num_sequences: int) -> Episodes:
        """Return episodes with one sequence each."""
        positions = torch.arange(num_sequences)
        return Episodes(positions, positions)

    def __len__(self) -> int:
        return len(self.first)

    def choose(self, x: Tensor) -> Tensor:
        """Return the number of the first sequence of each episode, from x [n]: [E]."""
        return x[self.first]

    def total(self, x: Tensor) -> Tensor:
        """Return the sum over the sequences of each episode, from x [n]: [E]."""
        return x.new_zeros(len(self)).index_add(0, self.index, x)

    def largest(self, x: Tensor) -> Tensor:
        """Return the largest number of the sequences of each episode, from x [n]: [E]."""
        return x.new_zeros(len(self)).scatter_reduce(0, self.index, x, "amax", include_self=False)

    def repeat(self, x: Tensor) -> Tensor:
        """Repeat the number of each episode, x [E], for each of its sequences: [n]."""
        return x[self.index]


@dataclass
class Samples:
    """n sequences in the order of their prompts. This rank holds the tokens of m of them.

    batch       the m prompts and responses, packed; fields loss_mask (1 on sampled tokens),
                rollout_log_probs and, for episodes, turn_rewards: the rewards of single turns, each
                at the last token of its turn. A score includes the turn rewards of its episode.
                Either all draws and ranks have turn_rewards, or none. With reward.step_rewards,
                turn_rewards has the rewards of steps, and step_ends is 1 at their last tokens
    texts       the m responses as text
    details     more about each of the m sequences, as JSON for people to read; may be empty
    prompts     the m prompts
    owner       [n] int64: the rank that holds the tokens and the text of each response
    rank        this rank
    lengths     [n] int64: the number of tokens of prompt and response together
    response_lengths  [n] int64: the number of tokens that the model sampled
    group       [n] int64: the number of the group; the responses to one prompt are a group
    scores      [n] fp32: the scores from the reward function
    truncated   [n] bool: whether a response reached max_tokens, or an episode one of its limits
    failures    the responses or episodes of all ranks that could not be graded; they are not among
                the n
    num_drawn   the number of all drawn responses or episodes, including greedy ones and those that
                were dropped
    baseline    [n] fp32: the score of a greedy response to the same prompt; None if the advantage
                estimator does not use it
    metrics     metrics of all drawn responses, including those that were dropped
    parts       name -> [n] fp32: the named parts of the scores. A score is the weighted sum of its
                parts. Empty if the reward function returns a single number
    rows        [n] int64: the dataset row of each response, if prompts have images
    episode     [n] int64: the number of each sequence's episode. Its sequences have the same group,
                score, parts, baseline and truncated. None: each sequence is an episode of its own
    """

    batch: Batch
    texts: list[str]
    prompts: list[Prompt]
    owner: Tensor
    rank: int
    lengths: Tensor
    response_lengths: Tensor
    group: Tensor
    scores: Tensor
    truncated: Tensor
    failures: list[Failure]
    num_drawn: int
    baseline: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    parts: dict[str, Tensor] = field(default_factory=dict)
    rows: Tensor | None = None
    episode: Tensor | None = None
    details: list[dict] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.group)

    @property
    def held(self) -> Tensor:
        """Which of the n responses this rank holds, as indices: [m] int64."""
        return (self.owner == self.rank).nonzero()[:, 0]

    @property
    def episodes(self) -> Episodes:
        """Which of the n sequences belong to the same episode."""
        if self.episode is None:
            return Episodes.of_one_sequence(len(self))
        return Episodes.of(self.episode)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors with one entry for each of the n responses, by field name."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    def select(self, keep: Tensor) -> Samples:
        """Return the samples for which `keep`, [n] bool, is set."""
        kept_here = keep[self.held].nonzero()[:, 0].tolist()
        return replace(
            self,
            batch=self.batch.select(kept_here),
            texts=[self.texts[i] for i in kept_here],
            details=[self.details[i] for i in kept_here] if self.details else [],
            prompts=[self.prompts[i] for i in kept_here],
            parts={name: x[keep] for name, x in self.parts.items()},
            **{name: x[keep] for name, x in self.tensors.items()},
        )

    def with_baseline(self, greedy: Samples) -> Samples:
        """Return these samples with the scores of greedy responses as their baseline.

        greedy: one response per prompt. If it could not be graded, its group is dropped.
        """
        score_of_group = dict(zip(greedy.group.tolist(), greedy.scores.tolist()))
        scores = [score_of_group.get(group, math.nan) for group in self.group.tolist()]
        baseline = torch.tensor(scores)
        samples = replace(
            self,
            baseline=baseline,
            failures=self.failures + greedy.failures,
            num_drawn=self.num_drawn + greedy.num_drawn,
        )
        return samples.select(~baseline.isnan())

    def mini_batches(self, num_prompts: int) -> Tensor:
        """Return the mini-batch of each response: [n] int64.

        A mini-batch has the responses to num_prompts consecutive prompts. If num_prompts does not
        divide the number of prompts, mini-batches have nearly equal sizes of at most num_prompts.
        Otherwise, the few prompts that remain would get an optimizer step of their own.
        """
        prompts, index = self.group.unique(return_inverse=True)
        num_mini_batches = -(-len(prompts) // num_prompts)
        return index * num_mini_batches // len(prompts)


def concat(draws: Sequence[Samples]) -> Samples:
    """Concatenate the samples of several draws, whose groups must differ."""
    # A draw has no parts if none of its responses could be graded.
    part_names = max((samples.parts for samples in draws), key=len)
    parts = {}
    for name in part_names:
        parts[name] = torch.cat([samples.parts.get(name, samples.scores) for samples in draws])
    tensors = {}
    for name in draws[0].tensors.keys() - {"episode"}:
        tensors[name] = torch.cat([getattr(samples, name) for samples in draws])
    return replace(
        draws[0],
        batch=Batch.concat([samples.batch for samples in draws]),
        texts=sum((samples.texts for samples in draws), []),
        details=sum((samples.details for samples in draws), []),
        prompts=sum((samples.prompts for samples in draws), []),
        failures=sum((samples.failures for samples in draws), []),
        num_drawn=sum(samples.num_drawn for samples in draws),
        parts=parts,
        episode=concat_episodes(draws),
        **tensors,
    )


def concat_episodes(draws: Sequence[Samples]) -> Tensor | None:
    """Return the numbers of the episodes of several draws; those of different draws differ."""
    if all(samples.episode is None for samples in draws):
        return None
    numbers = []
    num_episodes = 0
    for samples in draws:
        episodes = samples.episodes
        numbers.append(num_episodes + episodes.index)
        num_episodes += len(episodes)
    return torch.cat(numbers)
