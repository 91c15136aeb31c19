"""DAPO (Yu 2025): which groups teach anything, and a soft limit on length. The rest of it is clip_high and token-mean."""

import torch
from torch import Tensor


def informative(scores: Tensor, group: Tensor) -> Tensor:
    """[n] bool: whether the scores in the sequence's group differ. In a group of one they do not.

    scores [n] fp32, group [n] int64: the prompt of each sequence, any numbers
    """
    index = group.unique(return_inverse=True)[1]
    low, high = (
        torch.zeros_like(scores).scatter_reduce(0, index, scores, extreme, include_self=False)[
            index
        ]
        for extreme in ("amin", "amax")
    )
    return low < high


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """[n] fp32, to be added to the scores: 0 up to max_length - buffer tokens, then linear, -factor from max_length on.

    factor * clip((max_length - buffer - length) / buffer, -1, 0); lengths [n] int64; all lengths in tokens
    """
    assert buffer >= 1, "overlong_penalty needs a buffer of at least one token"
    return factor * ((max_length - buffer - lengths).float() / buffer).clamp(-1, 0)
