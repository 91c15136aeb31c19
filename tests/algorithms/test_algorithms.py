"""Each algorithm against its paper's formula in Python loops, and numbers worked out by hand."""

import ast
import itertools
import math
import statistics
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from algorithms.advantages import ADVANTAGES
from algorithms.aggregation import AGGREGATIONS
from algorithms.dapo import informative, overlong_penalty
from algorithms.kl import KL_ESTIMATORS, adapt
from algorithms.packed import mean_by_sequence, sum_by_sequence, whiten
from algorithms.pass_at_k import pass_at_k
from algorithms.policy_losses import POLICY_LOSSES
from algorithms.reward_losses import bradley_terry, regression
from algorithms.rollout_correction import (
    correction_weights,
    effective_sample_size,
    keep_mask,
    moments_by_age,
    off_policy,
)
from algorithms.value_loss import explained_variance, value_loss
from common import plugins

CLIPS = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}
NAN = math.nan
# max_at_k is tried with this k.
K = 3
# gdpo is tried with parts that are these shares of the outcome, and have these weights.
PARTS = (0.25, -0.5)
WEIGHTS = (6.0, 1.0)


def floats(*x):
    return torch.tensor(x, dtype=torch.float32)


def ints(*x):
    return torch.tensor(x, dtype=torch.int64)


def close(got, want, tolerance=2e-5):
    torch.testing.assert_close(
        got.double(), torch.as_tensor(want).double(), rtol=tolerance, atol=tolerance
    )


class Packed:
    """A random batch of n packed sequences.

    Sequences are not in the order of their numbers, responses have holes in their mask, and
    sequence 4 has no response.

    Attributes:
        mask: [T] fp32, 1 on tokens of responses.
        sequence: [T], the number of each token's sequence.
        group: [n], the group of each sequence.
        tokens: for each sequence, the places of its response tokens.
    """

    def __init__(self, seed, n=13):
        self.g = torch.Generator().manual_seed(seed)
        self.n = n
        mask = []
        sequence = []
        for i in torch.randperm(n, generator=self.g).tolist():
            prompt, response = torch.randint(1, 9, (2,), generator=self.g).tolist()
            holes = (torch.rand(response if i != 4 else 0, generator=self.g) < 0.7).tolist()
            mask += [0] * prompt + holes
            sequence += [i] * (prompt + len(holes))
        self.mask = floats(*mask)
        self.sequence = ints(*sequence)
        groups = ([40, -3, 7, 7, 0, 0, 0] + [5] * n)[:n]
        self.group = ints(*groups)[torch.randperm(n, generator=self.g)]
        self.tokens = [[] for _ in range(n)]
        for place, number in enumerate(sequence):
            if mask[place]:
                self.tokens[number].append(place)

    def random(self, scale=1.0, outside=NAN):
        """Return random numbers, [T] fp32, with `outside` where the mask is 0."""
        values = torch.randn(len(self.mask), generator=self.g) * scale
        return torch.where(self.mask > 0, values, outside)

    def by_sequence(self, values):
        """Return the values of each sequence's response tokens, as lists."""
        return [values[places].tolist() for places in self.tokens]


# -- advantages by formula -------------------------------------------------------------------------
# Each function takes, for every sequence, a list with the rewards of its tokens. It returns such
# lists of advantages and of returns.


@dataclass
class Estimate:
    """What an estimator is given.

    Attributes:
        rewards, values: for each sequence, of its tokens.
        group, baseline: for each sequence.
    """

    rewards: list[list[float]]
    group: list[int]
    values: list[list[float]]
    baseline: list[float]
    gamma: float
    lam: float


def whitened(rows):
    tokens = list(itertools.chain(*rows))
    mean = statistics.mean(tokens)
    std = statistics.stdev(tokens)
    result = []
    for row in rows:
        result.append([(value - mean) / std for value in row])
    return result


def discounted_sums(rewards, gamma):
    """Return for each token the discounted sum of its reward and of all that follow."""
    result = []
    for row in rewards:
        sums = []
        for t in range(len(row)):
            sums.append(sum(gamma ** (k - t) * row[k] for k in range(t, len(row))))
        result.append(sums)
    return result


def gae(given):
    deltas = []
    for rewards, values in zip(given.rewards, given.values):
        next_values = values[1:] + [0]
        deltas.append(
            [
                reward + given.gamma * next_value - value
                for reward, value, next_value in zip(rewards, values, next_values)
            ]
        )
    advantages = discounted_sums(deltas, given.gamma * given.lam)
    returns = []
    for of_sequence, values in zip(advantages, given.values):
        returns.append([advantage + value for advantage, value in zip(of_sequence, values)])
    return whitened(advantages), returns


def from_scores(advantage_of):
    """Return an estimator that gives all tokens of a sequence the same advantage.

    advantage_of: (score, scores of the other sequences in its group) -> advantage.
    """

    def estimate(given):
        scores = [sum(rewards) for rewards in given.rewards]
        advantages = []
        returns = []
        for i, rewards in enumerate(given.rewards):
            others = [
                score
                for j, score in enumerate(scores)
                if given.group[j] == given.group[i] and j != i
            ]
            advantage = advantage_of(scores[i], others) if others else 0.0
            advantages.append([advantage] * len(rewards))
            returns.append([scores[i]] * len(rewards))
        return advantages, returns

    return estimate


def minus_mean(score, others):
    return score - statistics.mean([score, *others])


def standardized(score, others):
    return minus_mean(score, others) / (statistics.stdev([score, *others]) + 1e-6)


def minus_mean_of_others(score, others):
    return score - sum(others) / len(others)


def reinforce_plus_plus(given):
    returns = discounted_sums(given.rewards, given.gamma)
    return whitened(returns), returns


def reinforce_plus_plus_baseline(given):
    advantages, returns = from_scores(minus_mean)(given)
    return whitened(advantages), returns


def remax(given):
    returns = discounted_sums(given.rewards, 1)
    advantages = []
    for row, baseline in zip(returns, given.baseline):
        advantages.append([value - baseline for value in row])
    return advantages, returns


