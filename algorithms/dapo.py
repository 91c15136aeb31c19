"""Two parts of DAPO (Yu et al. 2025): which groups teach anything, and a soft limit on length.

The other two are clip_high (policy_losses.py) and token-mean (aggregation.py).
"""

import torch
from torch import Tensor


def informative(scores: Tensor, group: Tensor) -> Tensor:
    """Return for each response whether the scores in its group differ; False in a group of one.

    Args:
        scores: [n] fp32.
        group: [n] int64, the prompt of each response; any numbers.

    Returns:
        [n] bool.
    """
    _, index = group.unique(return_inverse=True)
    zeros = torch.zeros_like(scores)
    lowest = zeros.scatter_reduce(0, index, scores, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, index, scores, "amax", include_self=False)
    return lowest[index] < highest[index]


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """Return the penalty for responses close to the length limit, to be added to their scores.

    factor * clip((max_length - buffer - length) / buffer, -1, 0)

    It is 0 up to max_length - buffer tokens, then falls linearly to -factor at max_length.

    Args:
        lengths: [n] int64; all lengths are in tokens.

    Returns:
        [n] fp32.
    """
    assert buffer >= 1, "overlong_penalty needs a buffer of at least one token"
    return factor * ((max_length - buffer - lengths).float() / buffer).clamp(-1, 0)
