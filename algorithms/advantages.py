"""Advantages: what each token was worth, from the rewards of the whole global batch. Computed on the host, in float64.

Every function takes
    rewards  [T] fp32: the score on the last response token, minus the KL penalties if they are configured
    mask     [T] fp32: 1 on response tokens; tokens in between that were not sampled (tool results) are stepped over
    sequence [T] int64, in 0..n-1
    group    [n] int64: the prompt of each sequence, any numbers, groups of any sizes
and by name, where its formula has them,
    values   [T] fp32: V(x_<t); baseline [n] fp32: the score of the greedy response to the sequence's prompt
    gamma, lam  the discount, and the lambda of Schulman's lambda-return; 1 by default
or any other argument that ppo.set_advantages has. It returns advantages and returns, each [T] in the rewards' dtype and
0 outside the mask. The score of a sequence is the sum of its token rewards: 0 if it has no response token; such a
sequence still counts in its group.
"""

import torch
from torch import Tensor

from algorithms.packed import next_in_sequence, sum_by_sequence, sum_to_go, whiten

Pair = tuple[Tensor, Tensor]


def gae(rewards: Tensor, mask: Tensor, sequence: Tensor, group: Tensor, *, values: Tensor, gamma: float = 1.0,
        lam: float = 1.0, **_) -> Pair:
    """Generalized advantage estimation (Schulman 2016), whitened over the batch.

    delta_t = r_t + gamma V_{t+1} - V_t, with V = 0 after the last token;  A_t = delta_t + gamma lam A_{t+1}
    returns: A + V, before A is whitened
    """
    rewards_, values_ = _inside(rewards, mask), _inside(values, mask)
    delta = rewards_ + gamma * next_in_sequence(values_, mask, sequence) - values_
    advantages = sum_to_go(delta, mask, sequence, len(group), gamma * lam)
    return whiten(advantages, mask).to(rewards.dtype), (advantages + values_).to(rewards.dtype)


def grpo(rewards: Tensor, mask: Tensor, sequence: Tensor, group: Tensor, **_) -> Pair:
    """Group relative (Shao 2024): (score - mean) / (unbiased std + 1e-6) over the group; a group of one: the score.

    returns: the score, on every response token
    """
    scores = _scores(rewards, mask, sequence, len(group))
    deviation, size, index = _deviation(scores, group)
    variance = sum_by_sequence(deviation.square(), index, len(group))[index] / (size - 1).clamp(min=1)
    advantages = torch.where(size > 1, deviation / (variance.sqrt() + 1e-6), scores)
    return _on_tokens(advantages, scores, rewards, mask, sequence)


def dr_grpo(rewards: Tensor, mask: Tensor, sequence: Tensor, group: Tensor, **_) -> Pair:
    """GRPO without its division (Liu 2025): score - mean over the group; a group of one: the score.

    returns: the score, on every response token
    """
    scores = _scores(rewards, mask, sequence, len(group))
    return _on_tokens(_deviation(scores, group)[0], scores, rewards, mask, sequence)


def rloo(rewards: Tensor, mask: Tensor, sequence: Tensor, group: Tensor, **_) -> Pair:
    """Leave one out (Ahmadian 2024): score - mean of the k-1 others in its group = k/(k-1) (score - mean); a group of one:
    the score.

    returns: the score, on every response token
    """
    scores = _scores(rewards, mask, sequence, len(group))
    deviation, size, _ = _deviation(scores, group)
    return _on_tokens(torch.where(size > 1, deviation * size / (size - 1), scores), scores, rewards, mask, sequence)


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, sequence: Tensor, group: Tensor, *, gamma: float = 1.0,
                        **_) -> Pair:
    """REINFORCE++ (Hu 2025): the discounted reward-to-go G_t = r_t + gamma G_{t+1}, whitened over the batch.

    returns: G before whitening
    """
    to_go = sum_to_go(_inside(rewards, mask), mask, sequence, len(group), gamma)
    return whiten(to_go, mask).to(rewards.dtype), to_go.to(rewards.dtype)


def reinforce_plus_plus_baseline(rewards: Tensor, mask: Tensor, sequence: Tensor, group: Tensor, **_) -> Pair:
    """REINFORCE++-baseline (Hu 2025): score - mean over the group (a group of one: the score), whitened over
    the tokens of the batch.

    returns: the score, on every response token
    """
    advantages, returns = dr_grpo(rewards, mask, sequence, group)
    return whiten(advantages, mask), returns


def remax(rewards: Tensor, mask: Tensor, sequence: Tensor, group: Tensor, *, baseline: Tensor, **_) -> Pair:
    """ReMax (Li 2023): the undiscounted reward-to-go minus the score of the greedy response, baseline[i].

    returns: the reward-to-go
    """
    to_go = sum_to_go(_inside(rewards, mask), mask, sequence, len(group), 1.0)
    return _inside(to_go - baseline.double()[sequence], mask).to(rewards.dtype), to_go.to(rewards.dtype)


ADVANTAGES = {
    "gae": gae, "grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline, "remax": remax,
}


def _inside(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask > 0, x, 0).double()


def _scores(rewards: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    return sum_by_sequence(_inside(rewards, mask), sequence, num_sequences)


def _deviation(scores: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """score - mean of the group (a group of one has mean 0), the size of the group, and its index in 0..n-1; each [n]."""
    n, index = len(group), group.unique(return_inverse=True)[1]
    size = sum_by_sequence(torch.ones_like(scores), index, n)[index]
    # In float64 the mean of equal fp32 scores is exact; grpo would divide what rounding leaves over by 1e-6.
    mean = sum_by_sequence(scores, index, n)[index] / size
    return torch.where(size > 1, scores - mean, scores), size, index


def _on_tokens(advantages: Tensor, returns: Tensor, rewards: Tensor, mask: Tensor, sequence: Tensor) -> Pair:
    """[n] and [n] -> [T] and [T], in the rewards' dtype."""
    return tuple(_inside(x[sequence], mask).to(rewards.dtype) for x in (advantages, returns))
