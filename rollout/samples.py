"""Samples: graded responses, from which one step of reinforcement learning learns.

Every rank knows the numbers of each response: its score, its length, its prompt. Tokens and texts
are on one rank alone.
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
    """n responses in the order of their prompts, of which this rank holds m.

    batch       prompt and response of the m, packed; fields loss_mask (1 on responses) and
                rollout_log_probs
    texts       the m responses as text
    prompts     the m prompts
    owner       [n] int64: the rank that holds the tokens and the text of each response
    rank        this rank
    lengths     [n] int64: tokens of prompt and response
    response_lengths  [n] int64: tokens that the model sampled
    group       [n] int64: the prompt of each response, counted through the step
    scores      [n] fp32: from the reward function
    truncated   [n] bool: ended by max_tokens
    failures    responses that could not be graded, of all ranks; they are not among the n
    num_drawn   how many responses were drawn to get these, including those left out and greedy ones
    baseline    [n] fp32: the score of a greedy response to the same prompt, if the advantage
                estimator reads it
    metrics     of everything that was drawn, including responses that were left out
    parts       [n] fp32 by name: what the scores are the weighted sums of; empty if the reward is a
                number alone
    rows        [n] int64: the row of the dataset of each response, if prompts have images
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
        """The indices, among the n, of the m responses that this rank holds: [m] int64."""
        return (self.owner == self.rank).nonzero()[:, 0]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The fields that have an entry for each of the n responses."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    def select(self, keep: Tensor) -> Samples:
        """Return the samples where keep [n] bool is set."""
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

        greedy: one response per prompt. Groups whose greedy response failed are left out.
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

        Neighbouring prompts go together, num_prompts of them in a mini-batch. Where num_prompts
        does not divide their number, the mini-batches are as nearly equal as possible, of at most
        num_prompts: otherwise a last one of a few prompts would get a whole optimizer step.
        """
        prompts, index = self.group.unique(return_inverse=True)
        num_mini_batches = -(-len(prompts) // num_prompts)
        return index * num_mini_batches // len(prompts)


def concat(draws: Sequence[Samples]) -> Samples:
    """Return the samples of several draws, one draw after another; their groups must differ."""
    # A draw of which nothing could be graded has no parts.
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
