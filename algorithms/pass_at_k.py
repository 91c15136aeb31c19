"""pass@k: the probability that at least one of k samples is right."""

from math import comb

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
