"""Policy losses: one number per token, to be summed with the weights of algorithms/aggregation.py.

Each function names the arguments it needs, and is called with them by name:

    log_probs      [T] fp32, with gradient
    old_log_probs  [T] fp32: log-probabilities of the policy before this step's first update
    advantages     [T] fp32
    mask           [T] fp32: 1 on response tokens
    sequence       [T] int64: the response of each token
    num_sequences  upper bound of `sequence`; T holds whole sequences, but not necessarily all
    clip_low, clip_high    the ratio is kept in [1 - clip_low, 1 + clip_high]
    dual_clip      largest ratio that counts where the advantage is negative: above 1, or 0 for none

and any other argument documented with `PolicyLossInputs` in rl/.

Each returns the loss [T] fp32, 0 outside the mask, and metrics {name: [T] fp32}, whose means over
tokens are logged as actor/{name}. The metric pg_clipfrac is 1 where clipping decides the loss;
sapo, which never clips, has no such metric.

The ratio is exp(log_probs - old_log_probs), with the log-ratio clamped to +-20. It is exactly 1
where the two are equal. Nothing here waits for the accelerator.
"""

import torch
from torch import Tensor

from algorithms.packed import bounded_exp, log_ratio, mean_by_sequence

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


def ppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    **_,
) -> LossAndMetrics:
    """The clipped surrogate (Schulman et al. 2017), with two bounds (DAPO, Yu et al. 2025) and dual
    clip (Ye et al. 2020).

    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and where A < 0 at most -A dual_clip
    """
    log_ratios = log_ratio(log_probs, old_log_probs, mask)
    return _surrogate(log_ratios, advantages, mask, clip_low, clip_high, dual_clip)


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    **_,
) -> LossAndMetrics:
    """PPO's loss with one ratio per sequence (GSPO, Zheng et al. 2025).

    s = exp(mean of the sequence's log-ratios). As in GSPO-token, s_t = sg(s) pi_t / sg(pi_t)
    has the value of s and the gradient of token t. With "seq-mean-token-mean" the sum has
    the gradient of the paper's objective. The paper has no dual_clip; here it works as in `ppo`.
    """
    token_log_ratios = log_ratio(log_probs, old_log_probs, mask).detach()
    sequence_log_ratios = mean_by_sequence(token_log_ratios, mask, sequence, num_sequences)
    gradient_only = log_ratio(log_probs, log_probs.detach(), mask)  # has the value 0
    log_ratios = sequence_log_ratios[sequence] + gradient_only
    return _surrogate(log_ratios, advantages, mask, clip_low, clip_high, dual_clip)


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    clip_low: float,
    clip_high: float,
    **_,
) -> LossAndMetrics:
    """CISPO (MiniMax 2025): a clipped token keeps its gradient.

    -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log_probs

    It needs no dual_clip: the clipped ratio is bounded whatever the sign of the advantage.
    """
    ratio = bounded_exp(log_ratio(log_probs, old_log_probs, mask).detach())
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.where(mask > 0, -weight * advantages * log_probs, 0)
    is_clipped = torch.where(mask > 0, (weight != ratio).float(), 0)
    return loss, {"pg_clipfrac": is_clipped}


def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    clip_low: float,
    clip_high: float,
    **_,
) -> LossAndMetrics:
    """The geometric mean of the tokens' ratios, each clipped by itself (GMPO, Zhao et al. 2025).

    -A s, where s = exp(mean over the sequence of the clipped log-ratios). A log-ratio is kept
    within [-clip_low, clip_high]; as in PPO, only where that makes the loss larger. The paper's
    bounds are 0.4 and 0.4. All tokens of a sequence have the same advantage. With
    "seq-mean-token-mean" the sum is the paper's objective.
    """
    log_ratios = log_ratio(log_probs, old_log_probs, mask)
    clipped = log_ratios.clamp(-clip_low, clip_high)
    pessimistic = torch.where(
        advantages >= 0, torch.minimum(log_ratios, clipped), torch.maximum(log_ratios, clipped)
    )
    mean_log_ratio = mean_by_sequence(pessimistic, mask, sequence, num_sequences)
    loss = torch.where(mask > 0, -advantages * bounded_exp(mean_log_ratio)[sequence], 0)
    is_clipped = torch.where(mask > 0, (pessimistic != log_ratios).float(), 0)
    return loss, {"pg_clipfrac": is_clipped}


