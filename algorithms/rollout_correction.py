"""The rollout engine's probabilities differ slightly from the trainer's: how much, and the correction.

Every function takes old_log_probs and rollout_log_probs [T] fp32 (the trainer's and the engine's, for the same tokens
and weights), mask [T] fp32, and, if it works by sequence, sequence [T] int64 and num_sequences, with whole sequences. A
token's importance ratio is exp(old_log_probs - rollout_log_probs); log-ratios of tokens and of sequences are clamped to
+-20. Nothing here has a gradient or waits for the accelerator.
"""

from torch import Tensor

from algorithms.packed import bounded_exp, log_ratio, mean_by_sequence, sum_by_sequence


def correction_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    level: str,
    threshold: float,
) -> Tensor:
    """[T] fp32: truncated importance weights min(ratio, threshold) (Ionides 2008), for the losses; 0 outside the mask.

    level "token": each token's ratio; "sequence": the product over its sequence, on all of its tokens
    """
    ratio = _ratio(
        old_log_probs,
        rollout_log_probs,
        mask,
        sequence,
        num_sequences,
        level,
        ("token", "sequence"),
    )
    return ratio.clamp(max=threshold) * mask


def keep_mask(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    *,
    level: str,
    low: float,
    high: float,
) -> Tensor:
    """[T] fp32: the mask, with 0 where the ratio is outside [low, high].

    level "token": each token's ratio; whole sequences by "sequence": the product, "geometric": the geometric mean
    Rejected tokens leave the denominator too: compute the loss weights afterwards, from the mask that this returns.
    """
    levels = ("token", "sequence", "geometric")
    ratio = _ratio(old_log_probs, rollout_log_probs, mask, sequence, num_sequences, level, levels)
    return mask * ((ratio >= low) & (ratio <= high))


def off_policy(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far the engine is from the trainer: each [T] fp32, 0 outside the mask, for the caller to average.

    log_prob_gap         |old_log_probs - rollout_log_probs|
    kl                   r - 1 - log r, where r = p/q (p: trainer, q: rollout) and the tokens are sampled from q:
                         E_q[r] = 1 (q > 0 wherever p is), so its mean is E_q[log q/p] = KL(rollout || trainer)
    ratio, ratio_squared r and r^2, for effective_sample_size
    """
    of_token = log_ratio(old_log_probs, rollout_log_probs, mask).detach()
    ratio = bounded_exp(of_token) * mask
    return {
        "log_prob_gap": of_token.abs(),
        "kl": bounded_exp(of_token) - 1 - of_token,
        "ratio": ratio,
        "ratio_squared": ratio.square(),
    }


def effective_sample_size(ratio: float, ratio_squared: float) -> float:
    """mean(r)^2 / mean(r^2), from the two means (Kong 1992): the share of samples that would be as good without weights."""
    return ratio * ratio / ratio_squared if ratio_squared else 0.0


def _ratio(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    level: str,
    levels: tuple[str, ...],
) -> Tensor:
    if level not in levels:
        raise ValueError(f"level {level!r} is none of {', '.join(levels)}")
    logs = log_ratio(old_log_probs, rollout_log_probs, mask).detach()
    if level == "sequence":
        logs = sum_by_sequence(logs, sequence, num_sequences)[sequence]
    elif level == "geometric":
        logs = mean_by_sequence(logs, mask, sequence, num_sequences)[sequence]
    return bounded_exp(logs)
