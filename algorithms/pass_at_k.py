"""pass@k, the probability that at least one of k samples is right, and max@k, its generalization to
any scores: the expected maximum of k samples.
"""

from math import comb

import torch
from torch import Tensor


def pass_at_k(num_right: Tensor, n: int, k: int) -> float:
    """Return the unbiased estimate from n >= k samples per prompt (Chen et al. 2021).

    mean over prompts of 1 - C(n - c, k) / C(n, k)

    Args:
        num_right: [m] int64: c, the number of right samples among the n of each prompt.

    Returns:
        A number in 0..1; 0 without a prompt.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {n} samples")
    passing = [1 - comb(n - c, k) / comb(n, k) for c in num_right.tolist()]
    return sum(passing) / max(len(passing), 1)


def mean_gain(scores: Tensor, k: int) -> Tensor:
    """Return by how much each sample raises the maximum of k - 1 others.

    mean over all choices of k - 1 others of max(0, score - maximum of the others)

    Args:
        scores: [n] float64.
        k: at least 2.

    Returns:
        [n] float64; 0 if n < k.
    """
    n = len(scores)
    if n < k:
        return torch.zeros_like(scores)
    # The m-th smallest of the n - 1 others is the largest of C(m - 1, k - 2) choices.
    choices = [comb(m - 1, k - 2) / comb(n - 1, k - 1) for m in range(1, n)]
    probability = torch.tensor(choices, dtype=torch.float64)
    ascending, order = scores.sort()
    gains = torch.zeros_like(scores)
    for rank, sample in enumerate(order.tolist()):
        others = torch.cat([ascending[:rank], ascending[rank + 1 :]])
        gains[sample] = (probability * (scores[sample] - others).clamp(min=0)).sum()
    return gains
