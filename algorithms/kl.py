"""KL(policy || reference) per token, estimated from the policy's samples.

See "Approximating KL divergence" (Schulman 2020). Every function takes log_probs and ref_log_probs
[T] fp32 and returns [T] fp32; below, d = log_probs - ref_log_probs.

In a loss on the policy's own samples, the expected gradient of k1 is 0. That of k2 is the gradient
of KL(policy || reference), and that of k3 the gradient of KL(reference || policy).
"""

from torch import Tensor

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def k1(log_probs: Tensor, ref_log_probs: Tensor, **_) -> Tensor:
    """d: unbiased, of either sign."""
    return log_probs - ref_log_probs


def k2(log_probs: Tensor, ref_log_probs: Tensor, **_) -> Tensor:
    """d^2 / 2: biased, with low variance."""
    return (log_probs - ref_log_probs).square() / 2


def k3(log_probs: Tensor, ref_log_probs: Tensor, **_) -> Tensor:
    """exp(-d) - 1 + d, at most 10: never negative, with low variance, unbiased below the bound.

    The bound is reached at d = -2.6 and at d = 11; beyond, the gradient is 0. Without it, a single
    token that the reference finds much likelier would outweigh all others.
    """
    log_ratio = (ref_log_probs - log_probs).clamp(max=MAX_LOG_RATIO)
    return (log_ratio.expm1() - log_ratio).clamp(max=MAX_K3)


def absolute(log_probs: Tensor, ref_log_probs: Tensor, **_) -> Tensor:
    """|d|: a penalty in the same units, not an estimate of the KL divergence."""
    return (log_probs - ref_log_probs).abs()


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}


def adapt(
    coefficient: float, kl: float, target: float, horizon: float, num_sequences: int
) -> float:
    """Return the KL coefficient of the next step (Ziegler et al. 2019).

    coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon)

    Args:
        kl: mean over the tokens of this step's num_sequences sequences.
        horizon: in sequences.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * num_sequences / horizon)