def opo(given):
    """The baseline of a group is the mean of its scores, weighted by length."""
    scores = [sum(rewards) for rewards in given.rewards]
    advantages = []
    returns = []
    for rewards, score, group in zip(given.rewards, scores, given.group):
        members = [i for i, number in enumerate(given.group) if number == group]
        num_tokens = sum(len(given.rewards[i]) for i in members)
        weighted = sum(len(given.rewards[i]) * scores[i] for i in members)
        advantages.append([score - weighted / max(num_tokens, 1)] * len(rewards))
        returns.append([score] * len(rewards))
    return advantages, returns


def over_the_mean(score, others):
    return minus_mean(score, others) / (statistics.mean([score, *others]) + 1e-6)


def gain_of_the_maximum(score, others):
    """K times the mean amount by which a score raises the maximum of K - 1 others."""
    choices = list(itertools.combinations(others, K - 1))
    gains = [max(score, *choice) - max(choice) for choice in choices]
    return K * statistics.mean(gains) if gains else 0.0


def standardized_by_the_batch(given):
    advantages, returns = from_scores(minus_mean)(given)
    std = statistics.stdev(sum(rewards) for rewards in given.rewards) + 1e-6
    scaled = []
    for row in advantages:
        scaled.append([advantage / std for advantage in row])
    return scaled, returns


def gdpo(given):
    """The parts are those of PARTS."""
    total = [0.0] * len(given.rewards)
    for share, weight in zip(PARTS, WEIGHTS):
        rewards = []
        for row in given.rewards:
            rewards.append([share * reward for reward in row])
        scores = [sum(row) for row in rewards]
        for i, score in enumerate(scores):
            others = [
                scores[j] for j in range(len(scores)) if given.group[j] == given.group[i] and j != i
            ]
            total[i] += weight * standardized(score, others) if others else 0.0
    (of_responses,) = whitened([total])
    advantages = [[x] * len(row) for x, row in zip(of_responses, given.rewards)]
    return advantages, from_scores(minus_mean)(given)[1]


def grpo_steps(given):
    """A step ends at every second token of a response, from the first one on."""
    steps = [row[::2] for row in given.rewards]
    rests = [sum(row[1::2]) for row in given.rewards]
    advantages = []
    for i, row in enumerate(given.rewards):
        members = [j for j, group in enumerate(given.group) if group == given.group[i]]
        of_group = list(itertools.chain(*(steps[j] for j in members)))
        others = [rests[j] for j in members if j != i]
        of_rest = standardized(rests[i], others) if others else 0.0
        normalized = [0.0] * len(row)
        if len(of_group) > 1:
            std = statistics.stdev(of_group) + 1e-6
            mean = statistics.mean(of_group)
            normalized[::2] = [(reward - mean) / std for reward in row[::2]]
        advantages.append([sum(normalized[t:]) + of_rest for t in range(len(row))])
    return advantages, discounted_sums(given.rewards, 1.0)


BY_FORMULA = {
    "grpo_steps": grpo_steps,
    "gae": gae,
    "opo": opo,
    "max_rl": from_scores(over_the_mean),
    "max_at_k": from_scores(gain_of_the_maximum),
    "lite_ppo": standardized_by_the_batch,
    "gdpo": gdpo,
    "grpo": from_scores(standardized),
    "dr_grpo": from_scores(minus_mean),
    "rloo": from_scores(minus_mean_of_others),
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
}


# -- advantages ------------------------------------------------------------------------------------


def inputs_of_steps(rewards, mask, sequence, n):
    """Return the inputs of grpo_steps() that other estimators do not read."""

    def sum_by_response(x):
        return sum_by_sequence(torch.where(mask > 0, x, 0).double(), sequence, n)

    ends = torch.zeros_like(mask)
    for number in range(n):
        places = ((sequence == number) & (mask > 0)).nonzero()[:, 0]
        ends[places[::2]] = 1
    return {
        "outcome": sum_by_response(rewards).float(),
        "step_rewards": rewards,
        "step_ends": ends,
        "sum_by_response": sum_by_response,
    }


def advantages(name, rewards, mask, sequence, group, **settings):
    """Return advantages and returns [T] of an estimator of tokens or of sequences."""
    function = ADVANTAGES[name]
    n = len(group)
    if name == "grpo_steps":
        settings |= inputs_of_steps(rewards, mask, sequence, n)
    if "rewards" in plugins.parameters(function):
        return function(
            rewards=rewards, mask=mask, sequence=sequence, num_sequences=n, group=group, **settings
        )
    outcome = sum_by_sequence(torch.where(mask > 0, rewards, 0), sequence, n)
    lengths = sum_by_sequence(mask, sequence, n).long()
    own = {
        "parts": {str(share): share * outcome for share in PARTS},
        "part_weights": {str(share): weight for share, weight in zip(PARTS, WEIGHTS)},
        "k": K,
    }
    own = {key: value for key, value in own.items() if key in plugins.parameters(function)}
    results = function(outcome=outcome, lengths=lengths, group=group, **own, **settings)
    return [of_sequences[sequence] * mask for of_sequences in results]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_those_of_the_formula(name, seed):
    batch = Packed(seed)
    rewards = batch.random()
    if name == "max_rl":
        rewards = rewards.abs()
    values = batch.random()
    baseline = torch.randn(batch.n, generator=batch.g)
    got = advantages(
        name,
        rewards,
        batch.mask,
        batch.sequence,
        batch.group,
        values=values,
        baseline=baseline,
        gamma=0.9,
        lam=0.8,
    )
    given = Estimate(
        batch.by_sequence(rewards),
        batch.group.tolist(),
        batch.by_sequence(values),
        baseline.tolist(),
        gamma=0.9,
        lam=0.8,
    )
    for of_tokens, rows in zip(got, BY_FORMULA[name](given)):
        assert of_tokens.dtype == torch.float32
        assert not of_tokens[batch.mask == 0].any()
        for places, row in zip(batch.tokens, rows):
            close(of_tokens[places], row)


