"""The rows of each step, computed from seed and step alone, for any rank and world size."""

from functools import lru_cache

import numpy as np
import torch


@lru_cache(maxsize=2)
def order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order in which the rows of an epoch are seen: [num_rows] int64."""
    # Multiplied by a prime, so that epoch e + 1 of one seed is not epoch e of the next.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_rows, generator=generator).numpy()


def global_batch(num_rows: int, batch_size: int, seed: int, step: int) -> np.ndarray:
    """Return the rows of an optimizer step: [batch_size] int64.

    They are order(num_rows, seed, epoch)[k*B:(k+1)*B] in step k of the epoch. There is no state, so
    resuming needs only the step. The last num_rows % B rows in the order of an epoch are skipped.

    Args:
        step: counted from 0.
    """
    steps_per_epoch = num_rows // batch_size
    epoch, k = divmod(step, steps_per_epoch)
    return order(num_rows, seed, epoch)[k * batch_size : (k + 1) * batch_size]
