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
tokens are logged as actor/{name}. The metric pg_clipfrac is 1 where clipping decides the loss.

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


POLICY_LOSSES = {"ppo": ppo, "gspo": gspo, "cispo": cispo}


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