def test_advantages_worked_out_by_hand():
    # Sequences of a prompt token and a response of two, two, one and one tokens. The first response
    # has a tool result between its tokens.
    sequence = ints(2, 2, 2, 2, 0, 0, 0, 1, 1, 3, 3)
    mask = floats(0, 1, 0, 1, 0, 1, 1, 0, 1, 0, 1)
    rewards = floats(9, 0.5, 9, 2.5, 9, 0, 1, 9, 4, 9, 5)  # scores 3, 1, 4, 5, the last one alone

    def check(name, *want, **settings):
        for got, row in zip(
            advantages(name, rewards, mask, sequence, ints(6, 6, 6, 2), **settings), want
        ):
            close(got[mask > 0], row)

    scores = [3, 3, 1, 1, 4, 5]
    std = math.sqrt(7 / 3) + 1e-6  # (1/9 + 25/9 + 16/9) / 2
    check("grpo", [1 / 3 / std, 1 / 3 / std, -5 / 3 / std, -5 / 3 / std, 4 / 3 / std, 0], scores)
    check("dr_grpo", [1 / 3, 1 / 3, -5 / 3, -5 / 3, 4 / 3, 0], scores)
    check("rloo", [0.5, 0.5, -2.5, -2.5, 2, 0], scores)
    check("remax", [0, -0.5, 0, 0, 2, 1], [3, 2.5, 1, 1, 4, 5], baseline=floats(1, 2, 3, 4))
    # The mean of the returns is 59/24, and they deviate from it by (-17, 1, -47, -35, 37, 61)/24.
    std = 24 * math.sqrt((17**2 + 1 + 47**2 + 35**2 + 37**2 + 61**2) / 24**2 / 5)
    check(
        "reinforce_plus_plus",
        [d / std for d in (-17, 1, -47, -35, 37, 61)],
        [1.75, 2.5, 0.5, 1, 4, 5],
        gamma=0.5,
    )
    # delta: 0.5 + 1 - 0, 2.5 - 1; 0 + 1 - 2, 1 - 1; 4 - 3; 5 - 0. So the advantages are 2.25, 1.5;
    # -1, 0; 1; 5, and their mean is 8.75/6.
    a = [2.25, 1.5, -1, 0, 1, 5]
    std = math.sqrt(sum((x - 8.75 / 6) ** 2 for x in a) / 5)
    check(
        "gae",
        [(x - 8.75 / 6) / std for x in a],
        [2.25, 2.5, 1, 1, 4, 5],
        values=floats(7, 0, 7, 1, 7, 2, 1, 7, 3, 7, 0),
        lam=0.5,
    )


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_scores_teach_nothing_and_absent_tokens_do_no_harm(name):
    def run(rewards, mask, sequence, group):
        return advantages(
            name,
            rewards,
            mask,
            sequence,
            group,
            values=torch.zeros_like(rewards),
            baseline=torch.full((len(group),), 0.1),
        )

    # 0.1 is no binary fraction: in fp32, the mean of seven is not 0.1.
    gains, returns = run(
        floats(5, *[0.1] * 7), floats(0, *[1] * 7), ints(0, *range(7)), ints(*[8] * 7)
    )
    close(returns, [0] + [0.1] * 7)
    assert torch.equal(gains, torch.zeros(8))
    no_sequence = run(floats(), floats(), ints(), ints())
    no_token = run(floats(), floats(), ints(), ints(0, 0))
    no_response = run(floats(3, 3), floats(0, 0), ints(0, 1), ints(0, 0))
    for result in (*no_sequence, *no_token, *no_response):
        assert torch.equal(result, torch.zeros_like(result))
    # A single token.
    gains, returns = run(floats(3, 2, 3), floats(0, 1, 0), ints(1, 1, 0), ints(4, 4))
    assert returns.tolist() == [0, 2, 0]
    half = 1 / math.sqrt(2)
    expected = {"grpo": half, "dr_grpo": 1, "rloo": 2, "remax": 1.9}
    expected |= {"max_rl": 1, "lite_ppo": half, "gdpo": half}
    close(gains, [0, expected.get(name, 0), 0])


def test_parts_are_normalized_by_themselves():
    """The second part is a thousand times as large, and counts by its weight only."""
    parts = {"right": floats(0, 0, 1, 1), "length": floats(1000, 2000, 1000, 2000)}
    group = ints(0, 0, 0, 0)
    gains, returns = ADVANTAGES["gdpo"](
        parts=parts, part_weights={"right": 2.0, "length": 1.0}, group=group
    )
    # Normalized: -a, -a, a, a and -a, a, -a, a. So the sums are -3a, -a, a, 3a.
    std = math.sqrt(20 / 3)
    close(gains, [-3 / std, -1 / std, 1 / std, 3 / std], 1e-4)
    close(returns, [1000, 2000, 1002, 2002])


def test_parts_that_cancel_teach_nothing():
    """Whitening would magnify what rounding leaves of their sum."""
    right = floats(0.1, 0.2, 0.7, 0.4)
    parts = {"right": right, "wrong": 1 - right}
    weights = {"right": 1.0, "wrong": 1.0}
    gains, _ = ADVANTAGES["gdpo"](parts=parts, part_weights=weights, group=ints(0, 0, 0, 0))
    assert gains.tolist() == [0, 0, 0, 0]


def test_a_batch_of_one_response_has_no_standard_deviation():
    gains, returns = ADVANTAGES["lite_ppo"](outcome=floats(3), group=ints(0))
    assert gains.tolist() == [0]
    assert returns.tolist() == [3]


def test_estimators_of_a_maximum_and_of_a_likelihood_worked_out_by_hand():
    group = ints(0, 0, 0, 0)
    # One of four is right: it raises the maximum of any other by 1.
    gains, _ = ADVANTAGES["max_at_k"](outcome=floats(0, 1, 0, 0), group=group, k=2)
    close(gains, [0, 2, 0, 0])
    # Two are right: each raises the maximum of two of three others.
    gains, _ = ADVANTAGES["max_at_k"](outcome=floats(1, 1, 0, 0), group=group, k=2)
    close(gains, [4 / 3, 4 / 3, 0, 0])
    gains, _ = ADVANTAGES["max_at_k"](outcome=floats(1, 1, 0, 0), group=group, k=5)
    assert not gains.any()
    with pytest.raises(ValueError, match="k=1 must be 2 or more: with 1 it is rloo"):
        ADVANTAGES["max_at_k"](outcome=floats(1, 0), group=ints(0, 0), k=1)
    gains, _ = ADVANTAGES["max_rl"](outcome=floats(1, 0, 0, 0), group=group)
    close(gains, [3, -1, -1, -1])
    with pytest.raises(ValueError, match="needs rewards of 0 or more, but one is -0.5"):
        ADVANTAGES["max_rl"](outcome=floats(1, -0.5), group=ints(0, 0))