def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    **_,
) -> LossAndMetrics:
    """Soft adaptive policy optimization (SAPO, Gao et al. 2025): a sigmoid instead of clipping.

    -A 4 / tau sigmoid(tau (r - 1)), where tau is tau_positive if A > 0, and tau_negative otherwise

    The gradient of a token has the weight 1 at r = 1, and fades as r moves away. The paper takes
    the mean of each sequence first: "seq-mean-token-mean".
    """
    if min(tau_positive, tau_negative) <= 0:
        raise ValueError(
            f"algorithm.loss_kwargs: tau_positive={tau_positive} and tau_negative={tau_negative} "
            "must be above 0"
        )
    ratio = bounded_exp(log_ratio(log_probs, old_log_probs, mask))
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return torch.where(mask > 0, -gate * advantages, 0), {}


def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    clip_low: float,
    clip_high: float,
    max_ratio: float = 20.0,
    **_,
) -> LossAndMetrics:
    """Divergence PPO with the binary total variation (DPPO, Qi et al. 2026).

    -sg(min(r, max_ratio)) A log_probs, and no gradient for a token whose probability p has moved
    too far from the old one in the direction of the update: p - p_old > clip_high where A > 0, and
    p - p_old < -clip_low elsewhere.

    Unlike a bound on the ratio, this lets unlikely tokens move, and holds likely ones.
    """
    change = _probability(log_probs, mask) - _probability(old_log_probs, mask)
    is_too_far = torch.where(advantages > 0, change > clip_high, change < -clip_low)
    return _masked_gradient(log_probs, old_log_probs, advantages, mask, is_too_far, max_ratio)


def dppo_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    clip_low: float,
    clip_high: float,
    max_ratio: float = 20.0,
    **_,
) -> LossAndMetrics:
    """Divergence PPO with the binary Kullback-Leibler divergence (DPPO, Qi et al. 2026).

    As dppo_tv, but a token has moved too far if KL(old || new) of the two-way choice between it and
    all other tokens is above clip_high where A > 0, and above clip_low elsewhere. A step towards
    the old probability is never too far.

    p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))
    """
    p = _probability(log_probs, mask)
    p_old = _probability(old_log_probs, mask)
    # A probability of 1 leaves nothing for other tokens: keep the logarithm finite.
    log_rest = torch.log((1 - p).clamp(min=1e-8))
    log_rest_old = torch.log((1 - p_old).clamp(min=1e-8))
    log_ratios = log_ratio(log_probs, old_log_probs, mask).detach()
    divergence = -p_old * log_ratios + (1 - p_old) * (log_rest_old - log_rest)
    is_too_far = torch.where(
        advantages > 0,
        (p > p_old) & (divergence > clip_high),
        (p < p_old) & (divergence > clip_low),
    )
    return _masked_gradient(log_probs, old_log_probs, advantages, mask, is_too_far, max_ratio)


POLICY_LOSSES = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}


def _probability(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the probabilities without a gradient, [T] fp32, and 1 outside the mask."""
    return torch.where(mask > 0, log_probs.detach(), 0).exp()


def _masked_gradient(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    is_too_far: Tensor,
    max_ratio: float,
) -> LossAndMetrics:
    """Return -sg(min(r, max_ratio)) A log_probs, and 0 for tokens that have moved too far."""
    if max_ratio <= 0:
        raise ValueError(f"algorithm.loss_kwargs.max_ratio={max_ratio} must be above 0")
    ratio = bounded_exp(log_ratio(log_probs, old_log_probs, mask).detach())
    loss = -ratio.clamp(max=max_ratio) * advantages * log_probs
    is_kept = (mask > 0) & ~is_too_far
    is_dropped = (mask > 0) & is_too_far
    return torch.where(is_kept, loss, 0), {"pg_clipfrac": is_dropped.float()}


def _surrogate(
    log_ratios: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> LossAndMetrics:
    if dual_clip != 0 and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip} must be above 1, or 0 to disable it")
    ratio = bounded_exp(log_ratios)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    if dual_clip:
        bounded = torch.minimum(loss, -advantages * dual_clip)
        loss = torch.where(advantages < 0, bounded, loss)
    is_clipped = torch.where(mask > 0, (loss != unclipped).float(), 0)
    return torch.where(mask > 0, loss, 0), {"pg_clipfrac": is_clipped}
