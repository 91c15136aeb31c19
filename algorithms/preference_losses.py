"""Losses that learn from preferences: pairs of answers to a prompt, or answers with a label.

Each function names the arguments it needs, and is called with them by name. A loss of pairs may
name these, all [n] for n pairs:

    chosen_log_probs, rejected_log_probs    fp32, with gradient: log p(answer | prompt), the sum
                                            over the answer's tokens
    chosen_log_ratios, rejected_log_ratios  fp32, with gradient: the same sum of log-probabilities
                                            minus the reference model's
    chosen_lengths, rejected_lengths        fp32: the number of the answer's tokens

It returns (losses [n], rewards of the chosen answers [n], rewards of the rejected ones [n]). A loss
of single answers may name these, for n answers:

    log_probs, log_ratios, lengths          [n], as above
    is_chosen                               [n] bool: the label
    kl                                      a number, at least 0: the mean log-ratio of answers to
                                            other prompts of the batch

It returns (losses [n], rewards [n], baseline): the model rates an answer as desirable if its reward
is above the baseline. The losses are averaged over the pairs, or answers, of the whole
batch. Rewards are only reported, without gradient. All other parameters are the function's own, and
beta has the default of its paper.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

PairResult = tuple[Tensor, Tensor, Tensor]


def dpo(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    **_,
) -> PairResult:
    """Direct preference optimization (Rafailov et al. 2023).

    -log sigmoid(beta (chosen - rejected)). With label_smoothing = e, labels are taken to be wrong
    with probability e (conservative DPO, Mitchell 2023):
    -(1 - e) log sigmoid(z) - e log sigmoid(-z).
    """
    z = beta * (chosen_log_ratios - rejected_log_ratios)
    losses = _smoothed(z, label_smoothing)
    return losses, beta * chosen_log_ratios, beta * rejected_log_ratios


def ipo(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float = 0.1,
    **_,
) -> PairResult:
    """Identity preference optimization (Azar et al. 2023, equation 17, where beta is tau).

    (chosen - rejected - 1 / (2 beta))^2, with log-ratios averaged over tokens. The paper does not
    mention the average; its authors use it, and so does TRL. Without it, long answers dominate.
    """
    chosen_mean = chosen_log_ratios / chosen_lengths
    rejected_mean = rejected_log_ratios / rejected_lengths
    losses = (chosen_mean - rejected_mean - 1 / (2 * beta)).square()
    return losses, beta * chosen_log_ratios, beta * rejected_log_ratios


def simpo(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
    **_,
) -> PairResult:
    """Simple preference optimization (Meng et al. 2024), which needs no reference.

    -log sigmoid(beta (chosen - rejected) - gamma), with log-probabilities averaged over tokens.
    gamma is the margin by which the reward of the chosen answer should be larger. The paper gives
    gamma / beta, 0.3 to 0.5 in most of its runs; TRL's simpo_gamma is gamma.
    """
    chosen_rewards = beta * chosen_log_probs / chosen_lengths
    rejected_rewards = beta * rejected_log_probs / rejected_lengths
    losses = _smoothed(chosen_rewards - rejected_rewards - gamma, label_smoothing)
    return losses, chosen_rewards, rejected_rewards


def orpo(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float = 0.1,
    **_,
) -> PairResult:
    """Odds ratio preference optimization (Hong et al. 2024), which needs no reference.

    NLL(chosen) - beta log sigmoid(log(odds(chosen) / odds(rejected))), where beta is the paper's
    lambda, odds(p) = p / (1 - p), and log p and the NLL are averaged over the answer's tokens.
    """
    chosen_mean = chosen_log_probs / chosen_lengths
    rejected_mean = rejected_log_probs / rejected_lengths
    log_odds = chosen_mean - rejected_mean
    log_odds = log_odds - (_log_of_rest(chosen_mean) - _log_of_rest(rejected_mean))
    losses = -chosen_mean - beta * logsigmoid(log_odds)
    return losses, beta * chosen_mean, beta * rejected_mean


def kto(
    log_ratios: Tensor,
    is_chosen: Tensor,
    kl: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    **_,
) -> PairResult:
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024).

    w (1 - sigmoid(beta (log-ratio - kl))) for a desirable answer, and
    w (1 - sigmoid(beta (kl - log-ratio))) for an undesirable one. The paper recommends weights for
    which w times the number of answers is about the same for both kinds.
    """
    rewards = beta * log_ratios
    baseline = beta * kl
    sign = torch.where(is_chosen, 1.0, -1.0)
    weights = torch.where(is_chosen, desirable_weight, undesirable_weight)
    losses = weights * torch.sigmoid(-sign * (rewards - baseline))
    return losses, rewards, baseline


PREFERENCE_LOSSES = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "kto": kto, "orpo": orpo}


def _smoothed(z: Tensor, label_smoothing: float) -> Tensor:
    losses = -logsigmoid(z)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * logsigmoid(-z)
    return losses


def _log_of_rest(log_prob: Tensor) -> Tensor:
    """Return log(1 - p) for log p, without losing digits where p is near 1."""
    # If p rounded to 1, this would be minus infinity, and its gradient NaN.
    return torch.log(-torch.expm1(log_prob.clamp(max=-1e-7)))