@pytest.mark.parametrize("k", [2, 3])
def test_the_gradient_of_max_at_k_is_unbiased(k):
    """Over all groups of four that a policy with three actions can draw.

    Attributes of the policy: probabilities p, and scores of the actions. The expected maximum of k
    actions is written out, and differentiated.
    """
    n = 4
    logits = torch.tensor([0.3, -0.5, 0.1], dtype=torch.float64, requires_grad=True)
    scores = torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)
    log_probs = logits.log_softmax(0)
    expected_maximum = 0
    for actions in itertools.product(range(3), repeat=k):
        drawn = list(actions)
        expected_maximum += log_probs[drawn].sum().exp() * scores[drawn].max()
    (want,) = torch.autograd.grad(expected_maximum, logits, retain_graph=True)
    objective = 0
    for actions in itertools.product(range(3), repeat=n):
        drawn = list(actions)
        gains, _ = ADVANTAGES["max_at_k"](outcome=scores[drawn], group=ints(0, 0, 0, 0), k=k)
        probability = log_probs[drawn].sum().exp().detach()
        objective += probability * (gains * log_probs[drawn]).mean()
    (got,) = torch.autograd.grad(objective, logits)
    torch.testing.assert_close(got, want)


def test_packed_sums():
    x = floats(1, 2, 3, NAN, 4)
    mask = floats(1, 0, 1, 0, 1)
    sequence = ints(2, 2, 2, 0, 1)
    assert sum_by_sequence(mask, sequence, 5).tolist() == [0, 1, 2, 0, 0]
    assert mean_by_sequence(x, mask, sequence, 5).tolist() == [0, 4, 2, 0, 0]
    close(
        whiten(floats(1, NAN, 2, 6), floats(1, 0, 1, 1)),
        [-2 / math.sqrt(7), 0, -1 / math.sqrt(7), 3 / math.sqrt(7)],
    )
    neighbours_in_fp32 = floats(1024, 1024 + 2**-13)
    close(whiten(neighbours_in_fp32, floats(1, 1))[1], 2**-14 / math.sqrt(2**-27 + 1e-8))
    assert whiten(floats(5, 6), floats(0, 1)).tolist() == [0, 0]
    assert whiten(torch.full((1000,), 0.1), torch.ones(1000)).abs().max() < 1e-9


# -- policy losses ---------------------------------------------------------------------------------


def policy_loss_by_formula(name, log_probs, old, advantages, tokens, clips):
    """Return {place: (loss, whether clipping changed it)} of each response token."""
    results = {}
    for places in tokens:
        for t in places:
            ratio = torch.exp(log_probs[t] - old[t])
            advantage = advantages[t].item()
            if name == "gspo":
                mean = statistics.mean((log_probs[u] - old[u]).item() for u in places)
                ratio = math.exp(mean) * log_probs[t].exp() / log_probs[t].exp().detach()
            if name == "gmpo":
                results[t] = gmpo_of_token(t, places, log_probs - old, advantages, clips)
            elif name == "sapo":
                tau = 1.0 if advantage > 0 else 1.05
                results[t] = -advantage * 4 / tau / (1 + torch.exp(-tau * (ratio - 1))), False
            elif name.startswith("dppo"):
                p = log_probs[t].exp().item()
                is_too_far = MOVED_TOO_FAR[name](p, old[t].exp().item(), advantage, clips)
                weight = 0 if is_too_far else ratio.item()
                results[t] = -weight * advantage * log_probs[t], is_too_far
            else:
                loss_of_token = cispo_of_token if name == "cispo" else ppo_of_token
                results[t] = loss_of_token(ratio, advantage, log_probs[t], clips)
    return results


def gmpo_of_token(t, places, log_ratios, advantages, clips):
    """Each log-ratio of the sequence is clipped if that lowers the objective at its token."""
    kept = []
    for u in places:
        bounded = min(max(log_ratios[u].item(), -clips["clip_low"]), clips["clip_high"])
        lowers = advantages[u].item() * bounded < advantages[u].item() * log_ratios[u].item()
        kept.append(0 * log_ratios[u] + bounded if lowers else log_ratios[u])
    loss = -advantages[t].item() * torch.exp(sum(kept) / len(kept))
    return loss, kept[places.index(t)].item() != log_ratios[t].item()


def moved_too_far_by_tv(p, old, advantage, clips):
    if advantage > 0:
        return p - old > clips["clip_high"]
    return old - p > clips["clip_low"]


def moved_too_far_by_kl(p, old, advantage, clips):
    divergence = old * math.log(old / p) + (1 - old) * math.log((1 - old) / (1 - p))
    if advantage > 0:
        return p > old and divergence > clips["clip_high"]
    return p < old and divergence > clips["clip_low"]


MOVED_TOO_FAR = {"dppo_tv": moved_too_far_by_tv, "dppo_kl": moved_too_far_by_kl}


def bounded_ratio(ratio, clips):
    return min(max(ratio.item(), 1 - clips["clip_low"]), 1 + clips["clip_high"])


def cispo_of_token(ratio, advantage, log_prob, clips):
    bounded = bounded_ratio(ratio, clips)
    return -bounded * advantage * log_prob, bounded != ratio.item()


