"""The critic's loss, and how much of the returns it explains."""

import torch
from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> tuple[Tensor, Tensor]:
    """max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2 per token, as in the code of PPO (Schulman 2017).

    values [T] fp32, with gradient; old_values, returns [T] fp32; clip_range c, inf for none
    returns loss [T] fp32 and clipped [T] fp32, 1 where the clipped value decides (and the gradient is 0)
    """
    free = (values - returns).square()
    bounded = (values.clamp(old_values - clip_range, old_values + clip_range) - returns).square()
    return torch.maximum(free, bounded) / 2, (bounded > free).float()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - var(returns - values) / var(returns) over the masked tokens; 0 if the returns do not vary. For the host.

    values, returns, mask [T] fp32
    """
    values, returns = (x[mask > 0].double() for x in (values, returns))
    if len(returns) == 0 or returns.min() == returns.max():
        return 0.0
    return 1 - ((returns - values).var(correction=0) / returns.var(correction=0)).item()
