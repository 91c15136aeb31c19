"""Samples: the graded responses that one step of reinforcement learning learns from.

Every rank knows the score, the lengths and the group of each response, but its tokens and its text
are only on one rank.
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


@dataclass
class Samples:
    """n responses in the order of their prompts. This rank holds the tokens of m of them.

    batch       the m prompts and responses, packed; fields loss_mask (1 on responses) and
                rollout_log_probs
    texts       the m responses as text
    prompts     the m prompts
    owner       [n] int64: the rank that holds the tokens and the text of each response
    rank        this rank
    lengths     [n] int64: the number of tokens of prompt and response together
    response_lengths  [n] int64: the number of tokens that the model sampled
    group       [n] int64: the number of the group; the responses to one prompt are a group
    scores      [n] fp32: the scores from the reward function
    truncated   [n] bool: whether a response reached max_tokens
    failures    the responses of all ranks that could not be graded; they are not among the n
    num_drawn   the number of all drawn responses, including greedy ones and those that were dropped
    baseline    [n] fp32: the score of a greedy response to the same prompt; None if the advantage
                estimator does not use it
    metrics     metrics of all drawn responses, including those that were dropped
    parts       name -> [n] fp32: the named parts of the scores. A score is the weighted sum of its
                parts. Empty if the reward function returns a single number
    rows        [n] int64: the dataset row of each response, if prompts have images
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

    def __len__(self) -> int:
        return len(self.group)

    @property
    def held(self) -> Tensor:
        """Which of the n responses this rank holds, as indices: [m] int64."""
        return (self.owner == self.rank).nonzero()[:, 0]

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
    for name in draws[0].tensors:
        tensors[name] = torch.cat([getattr(samples, name) for samples in draws])
    return replace(
        draws[0],
        batch=Batch.concat([samples.batch for samples in draws]),
        texts=sum((samples.texts for samples in draws), []),
        prompts=sum((samples.prompts for samples in draws), []),
        failures=sum((samples.failures for samples in draws), []),
        num_drawn=sum(samples.num_drawn for samples in draws),
        parts=parts,
        **tensors,
    )