def ppo_of_token(ratio, advantage, log_prob, clips):
    no_gradient = 0 * log_prob
    objective = min(ratio * advantage, bounded_ratio(ratio, clips) * advantage + no_gradient)
    if advantage < 0 and clips["dual_clip"]:
        objective = max(objective, clips["dual_clip"] * advantage + no_gradient)
    return -objective, objective.item() != (ratio * advantage).item()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dual_clip", [0, 1.5])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_losses_and_their_gradients_are_those_of_the_formula(name, dual_clip, seed):
    batch = Packed(seed, n=20)
    log_probs = (-batch.random().abs() - 0.05).requires_grad_()
    advantages = batch.random(outside=0.0)
    upstream = torch.randn(len(log_probs), generator=batch.g)
    old = -(log_probs.detach() + batch.random(0.7)).abs() - 0.05
    clips = CLIPS | {"dual_clip": dual_clip}
    loss, metrics = POLICY_LOSSES[name](
        log_probs, old, advantages, batch.mask, batch.sequence, batch.n, **clips
    )
    clipped = metrics.get("pg_clipfrac", torch.zeros_like(loss))
    loss.backward(upstream)
    for x in (loss, clipped, log_probs.grad):
        assert x.dtype == torch.float32
        assert not x[batch.mask == 0].any()
    leaf = log_probs.detach().double().requires_grad_()
    expected = policy_loss_by_formula(name, leaf, old.double(), advantages, batch.tokens, clips)
    sum(expected[t][0] * upstream[t].double() for t in expected).backward()
    places = sorted(expected)
    close(loss[places], torch.stack([expected[t][0] for t in places]))
    close(log_probs.grad[places], leaf.grad[places])
    assert clipped[places].tolist() == [expected[t][1] for t in places]
    assert (name == "sapo") == (clipped.sum() == 0)
    assert clipped.sum() < len(places)


def test_policy_losses_worked_out_by_hand():
    ratios = floats(0.5, 0.5, 2, 2, 4, 4, 1.25, 1.25)
    advantages = floats(1, -1, 1, -1, 1, -2, 3, -3)
    log_probs = floats(-1, -2, -1, -1, -1, -1, -1, -1).requires_grad_()
    for name, dual_clip, want, want_clipped, want_moving in (
        (
            "ppo",
            3,
            [-0.5, 0.8, -1.3, 2, -1.3, 6, -3.75, 3.75],
            [0, 1, 1, 0, 1, 1, 0, 0],
            [1, 0, 0, 1, 0, 0, 1, 1],
        ),
        (
            "ppo",
            0,
            [-0.5, 0.8, -1.3, 2, -1.3, 8, -3.75, 3.75],
            [0, 1, 1, 0, 1, 0, 0, 0],
            [1, 0, 0, 1, 0, 1, 1, 1],
        ),
        (
            "cispo",
            3,
            [0.8, -1.6, 1.3, -1.3, 1.3, -2.6, 3.75, -3.75],
            [1, 1, 1, 1, 1, 1, 0, 0],
            [1] * 8,
        ),
    ):
        loss, metrics = POLICY_LOSSES[name](
            log_probs,
            log_probs.detach() - ratios.log(),
            advantages,
            torch.ones(8),
            torch.arange(8),
            8,
            **CLIPS | {"dual_clip": dual_clip},
        )
        close(loss, want)
        assert metrics["pg_clipfrac"].tolist() == want_clipped
        assert torch.autograd.grad(loss.sum(), log_probs)[0].ne(0).tolist() == want_moving
    # Two sequences, of geometric means (0.5 * 2)^(1/2) = 1 and (2 * 4 * 4 * 2)^(1/4) = 2^1.5
    logs = floats(0.5, 2, 2, 4, 4, 2).log()
    ones = torch.ones(6)
    sequence = ints(1, 1, 0, 0, 0, 0)
    close(
        POLICY_LOSSES["gspo"](logs, 0 * ones, -ones, ones, sequence, 2, **CLIPS)[0],
        [1, 1] + [2**1.5] * 4,
    )
    with pytest.raises(ValueError, match="dual_clip=0.9 must be above 1"):
        POLICY_LOSSES["ppo"](
            *[torch.zeros(1)] * 4, ints(0), 1, clip_low=0.2, clip_high=0.2, dual_clip=0.9
        )


def loss_of_tokens(name, ratios, advantages, log_probs, **settings):
    """Return the losses and metrics of tokens that are sequences of their own."""
    log_probs = floats(*log_probs)
    n = len(ratios)
    old = log_probs - floats(*ratios).log()
    tokens = torch.arange(n)
    arguments = (log_probs, old, floats(*advantages), torch.ones(n), tokens, n)
    return POLICY_LOSSES[name](*arguments, **CLIPS | settings)


def test_sapo_has_a_temperature_for_each_sign_of_the_advantage():
    ratios = (1.5, 0.5, 1.5, 0.5)
    advantages = (2, 2, -3, -3)
    expected = []
    for ratio, advantage in zip(ratios, advantages):
        tau = 0.5 if advantage > 0 else 2.0
        expected.append(-advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1))))
    settings = {"tau_positive": 0.5, "tau_negative": 2.0}
    loss, _ = loss_of_tokens("sapo", ratios, advantages, [-1] * 4, **settings)
    close(loss, expected)
    for wrong in ({"tau_positive": 0.0}, {"tau_negative": -1.0}):
        with pytest.raises(ValueError, match="must be above 0"):
            loss_of_tokens("sapo", [1], [1], [-1], **wrong)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_divergence_ppo_truncates_large_ratios(name):
    """These tokens are so unlikely that they have hardly moved."""
    unlikely = -9.0
    settings = {"max_ratio": 1.2}
    loss, metrics = loss_of_tokens(name, [1.1, 3, 1.2], [1, 1, -2], [unlikely] * 3, **settings)
    close(loss, [1.1 * 9, 1.2 * 9, -2 * 1.2 * 9])
    assert not metrics["pg_clipfrac"].any()
    with pytest.raises(ValueError, match="max_ratio=0 must be above 0"):
        loss_of_tokens(name, [1], [1], [-1], max_ratio=0)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_a_token_that_was_certain_can_have_moved_too_far(name):
    """From a probability of 1 to 1/2. Upwards, it has not moved at all."""
    loss, metrics = loss_of_tokens(name, [0.5, 0.5], [-1, 1], [math.log(0.5)] * 2)
    close(loss, [0, -0.5 * math.log(0.5)])
    assert metrics["pg_clipfrac"].tolist() == [1, 0]


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_a_dual_clip_of_one_would_drop_every_negative_advantage(name):
    with pytest.raises(ValueError, match="dual_clip=1 must be above 1, or 0 to disable it"):
        loss_of_tokens(name, [1], [1], [-1], dual_clip=1)


