"""Policy losses: one number per token, to be summed with the weights of algorithms/aggregation.py.

Every function takes
    log_probs     [T] fp32, with gradient; old_log_probs [T] fp32: those of the policy before this step's first update
    advantages    [T] fp32; mask [T] fp32: 1 on response tokens
    sequence      [T] int64, num_sequences: T holds whole sequences, but not necessarily all num_sequences of them
    clip_low, clip_high  the ratio is kept in [1 - clip_low, 1 + clip_high]
    dual_clip     largest ratio that counts where the advantage is negative; 0: no bound, otherwise above 1
and returns the loss [T] fp32, 0 outside the mask, and metrics {name: [T] fp32}, whose means over tokens are logged as
actor/{name}; pg_clipfrac is 1 where clipping decides the loss. A function may name any other argument that
ppo.actor_loss has. The ratio is exactly 1 where log_probs equal old_log_probs. Nothing here waits for the accelerator.
"""

import torch
from torch import Tensor

from algorithms.packed import bounded_exp, log_ratio, mean_by_sequence

Loss = tuple[Tensor, dict[str, Tensor]]


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
) -> Loss:
    """Clipped surrogate (Schulman 2017) with two bounds (Yu 2025) and dual clip (Ye 2020).

    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and where A < 0 at most -A dual_clip;
    r = exp(log_probs - old_log_probs), with the log-ratio clamped to +-20 here and below
    """
    return _surrogate(
        log_ratio(log_probs, old_log_probs, mask), advantages, mask, clip_low, clip_high, dual_clip
    )


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
) -> Loss:
    """PPO's loss with one ratio per sequence (Zheng 2025): s = exp(mean of its log-ratios).

    As GSPO-token: s_t = sg(s) pi_t / sg(pi_t) has the value of s and the gradient of token t. Aggregated by
    "seq-mean-token-mean", the sum has the gradient of the paper's objective. dual_clip, as in ppo, is not in the paper.
    """
    mean = mean_by_sequence(
        log_ratio(log_probs, old_log_probs, mask).detach(), mask, sequence, num_sequences
    )
    of_token = mean[sequence] + log_ratio(log_probs, log_probs.detach(), mask)
    return _surrogate(of_token, advantages, mask, clip_low, clip_high, dual_clip)


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
) -> Loss:
    """CISPO (MiniMax 2025): -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log_probs: a clipped token keeps its gradient.

    It needs no dual_clip: the clipped ratio is bounded whatever the sign of the advantage.
    """
    ratio = bounded_exp(log_ratio(log_probs, old_log_probs, mask).detach())
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.where(mask > 0, -weight * advantages * log_probs, 0)
    return loss, {"pg_clipfrac": torch.where(mask > 0, (weight != ratio).float(), 0)}


POLICY_LOSSES = {"ppo": ppo, "gspo": gspo, "cispo": cispo}


def _surrogate(
    log_ratios: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> Loss:
    if dual_clip != 0 and dual_clip <= 1:
        raise ValueError(f"dual_clip is {dual_clip}: above 1, or 0 for none")
    ratio = bounded_exp(log_ratios)
    free = -advantages * ratio
    loss = torch.maximum(free, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    return torch.where(mask > 0, loss, 0), {
        "pg_clipfrac": torch.where(mask > 0, (loss != free).float(), 0)
    }
