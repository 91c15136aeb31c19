"""The critic's loss, and how much of the returns it explains."""

import torch
from torch import Tensor

from algorithms.packed import Total, from_mean


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float
) -> tuple[Tensor, Tensor]:
    """max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2 per token, as in the code of PPO (Schulman 2017).

    values [T] fp32, with gradient; old_values, returns [T] fp32; clip_range c, inf for none
    returns loss [T] fp32 and clipped [T] fp32, 1 where the clipped value decides (and the gradient is 0)
    """
    free = (values - returns).square()
    bounded = (values.clamp(old_values - clip_range, old_values + clip_range) - returns).square()
    return torch.maximum(free, bounded) / 2, (bounded > free).float()


def explained_variance(
    values: Tensor, returns: Tensor, mask: Tensor, total: Total = Tensor.sum
) -> float:
    """1 - var(returns - values) / var(returns) over the masked tokens; 0 if the returns do not vary. For the host.

    values, returns, mask [T] fp32; total: a sum over [T], and over the other ranks' tokens
    """
    errors = returns.double() - values.double()
    of_errors, of_returns = (
        total(from_mean(x, mask, total).square()).item() for x in (errors, returns)
    )
    return 1 - of_errors / of_returns if of_returns else 0.0