# Of two tokens with the advantage -1, whose ratios are exp(300) and exp(-300).
OF_EXTREMES = {
    "ppo": [math.exp(20), 0.8],
    "gspo": [math.exp(20), 0.8],
    "cispo": [1.3 * 300, -0.8 * 300],
    "gmpo": [math.exp(20), math.exp(-0.2)],
    "sapo": [4 / 1.05, 4 / 1.05 / (1 + math.exp(1.05))],
    "dppo_tv": [20 * 300, 0],
    "dppo_kl": [20 * 300, 0],
}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_the_ratio_is_exactly_one_and_extremes_are_finite(name):
    """A ratio of 1 is not clipped by the bounds [1, 1]."""
    batch = Packed(5)
    log_probs = batch.random().requires_grad_()
    advantages = torch.randn(batch.n, generator=batch.g)[batch.sequence] * batch.mask
    loss, metrics = POLICY_LOSSES[name](
        log_probs,
        log_probs.detach().clone(),
        advantages,
        batch.mask,
        batch.sequence,
        batch.n,
        clip_low=0,
        clip_high=0,
        dual_clip=3,
    )
    want = -advantages
    if name in ("cispo", "dppo_tv", "dppo_kl"):
        want = -advantages * log_probs.detach()
    elif name == "sapo":
        want = -advantages * torch.where(advantages > 0, 2, 2 / 1.05)
    if name == "sapo":
        close(loss, want)
    else:
        assert torch.equal(loss[batch.mask > 0], want[batch.mask > 0])
    assert not any(x.any() for x in metrics.values())
    loss.sum().backward()
    if name in ("gmpo", "sapo"):
        close(log_probs.grad, -advantages)
    else:
        assert torch.equal(log_probs.grad, -advantages)
    loss, _ = POLICY_LOSSES[name](
        floats(300, -300),
        floats(0, 0),
        floats(-1, -1),
        floats(1, 1),
        ints(0, 1),
        2,
        clip_low=0.2,
        clip_high=0.3,
        dual_clip=0,
    )
    close(loss, OF_EXTREMES[name])
    loss, metrics = POLICY_LOSSES[name](*[floats()] * 4, ints(), 3, **CLIPS)
    assert all(x.shape == (0,) for x in (loss, *metrics.values()))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregates_are_those_of_the_formula_however_the_batch_is_split(mode, seed):
    batch = Packed(seed)
    log_probs = batch.random()
    advantages = batch.random(outside=0.0)
    fields = (log_probs, log_probs + batch.random(0.5), advantages, batch.mask, batch.sequence)
    lengths = sum_by_sequence(batch.mask, batch.sequence, batch.n)
    weights = AGGREGATIONS[mode](lengths=lengths, max_tokens=40)[batch.sequence] * batch.mask
    for policy_loss in POLICY_LOSSES.values():
        loss, _ = policy_loss(*fields, batch.n, **CLIPS)
        rows = [row for row in batch.by_sequence(loss) if row]
        assert 1 < len(rows) < batch.n
        want = {
            "token-mean": sum(map(sum, rows)) / sum(map(len, rows)),
            "seq-mean-token-sum": sum(map(sum, rows)) / len(rows),
            "seq-mean-token-sum-norm": sum(map(sum, rows)) / 40 / len(rows),
            "seq-mean-token-mean": sum(map(statistics.mean, rows)) / len(rows),
        }[mode]
        for num_micro in (1, 2, 5, batch.n):
            micro_of = torch.randint(num_micro, (batch.n,), generator=batch.g)[batch.sequence]
            total = 0
            for micro_batch in range(num_micro):
                part = micro_of == micro_batch
                loss, _ = policy_loss(*(x[part] for x in fields), batch.n, **CLIPS)
                total = total + (loss * weights[part]).sum()
            close(total, want)


def test_aggregation_worked_out_by_hand():
    lengths = floats(1, 0, 3)
    close(AGGREGATIONS["token-mean"](lengths), [0.25] * 3)
    close(AGGREGATIONS["seq-mean-token-sum"](lengths), [0.5] * 3)
    close(AGGREGATIONS["seq-mean-token-mean"](lengths)[lengths > 0], [0.5, 1 / 6])
    for weights in AGGREGATIONS.values():
        assert weights(lengths=floats(0, 0), max_tokens=9).isfinite().all()
        assert weights(lengths=floats(), max_tokens=9).shape == (0,)


def test_kl_estimators():
    p = floats(0.5, 0.3, 0.2)
    q = floats(0.2, 0.2, 0.6)
    d = math.log(2.5)
    got = {name: estimate(p.log(), q.log()) for name, estimate in KL_ESTIMATORS.items()}
    close(
        torch.stack([(p * got[name]).sum() for name in ("k1", "k3")]),
        [(p * (p / q).log()).sum().item()] * 2,
    )
    close(
        torch.stack([got[name][0] for name in ("k1", "k2", "k3", "abs")]),
        [d, d * d / 2, 0.4 - 1 + d, d],
    )
    close(got["abs"][2], math.log(3))
    close(
        KL_ESTIMATORS["k3"](floats(-50, 0, -2.5, 10), floats(0, -50, 0, 0)),
        [10, 10, math.expm1(2.5) - 2.5, math.exp(-10) + 9],
    )
    close(KL_ESTIMATORS["k3"](floats(1e-3), floats(0)) * 1e6, [math.expm1(-1e-3) * 1e6 + 1e3], 1e-3)
    for kl, factor in (6.6, 1 + 0.1 * 0.2), (60, 1.04), (-3, 0.96):
        coefficient = adapt(0.1, kl=kl, target=6.0, horizon=1000, num_sequences=200)
        assert coefficient == pytest.approx(0.1 * factor)


