"""The critic's loss, and how much of the returns it explains."""

import torch
from torch import Tensor

from algorithms.packed import Total, center


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float
) -> tuple[Tensor, Tensor]:
    """The clipped value loss of PPO's reference code (Schulman et al. 2017), per token.

    max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2

    Args:
        values: [T] fp32, with gradient.
        old_values, returns: [T] fp32.
        clip_range: c; inf for no clipping.

    Returns:
        The loss [T] fp32, and [T] fp32 with 1 where the clipped value decides (its gradient is 0).
    """
    unclipped = (values - returns).square()
    clipped_values = values.clamp(old_values - clip_range, old_values + clip_range)
    clipped = (clipped_values - returns).square()
    return torch.maximum(unclipped, clipped) / 2, (clipped > unclipped).float()


def explained_variance(
    values: Tensor, returns: Tensor, mask: Tensor, total: Total = Tensor.sum
) -> float:
    """Return 1 - var(returns - values) / var(returns) over the masked tokens. For the host.

    Args:
        values, returns, mask: [T] fp32.
        total: sums over [T] and over all ranks.

    Returns:
        0 if the returns do not vary.
    """
    errors = returns.double() - values.double()
    error_squares = total(center(errors, mask, total).square()).item()
    return_squares = total(center(returns, mask, total).square()).item()
    return 1 - error_squares / return_squares if return_squares else 0.0
