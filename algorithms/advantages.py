"""Advantages: how much better each response, or each token, was than expected.

Computed on the host, in float64, from the rewards of the whole global batch. Each function names
the arguments it needs, and is called with them by name.

Every rank knows these numbers of all n responses of the step:

    outcome   [n] fp32: the score, minus the length penalty and the KL penalties of its tokens where
              they are configured
    lengths   [n] int64: response tokens
    baseline  [n] fp32: the score of the greedy response to the same prompt
    group     [n] int64: the prompt of each response; any numbers, groups of any size
    parts     {name: [n] fp32}: the named parts of the scores
    part_weights  {name: float}: the weight of each part in the score

An estimator that names only these returns (advantages, returns), each [n] fp32; they hold for every
token of the response.

Each rank holds only the tokens that it trains on:

    rewards   [T] fp32: the score on the last response token, minus KL penalties where configured
    mask      [T] fp32: 1 on response tokens. Tokens between them that were not sampled, such as
              tool results, are skipped.
    sequence  [T] int64: the response of each token, in 0..n-1
    num_sequences  n
    values    [T] fp32: V(x_<t)
    old_log_probs, ref_log_probs, rollout_log_probs    [T] fp32 each
    total     returns the float64 sum of x [T] over the response tokens of all ranks
    step_rewards, step_ends   [T] fp32: the reward of each step at its last token, and 1 there
    sum_by_response   returns the float64 sums of x [T] over each response, [n], on all ranks

An estimator that names one of these returns (advantages, returns), each [T] in the dtype of the
rewards and 0 outside the mask.

gamma and lam are the discount and the lambda of Schulman's lambda-return; both are 1 by default.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.packed import Total, next_in_sequence, sum_by_sequence, sum_to_go, whiten
from algorithms.pass_at_k import mean_gain

AdvantagesAndReturns = tuple[Tensor, Tensor]


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
) -> AdvantagesAndReturns:
    """Generalized advantage estimation (Schulman et al. 2016), whitened over the batch.

    delta_t = r_t + gamma V_{t+1} - V_t, with V = 0 after the last token
    A_t = delta_t + gamma lam A_{t+1}

    The returns are A + V, before A is whitened.
    """
    rewards_inside = _masked(rewards, mask)
    values_inside = _masked(values, mask)
    next_values = next_in_sequence(values_inside, mask, sequence)
    delta = rewards_inside + gamma * next_values - values_inside
    advantages = sum_to_go(delta, mask, sequence, num_sequences, gamma * lam)
    returns = advantages + values_inside
    whitened = whiten(advantages, mask, total)
    return whitened.to(rewards.dtype), returns.to(rewards.dtype)


def grpo(outcome: Tensor, group: Tensor, **_) -> AdvantagesAndReturns:
    """Group-relative advantages (Shao et al. 2024).

    (outcome - mean) / (unbiased standard deviation + 1e-6), both over the group. In a group of one
    the advantage is 0, because there is nothing to compare with. The returns are the outcomes.
    """
    groups = _group_statistics(outcome, group)
    squares = sum_by_sequence(groups.deviation.square(), groups.index, len(group))
    variance = squares[groups.index] / (groups.size - 1).clamp(min=1)
    advantages = groups.deviation / (variance.sqrt() + 1e-6)
    return advantages.to(outcome.dtype), outcome


def grpo_steps(
    rewards: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    outcome: Tensor,
    group: Tensor,
    step_rewards: Tensor,
    step_ends: Tensor,
    sum_by_response: Callable[[Tensor], Tensor],
    **_,
) -> AdvantagesAndReturns:
    """GRPO with process supervision (Shao et al. 2024, section 4.1.3), and the score as well.

    A step's reward is normalized over all steps of its group: (reward - mean) / (unbiased standard
    deviation + 1e-6). The advantage of a token is the sum over the steps that end at this token or
    later, plus grpo() of the outcome without the steps. If the latter is the same for a group, the
    second term is 0, and the advantage is the paper's. The returns are the rewards-to-go.
    """
    is_step = (step_ends > 0) & (mask > 0)
    step_rewards = torch.where(is_step, step_rewards, 0).double()
    _, group_of_response = group.unique(return_inverse=True)

    def sum_by_group(x: Tensor) -> Tensor:
        """Return the sum of x [T] over the group of each response: [n] float64."""
        return sum_by_sequence(sum_by_response(x), group_of_response, len(group))[group_of_response]

    num_steps = sum_by_group(is_step.double())
    mean = sum_by_group(step_rewards) / num_steps.clamp(min=1)
    deviation = torch.where(is_step, step_rewards - mean[sequence], 0)
    variance = sum_by_group(deviation.square()) / (num_steps - 1).clamp(min=1)
    normalized = deviation / (variance.sqrt()[sequence] + 1e-6)
    advantages = sum_to_go(normalized, mask, sequence, num_sequences, 1.0)
    rest = _without_rounding_errors(outcome, sum_by_response(step_rewards), group)
    of_rest, _ = grpo(rest, group)
    advantages = advantages + _masked(of_rest[sequence], mask)
    to_go = sum_to_go(_masked(rewards, mask), mask, sequence, num_sequences, 1.0)
    return advantages.to(rewards.dtype), to_go.to(rewards.dtype)


def dr_grpo(outcome: Tensor, group: Tensor, **_) -> AdvantagesAndReturns:
    """GRPO without the division by the standard deviation (Liu et al. 2025).

    outcome - mean over the group, which is 0 in a group of one. The returns are the outcomes.
    """
    groups = _group_statistics(outcome, group)
    return groups.deviation.to(outcome.dtype), outcome


def rloo(outcome: Tensor, group: Tensor, **_) -> AdvantagesAndReturns:
    """REINFORCE leave-one-out (Ahmadian et al. 2024).

    outcome - mean of the k-1 other outcomes in its group = k / (k-1) * (outcome - mean). In a group
    of one the advantage is 0. The returns are the outcomes.
    """
    groups = _group_statistics(outcome, group)
    num_others = (groups.size - 1).clamp(min=1)
    advantages = groups.deviation * groups.size / num_others
    return advantages.to(outcome.dtype), outcome


def reinforce_plus_plus(
    rewards: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    gamma: float = 1.0,
    total: Total = Tensor.sum,
    **_,
) -> AdvantagesAndReturns:
    """REINFORCE++ (Hu 2025): the discounted reward-to-go, whitened over the batch.

    G_t = r_t + gamma G_{t+1}. The returns are G before whitening.
    """
    to_go = sum_to_go(_masked(rewards, mask), mask, sequence, num_sequences, gamma)
    whitened = whiten(to_go, mask, total)
    return whitened.to(rewards.dtype), to_go.to(rewards.dtype)


def reinforce_plus_plus_baseline(
    outcome: Tensor, group: Tensor, lengths: Tensor, **_
) -> AdvantagesAndReturns:
    """REINFORCE++-baseline (Hu 2025): outcome - mean over the group, whitened over all tokens.

    In a group of one the value before whitening is 0. The returns are the outcomes.
    """
    advantages, _ = dr_grpo(outcome, group)
    return whiten(advantages, lengths), outcome


def remax(
    rewards: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int, *, baseline: Tensor, **_
) -> AdvantagesAndReturns:
    """ReMax (Li et al. 2023): the undiscounted reward-to-go minus the greedy response's score.

    The returns are the reward-to-go.
    """
    to_go = sum_to_go(_masked(rewards, mask), mask, sequence, num_sequences, 1.0)
    advantages = _masked(to_go - baseline.double()[sequence], mask)
    return advantages.to(rewards.dtype), to_go.to(rewards.dtype)


def opo(outcome: Tensor, group: Tensor, lengths: Tensor, **_) -> AdvantagesAndReturns:
    """OPO (Hao et al. 2025): the baseline that minimizes the variance of the gradient, if a
    response's squared gradient is proportional to its length.

    outcome - sum(length * outcome) / sum(length), both over the group. In a group of one the
    advantage is 0. The returns are the outcomes.
    """
    groups = _group_statistics(outcome, group)
    weights = lengths.double()
    # Deviations from the mean, so that equal outcomes give exactly 0.
    weighted = sum_by_sequence(groups.deviation * weights, groups.index, len(group))
    total = sum_by_sequence(weights, groups.index, len(group)).clamp(min=1)
    advantages = groups.deviation - (weighted / total)[groups.index]
    return advantages.to(outcome.dtype), outcome


def max_rl(outcome: Tensor, group: Tensor, **_) -> AdvantagesAndReturns:
    """Maximum likelihood reinforcement learning (Tajwar et al. 2026).

    (outcome - mean) / (mean + 1e-6), both over the group; 0 in a group of one. With outcomes of 0
    and 1, the expected gradient approximates that of the log-likelihood of a right answer: in a
    group of n, it is the sum of the first n terms of its series. The returns are the outcomes.

    Raises ValueError for a negative outcome, with which the mean could be 0 or negative.
    """
    if (outcome < 0).any():
        raise ValueError(
            f"algorithm.adv_estimator=max_rl needs rewards of 0 or more, but one is {outcome.min()}"
        )
    groups = _group_statistics(outcome, group)
    mean = outcome.double() - groups.deviation
    # In a group of one the deviation is 0, and with a mean of 0 all outcomes are 0.
    advantages = groups.deviation / (mean + 1e-6)
    return advantages.to(outcome.dtype), outcome


def max_at_k(outcome: Tensor, group: Tensor, *, k: int, **_) -> AdvantagesAndReturns:
    """The policy gradient of max@k (Walder and Karkhanis 2025), which is that of pass@k if outcomes
    are 0 and 1.

    max@k is the expected maximum of the outcomes of k responses. The advantage is k times the
    amount by which a response raises the maximum of k - 1 others, as a mean over all choices of the
    others in its group: k E[max(0, outcome - max of k - 1 others)]. It is never negative. The
    returns are the outcomes.

    Args:
        k: at least 2. In a group of fewer than k responses the advantage is 0.
    """
    if k < 2:
        raise ValueError(f"algorithm.adv_kwargs.k={k} must be 2 or more: with 1 it is rloo")
    advantages = torch.zeros(len(group), dtype=torch.float64)
    for number in group.unique():
        members = (group == number).nonzero()[:, 0]
        advantages[members] = k * mean_gain(outcome[members].double(), k)
    return advantages.to(outcome.dtype), outcome


def lite_ppo(outcome: Tensor, group: Tensor, **_) -> AdvantagesAndReturns:
    """GRPO with the standard deviation of the whole batch (Lite PPO, Liu et al. 2025).

    (outcome - mean of the group) / (unbiased standard deviation of all outcomes + 1e-6); 0 in a
    group of one. TRL calls it scale_rewards="batch". The returns are the outcomes.
    """
    groups = _group_statistics(outcome, group)
    if len(outcome) < 2:
        return groups.deviation.to(outcome.dtype), outcome
    advantages = groups.deviation / (outcome.double().std() + 1e-6)
    return advantages.to(outcome.dtype), outcome


def gdpo(
    parts: Mapping[str, Tensor], part_weights: Mapping[str, float], group: Tensor, **_
) -> AdvantagesAndReturns:
    """GDPO (Liu et al. 2026): each named part of the reward is normalized by itself.

    The sum of weight * grpo(part), then whitened over all responses. So a part counts by its
    weight, however widely it is spread. The returns are the weighted sums of the parts.
    """
    returns = torch.zeros(len(group), dtype=torch.float64)
    for name, part in parts.items():
        returns += part_weights[name] * part.double()
    advantages = sum_of_normalized(parts, part_weights, group)
    whitened = whiten(advantages, torch.ones_like(advantages))
    return whitened.float(), returns.float()


def sum_of_normalized(
    parts: Mapping[str, Tensor], part_weights: Mapping[str, float], group: Tensor
) -> Tensor:
    """Return the sum of weight * grpo(part), gdpo's advantages before whitening: [n] float64.

    Where the parts cancel up to rounding, the sum is 0. Otherwise, whitening could magnify the
    rest.
    """
    total = torch.zeros(len(group), dtype=torch.float64)
    size = torch.zeros(len(group), dtype=torch.float64)
    for name, part in parts.items():
        normalized, _ = grpo(part.double(), group)
        weighted = part_weights[name] * normalized
        total += weighted
        size += weighted.abs()
    return torch.where(total.abs() > 1e-5 * size, total, 0)


ADVANTAGES = {
    "gae": gae,
    "grpo": grpo,
    "grpo_steps": grpo_steps,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "max_rl": max_rl,
    "max_at_k": max_at_k,
    "lite_ppo": lite_ppo,
    "gdpo": gdpo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
}


def _without_rounding_errors(outcome: Tensor, part: Tensor, group: Tensor) -> Tensor:
    """Return outcome - part, centred in each group: [n] float64.

    Differences that fp32 scores of this size may have by rounding become 0. Otherwise, grpo() would
    magnify them.

    Args:
        outcome: [n] fp32.
        part: [n] float64, a part of the outcome that was a sum of fp32 numbers.
    """
    rest = _group_statistics(outcome.double() - part, group)
    size = outcome.double().abs() + part.abs()
    rounding = 1e-6 * sum_by_sequence(size, rest.index, len(group))[rest.index]
    return torch.where(rest.deviation.abs() > rounding, rest.deviation, 0)


@dataclass
class _GroupStatistics:
    """Per response, each [n].

    deviation: float64, outcome - mean of the group; 0 in a group of one.
    size: float64, the number of responses in the group.
    index: int64, the group's number in 0..n-1.
    """

    deviation: Tensor
    size: Tensor
    index: Tensor


def _group_statistics(outcome: Tensor, group: Tensor) -> _GroupStatistics:
    n = len(group)
    # In float64 the mean of equal fp32 numbers is exact. In fp32 it is not, and grpo would divide
    # the rounding error by 1e-6.
    outcome = outcome.double()
    _, index = group.unique(return_inverse=True)
    size = sum_by_sequence(torch.ones_like(outcome), index, n)[index]
    mean = sum_by_sequence(outcome, index, n)[index] / size
    return _GroupStatistics(outcome - mean, size, index)


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    """Return x in float64, 0 outside the mask."""
    return torch.where(mask > 0, x, 0).double()