def test_gradients_of_kl_estimators_in_expectation_are_as_documented():
    logits = floats(0.3, -1.0, 0.8).requires_grad_()
    q = floats(0.2, 0.2, 0.6)
    log_p = logits.log_softmax(0)
    for name, want in {
        "k1": 0 * log_p,
        "k2": log_p.exp() * (log_p - q.log()),
        "k3": q * (q.log() - log_p),
    }.items():
        got = log_p.detach().exp() * KL_ESTIMATORS[name](log_p, q.log())
        (gradient,) = torch.autograd.grad(got.sum(), logits, retain_graph=True)
        (expected,) = torch.autograd.grad(want.sum(), logits, retain_graph=True)
        close(gradient, expected)


def test_value_loss_and_its_gradient_and_explained_variance():
    # Inside the range; outside and worse when clipped; outside and better when clipped; outside and
    # right.
    values = floats(1.2, 2.0, -1.0, 3.0).requires_grad_()
    loss, clipped = value_loss(values, floats(1, 1, 0, 2), floats(3, 2.5, 5, 3), 0.5)
    close(loss, [0.5 * 1.8**2, 0.5 * 1.0, 0.5 * 36, 0.5 * 0.25])
    assert clipped.tolist() == [0, 1, 0, 1]
    loss.sum().backward()
    close(values.grad, [-1.8, 0, -6, 0])
    v, old, returns = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)).unbind()
    for c in (0.4, math.inf):
        expected = []
        for value, old_value, target in zip(v.tolist(), old.tolist(), returns.tolist()):
            clipped_value = min(max(value, old_value - c), old_value + c)
            expected.append(max((value - target) ** 2, (clipped_value - target) ** 2) / 2)
        close(value_loss(v, old, returns, c)[0], expected)
    assert not value_loss(0.05 * v, 0.05 * old, returns, 0.4)[1].any()  # rounding clips nothing
    # Returns 1, 2, 6: squares about their mean add up to 14; of the residuals 0, 1, 2 to 2.
    mask = floats(1, 1, 0, 1)
    explained = explained_variance(floats(1, 1, NAN, 4), floats(1, 2, NAN, 6), mask)
    assert explained == pytest.approx(1 - 2 / 14)
    assert explained_variance(floats(1, 2, 3, 4), floats(5, 5, 6, 5), mask) == 0
    assert explained_variance(floats(1), floats(2), floats(0)) == 0


@pytest.mark.parametrize("seed", range(3))
def test_rollout_correction_is_that_of_the_formula(seed):
    batch = Packed(seed)
    rollout = batch.random().requires_grad_()
    common = (rollout + batch.random(0.3), rollout, batch.mask, batch.sequence, batch.n)
    ratios = []
    of_token = {"token": ratios, "sequence": [], "geometric": []}
    for places in batch.tokens:
        row = [math.exp(common[0][t].item() - rollout[t].item()) for t in places]
        ratios.append(row)
        of_token["sequence"].append([math.prod(row)] * len(row))
        of_token["geometric"].append([statistics.geometric_mean(row)] * len(row) if row else [])
    for level, rows in of_token.items():
        kept = keep_mask(*common, level=level, low=0.8, high=1.2)
        for places, row in zip(batch.tokens, rows):
            assert kept[places].tolist() == [0.8 <= ratio <= 1.2 for ratio in row]
        assert not kept[batch.mask == 0].any()
        assert 0 < kept.sum() < batch.mask.sum()
        assert kept.dtype == torch.float32
    for level in ("token", "sequence"):
        weights = correction_weights(*common, level=level, threshold=1.1, lower=0.9)
        assert not weights.requires_grad
        assert not weights[batch.mask == 0].any()
        for places, row in zip(batch.tokens, of_token[level]):
            close(weights[places], [min(r, 1.1) for r in row])
    weights = correction_weights(*common, level="icepop", threshold=1.1, lower=0.9)
    for places, row in zip(batch.tokens, ratios):
        close(weights[places], [r if 0.9 <= r <= 1.1 else 0 for r in row])
    assert not weights[batch.mask == 0].any()
    assert 0 < (weights > 0).sum() < batch.mask.sum()
    measured = off_policy(*common[:3])
    places = list(itertools.chain(*batch.tokens))
    ratios_of_tokens = list(itertools.chain(*ratios))
    for name, f in {
        "ratio": lambda r: r,
        "ratio_squared": lambda r: r * r,
        "kl": lambda r: r - 1 - math.log(r),
        "log_prob_gap": lambda r: abs(math.log(r)),
    }.items():
        close(measured[name][places], [f(ratio) for ratio in ratios_of_tokens])
        assert not measured[name][batch.mask == 0].any()
        assert not measured[name].requires_grad


def test_rollout_correction_worked_out_by_hand():
    common = (floats(0, 99, -99, 0), floats(0, 0, 0, NAN), floats(1, 1, 1, 0), ints(0, 1, 2, 2), 3)
    for level in ("token", "sequence"):
        assert correction_weights(*common, level=level, threshold=2.0).tolist()[:2] == [1, 2]
        close(
            correction_weights(*common, level=level, threshold=1e30)[1:].log(), [20, -20, -math.inf]
        )
    assert keep_mask(*common, level="token", low=1, high=1).tolist() == [1, 0, 0, 0]
    with pytest.raises(ValueError, match="must be 'token', 'sequence' or 'icepop', not 'geom"):
        correction_weights(*common, level="geometric", threshold=2.0)
    trainer = floats(0.5, 0.3, 0.2)
    rollout = floats(0.2, 0.2, 0.6)
    kl = off_policy(trainer.log(), rollout.log(), torch.ones(3))["kl"]
    close((rollout * kl).sum(), (rollout * (rollout / trainer).log()).sum())
    assert effective_sample_size(2.0, 5.0) == pytest.approx(0.8)
    assert effective_sample_size(0.0, 0.0) == 0


def test_the_bounds_of_a_correction_belong_to_it():
    log_ratios = floats(0.5, 1, 2).log()
    ratios = log_ratios.exp()
    common = (log_ratios, torch.zeros(3), torch.ones(3), ints(0, 1, 2), 3)
    bounds = {"low": ratios[0].item(), "high": ratios[2].item()}
    for level in ("token", "sequence", "geometric"):
        assert keep_mask(*common, level=level, **bounds).tolist() == [1, 1, 1]
        narrower = {"low": 0.51, "high": 1.99}
        assert keep_mask(*common, level=level, **narrower).tolist() == [0, 1, 0]
    own = {"lower": bounds["low"], "threshold": bounds["high"]}
    assert torch.equal(correction_weights(*common, level="icepop", **own), ratios)
    with pytest.raises(ValueError, match="must be 'token', 'sequence' or 'geometric', not 'icepop"):
        keep_mask(*common, level="icepop", **bounds)


