"""The rows of each step: a function of seed and step alone, on every rank and any world size."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch

# The number of a batch, from 0 -> its rows, [batch_size] int64.
RowsOfBatch = Callable[[int], np.ndarray]


@lru_cache(maxsize=2)
def order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the rows in an epoch: [num_rows] int64."""
    # The seed is multiplied by a prime, so that epoch e + 1 of one seed differs from epoch e of the
    # next seed.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_rows, generator=generator).numpy()


def global_batch(num_rows: int, batch_size: int, seed: int, step: int) -> np.ndarray:
    """Return the rows of an optimizer step: [batch_size] int64.

    In step k of an epoch, they are order(num_rows, seed, epoch)[k * B : (k + 1) * B], where B is
    batch_size. There is no state, so resuming needs only the step. The last num_rows % B rows of an
    epoch's order are skipped.

    Args:
        step: counted from 0.
    """
    steps_per_epoch = num_rows // batch_size
    epoch, k = divmod(step, steps_per_epoch)
    return order(num_rows, seed, epoch)[k * batch_size : (k + 1) * batch_size]


def unshuffled_batch(num_rows: int, batch_size: int, step: int) -> np.ndarray:
    """Return the rows of an optimizer step in the order of the files: [batch_size] int64.

    Every epoch begins with row 0. The last num_rows % batch_size rows are never used.

    Args:
        step: counted from 0.
    """
    k = step % (num_rows // batch_size)
    return np.arange(k * batch_size, (k + 1) * batch_size)
