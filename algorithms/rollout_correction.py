"""How far vLLM's probabilities are from the trainer's, and how to correct for the difference.

Every function takes

    old_log_probs, rollout_log_probs  [T] fp32: the trainer's and vLLM's log-probabilities of the
                                      same tokens under the same weights
    mask                              [T] fp32
    sequence, num_sequences           [T] int64 and n, if it works by sequence; whole sequences

The importance ratio of a token is exp(old_log_probs - rollout_log_probs). Log-ratios of tokens and
of sequences are clamped to +-20. Nothing here has a gradient or waits for the accelerator.
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
    lower: float = 0.0,
) -> Tensor:
    """Return importance weights for the losses.

    Args:
        level: "token" takes each token's ratio, and "sequence" the product over the sequence, on
            all of its tokens; both are truncated, min(ratio, threshold) (Ionides 2008). "icepop"
            (Ling Team 2025) takes each token's ratio where it is in [lower, threshold], and 0
            elsewhere. Unlike those that keep_mask() rejects, these tokens stay in the denominators.

    Returns:
        [T] fp32; 0 outside the mask.
    """
    if level not in ("token", "sequence", "icepop"):
        raise ValueError(f"level must be 'token', 'sequence' or 'icepop', not {level!r}")
    log_ratios = log_ratio(old_log_probs, rollout_log_probs, mask).detach()
    ratio = _ratio_at(level, log_ratios, mask, sequence, num_sequences)
    if level == "icepop":
        is_inside = (ratio >= lower) & (ratio <= threshold)
        return ratio * is_inside * mask
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
    """Return the mask with 0 where the ratio is outside [low, high].

    Rejected tokens leave the denominator too: compute the loss weights afterwards, from the mask
    that this returns.

    Args:
        level: "token" judges each token by its ratio. "sequence" and "geometric" judge whole
            sequences, by the product and the geometric mean of their ratios.

    Returns:
        [T] fp32.
    """
    if level not in ("token", "sequence", "geometric"):
        raise ValueError(f"level must be 'token', 'sequence' or 'geometric', not {level!r}")
    log_ratios = log_ratio(old_log_probs, rollout_log_probs, mask).detach()
    ratio = _ratio_at(level, log_ratios, mask, sequence, num_sequences)
    return mask * ((ratio >= low) & (ratio <= high))


def off_policy(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Measure how far vLLM is from the trainer.

    Returns:
        Each [T] fp32 and 0 outside the mask, for the caller to average:

        log_prob_gap          |old_log_probs - rollout_log_probs|
        kl                    r - 1 - log r, where r = p / q, p is the trainer's probability and q
                              is vLLM's. The tokens are sampled from q, and E_q[r] = 1, so its
                              mean is E_q[log q/p] = KL(rollout || trainer).
        ratio, ratio_squared  r and r^2, for `effective_sample_size`
    """
    log_ratios = log_ratio(old_log_probs, rollout_log_probs, mask).detach()
    ratio = bounded_exp(log_ratios) * mask
    return {
        "log_prob_gap": log_ratios.abs(),
        "kl": bounded_exp(log_ratios) - 1 - log_ratios,
        "ratio": ratio,
        "ratio_squared": ratio.square(),
    }


def moments_by_age(
    gaps: dict[str, Tensor], age: Tensor, mask: Tensor, max_age: int
) -> dict[str, Tensor]:
    """Split the results of off_policy() by the age of tokens.

    Args:
        age: [T] fp32, how many steps have trained the weights since they drew the token.

    Returns:
        For each age a from 0 to max_age, three tensors [T] fp32 that are 0 on all other tokens:
        age_{a}_share (1), age_{a}_ratio and age_{a}_ratio_squared. Also age_0_log_prob_gap.
    """
    moments = {}
    for a in range(max_age + 1):
        has_age = mask * (age == a)
        moments[f"age_{a}_share"] = has_age
        moments[f"age_{a}_ratio"] = gaps["ratio"] * has_age
        moments[f"age_{a}_ratio_squared"] = gaps["ratio_squared"] * has_age
    moments["age_0_log_prob_gap"] = gaps["log_prob_gap"] * mask * (age == 0)
    return moments


def effective_sample_size(ratio: float, ratio_squared: float) -> float:
    """Return mean(r)^2 / mean(r^2) from the two means (Kong 1992).

    It is relative to the number of samples: with 0.5, the weighted samples are worth half as many
    unweighted ones.
    """
    return ratio * ratio / ratio_squared if ratio_squared else 0.0


def _ratio_at(
    level: str, log_ratios: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int
) -> Tensor:
    """Return the ratio of each token, or of its sequence on each of its tokens: [T] fp32."""
    if level == "sequence":
        log_ratios = sum_by_sequence(log_ratios, sequence, num_sequences)[sequence]
    elif level == "geometric":
        log_ratios = mean_by_sequence(log_ratios, mask, sequence, num_sequences)[sequence]
    return bounded_exp(log_ratios)