def test_moments_are_split_by_age():
    """Tokens of ages 0, 1, 1 and 2; the last one of age 0 is not in the mask."""
    age = floats(0, 1, 1, 2, 0)
    mask = floats(1, 1, 1, 1, 0)
    gaps = {
        "ratio": floats(1, 2, 3, 4, 5),
        "ratio_squared": floats(1, 4, 9, 16, 25),
        "log_prob_gap": floats(0.5, 6, 7, 8, 9),
    }
    moments = moments_by_age(gaps, age, mask, max_age=2)
    sums = {name: x.sum().item() for name, x in moments.items()}
    assert sums == {
        "age_0_share": 1,
        "age_0_ratio": 1,
        "age_0_ratio_squared": 1,
        "age_0_log_prob_gap": 0.5,
        "age_1_share": 2,
        "age_1_ratio": 5,
        "age_1_ratio_squared": 13,
        "age_2_share": 1,
        "age_2_ratio": 4,
        "age_2_ratio_squared": 16,
    }


def test_dapo():
    is_informative = informative(floats(1, 0, 1, 1, 0.5, 1), ints(7, 3, 7, 3, 9, 7))
    assert is_informative.tolist() == [0, 1, 0, 1, 0, 0]
    assert informative(floats(-1, -1, -2), ints(0, 0, 0)).all()
    assert not informative(floats(-1, -1, 2, 2), ints(0, 0, 1, 1)).any()
    assert informative(floats(), ints()).shape == (0,)
    close(
        overlong_penalty(ints(0, 80, 81, 90, 100, 120), 100, 20, factor=0.5),
        [0, 0, -0.025, -0.25, -0.5, -0.5],
    )
    with pytest.raises(AssertionError, match="needs a buffer of at least one token"):
        overlong_penalty(ints(1), 100, 0, factor=0.5)


def test_losses_of_reward_models():
    """A margin asks for a larger difference."""
    losses = bradley_terry(floats(2, 1), floats(1, 2), floats(0.5, 0))
    close(losses, [math.log(1 + math.exp(-0.5)), math.log(1 + math.e)])
    close(regression(floats(1, -2), floats(3, -2)), [4, 0])


@pytest.mark.parametrize("n, k", [(1, 1), (4, 1), (5, 2), (6, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, k):
    shares = []
    for c in range(n + 1):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        shares.append(sum(map(any, subsets)) / len(subsets))
        assert pass_at_k(ints(c), n, k) == pytest.approx(shares[c])
    assert pass_at_k(torch.arange(n + 1), n, k) == pytest.approx(sum(shares) / (n + 1))
    assert pass_at_k(ints(), n, k) == 0
    for impossible in (0, n + 1):
        with pytest.raises(ValueError, match=f"pass@{impossible} cannot be estimated from {n} sam"):
            pass_at_k(ints(1), n, impossible)


def test_losses_never_wait_for_the_device():
    """On the meta device tensors have no values: .item(), nonzero and boolean indices fail."""
    y = torch.zeros(6, device="meta")
    sequence = torch.zeros(6, dtype=torch.int64, device="meta")
    x = y.clone().requires_grad_()
    losses = [
        policy_loss(x, y, y, y, sequence, 3, **CLIPS)[0] for policy_loss in POLICY_LOSSES.values()
    ]
    losses += [estimate(x, y) for estimate in KL_ESTIMATORS.values()] + [
        value_loss(x, y, y, 0.5)[0]
    ]
    for weights in AGGREGATIONS.values():
        losses += [losses[-1] * weights(lengths=y, max_tokens=9)]
    sum(losses).sum().backward()
    keep_mask(x, y, y, sequence, 3, level="sequence", low=0.5, high=2.0)
    keep_mask(x, y, y, sequence, 3, level="geometric", low=0.5, high=2.0)
    correction_weights(x, y, y, sequence, 3, level="token", threshold=2.0)
    off_policy(x, y, y)
    # This one computes a number for the host, which shows that the test can tell.
    with pytest.raises((RuntimeError, NotImplementedError)):
        explained_variance(y, y, y)


def test_algorithms_import_torch_only():
    files = sorted((Path(__file__).parents[2] / "algorithms").glob("*.py"))
    assert len(files) >= 10
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) == {
        "torch",
        "algorithms",
    }


def on_two_ranks(compute):
    """Return [compute(0, total), compute(1, total)], where total adds up as all-reduce does."""
    barrier = threading.Barrier(2)
    partial_sums = [0.0, 0.0]
    results = [None, None]

    def run(rank):
        def total(values):
            partial_sums[rank] = values.sum()
            barrier.wait()
            result = partial_sums[0] + partial_sums[1]
            barrier.wait()
            return result

        results[rank] = compute(rank, total)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_whitening_takes_mean_and_variance_over_all_ranks():
    batch = Packed(3)
    x = batch.random(scale=2.0)
    rank_of_token = batch.sequence % 2

    def whiten_share(rank, total):
        inside = rank_of_token == rank
        return whiten(x[inside], batch.mask[inside], total)

    expected = whiten(x, batch.mask)
    for rank, result in enumerate(on_two_ranks(whiten_share)):
        close(result, expected[rank_of_token == rank])


def test_explained_variance_takes_both_means_over_all_ranks():
    """The values are too low on one rank and too high on the other."""
    batch = Packed(3)
    rank_of_token = batch.sequence % 2
    returns = batch.random(scale=2.0) + rank_of_token
    values = returns + 3.0 * rank_of_token - 1.0 + batch.random()

    def explain_share(rank, total):
        inside = rank_of_token == rank
        return explained_variance(values[inside], returns[inside], batch.mask[inside], total)

    expected = explained_variance(values, returns, batch.mask)
    assert on_two_ranks(explain_share) == pytest.approx([expected, expected])
