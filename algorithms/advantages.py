"""Advantages: what each token was worth, from the rewards of the whole global batch. Computed on the host, in float64.

Every rank knows the numbers of all n responses of the step:
    outcome  [n] fp32: the score, minus penalties for length and the KL penalties of its tokens if they are configured
    lengths  [n] int64, response tokens;  baseline [n] fp32: the score of the greedy response to the same prompt
    group    [n] int64: the prompt of each response, any numbers, groups of any sizes
An advantage that names no more returns advantages and returns, each [n] fp32, which hold for every token of the response.

Of tokens a rank has those that it trains on:
    rewards  [T] fp32: the score on the last response token, minus the KL penalties if they are configured
    mask     [T] fp32: 1 on response tokens; tokens in between that were not sampled (tool results) are stepped over
    sequence [T] int64: the response of each token, in 0..n-1; and num_sequences, which is n
    values   [T] fp32: V(x_<t); and old_log_probs, ref_log_probs, rollout_log_probs, each [T] fp32
An advantage that names these returns advantages and returns, each [T] in the rewards' dtype and 0 outside the mask. What it must
know of other ranks' tokens is a sum, total(x [T]): scalar float64, over all response tokens of the step.

gamma and lam are the discount and the lambda of Schulman's lambda-return; 1 by default.
"""

import torch
from torch import Tensor

from algorithms.packed import Total, next_in_sequence, sum_by_sequence, sum_to_go, whiten

Pair = tuple[Tensor, Tensor]


def gae(
    rewards: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    values: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    total: Total = Tensor.sum,
    **_,
) -> Pair:
    """Generalized advantage estimation (Schulman 2016), whitened over the batch.

    delta_t = r_t + gamma V_{t+1} - V_t, with V = 0 after the last token;  A_t = delta_t + gamma lam A_{t+1}
    returns: A + V, before A is whitened
    """
    rewards_, values_ = _inside(rewards, mask), _inside(values, mask)
    delta = rewards_ + gamma * next_in_sequence(values_, mask, sequence) - values_
    advantages = sum_to_go(delta, mask, sequence, num_sequences, gamma * lam)
    return whiten(advantages, mask, total).to(rewards.dtype), (advantages + values_).to(
        rewards.dtype
    )


def grpo(outcome: Tensor, group: Tensor, **_) -> Pair:
    """Group relative (Shao 2024): (outcome - mean) / (unbiased std + 1e-6) over the group; a group of one: the outcome.

    returns: the outcome
    """
    deviation, size, index = _deviation(outcome, group)
    variance = sum_by_sequence(deviation.square(), index, len(group))[index] / (size - 1).clamp(
        min=1
    )
    advantages = torch.where(size > 1, deviation / (variance.sqrt() + 1e-6), deviation)
    return advantages.to(outcome.dtype), outcome


def dr_grpo(outcome: Tensor, group: Tensor, **_) -> Pair:
    """GRPO without its division (Liu 2025): outcome - mean over the group; a group of one: the outcome.

    returns: the outcome
    """
    return _deviation(outcome, group)[0].to(outcome.dtype), outcome


def rloo(outcome: Tensor, group: Tensor, **_) -> Pair:
    """Leave one out (Ahmadian 2024): outcome - mean of the k-1 others in its group = k/(k-1) (outcome - mean); a group of
    one: the outcome.

    returns: the outcome
    """
    deviation, size, _ = _deviation(outcome, group)
    return torch.where(size > 1, deviation * size / (size - 1), deviation).to(
        outcome.dtype
    ), outcome


def reinforce_plus_plus(
    rewards: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    gamma: float = 1.0,
    total: Total = Tensor.sum,
    **_,
) -> Pair:
    """REINFORCE++ (Hu 2025): the discounted reward-to-go G_t = r_t + gamma G_{t+1}, whitened over the batch.

    returns: G before whitening
    """
    to_go = sum_to_go(_inside(rewards, mask), mask, sequence, num_sequences, gamma)
    return whiten(to_go, mask, total).to(rewards.dtype), to_go.to(rewards.dtype)


def reinforce_plus_plus_baseline(outcome: Tensor, group: Tensor, lengths: Tensor, **_) -> Pair:
    """REINFORCE++-baseline (Hu 2025): outcome - mean over the group (a group of one: the outcome), whitened over
    the tokens of the batch.

    returns: the outcome
    """
    return whiten(dr_grpo(outcome, group)[0], lengths), outcome


def remax(
    rewards: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int, *, baseline: Tensor, **_
) -> Pair:
    """ReMax (Li 2023): the undiscounted reward-to-go minus the score of the greedy response, baseline[i].

    returns: the reward-to-go
    """
    to_go = sum_to_go(_inside(rewards, mask), mask, sequence, num_sequences, 1.0)
    return _inside(to_go - baseline.double()[sequence], mask).to(rewards.dtype), to_go.to(
        rewards.dtype
    )


ADVANTAGES = {
    "gae": gae,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
}


def _inside(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask > 0, x, 0).double()


def _deviation(outcome: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """outcome - mean of the group (a group of one has mean 0), the size of the group, and its index in 0..n-1; each [n]."""
    n, outcome, index = len(group), outcome.double(), group.unique(return_inverse=True)[1]
    size = sum_by_sequence(torch.ones_like(outcome), index, n)[index]
    # In float64 the mean of equal fp32 numbers is exact; grpo would divide what rounding leaves over by 1e-6.
    mean = sum_by_sequence(outcome, index, n)[index] / size
    return torch.where(size > 1, outcome - mean, outcome), size, index
