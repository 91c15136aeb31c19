"""Batches that mix several sources in fixed shares (data.weights)."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import lcm

import numpy as np
import torch

# Orders of sources that are kept in memory.
MAX_ORDERS = 256


@dataclass(frozen=True)
class Mixture:
    """Rows of several sources in the ratio of their weights.

    All batches together form one sequence of rows. Each row of the sequence comes from one source,
    and the sources alternate so evenly that every batch, and every part of a batch, has nearly the
    shares of the weights. A source with more draws than rows starts over: no row is repeated before
    all rows of its source have been drawn. Each pass over a source has a new random order, unless
    `shuffle` is false. There is no state: a batch follows from its number.

    Attributes:
        sizes: the number of rows of each source; the first source has the rows from 0.
        weights: the weight of each source, above 0; only their ratio matters.
        batch_size: the number of rows in a batch.
        seed: determines the orders of the sources.
        shuffle: whether the order within a source is random.
    """

    sizes: Sequence[int]
    weights: Sequence[float]
    batch_size: int
    seed: int
    shuffle: bool = True

    def rows_of_batch(self, batch_index: int) -> np.ndarray:
        """Return the rows of a batch, counted from 0: [batch_size] int64."""
        start = batch_index * self.batch_size
        draws = self.draws_before(np.arange(start, start + self.batch_size + 1))
        rows = np.empty(self.batch_size, np.int64)
        first_row = 0
        for source, size in enumerate(self.sizes):
            is_drawn = np.diff(draws[source]) > 0
            rows[is_drawn] = first_row + self.rows_of_source(source, draws[source][:-1][is_drawn])
            first_row += size
        return rows

    def draws_before(self, positions: np.ndarray) -> np.ndarray:
        """Return how many of the first `positions` rows of the sequence come from each source.

        The first source gets its share of them, rounded; the second gets its share of the rest,
        rounded; and so on. A share of at most 1 grows by at most one row per position, so exactly
        one source gets each row.

        Args:
            positions: [n] int64.

        Returns:
            [sources, n] int64.
        """
        whole_weights = to_whole_numbers(self.weights)
        # Python's whole numbers, which do not overflow.
        remaining = positions.astype(object)
        remaining_weight = sum(whole_weights)
        draws = []
        for weight in whole_weights:
            rounded = (2 * weight * remaining + remaining_weight) // (2 * remaining_weight)
            draws.append(rounded)
            remaining = remaining - rounded
            remaining_weight -= weight
        return np.stack(draws).astype(np.int64)

    def rows_of_source(self, source: int, draws: np.ndarray) -> np.ndarray:
        """Return the rows that these draws of a source take, counted from its first row: [n] int64.

        Args:
            draws: [n] int64, counted from 0 over the whole run, in increasing order.
        """
        size = self.sizes[source]
        passes, places = np.divmod(draws, size)
        if not self.shuffle:
            return places
        rows = np.empty_like(places)
        for number in np.unique(passes).tolist():
            is_in_pass = passes == number
            source_order = shuffled(size, self.seed, source, number)
            rows[is_in_pass] = source_order[places[is_in_pass]]
        return rows


def to_whole_numbers(weights: Sequence[float]) -> list[int]:
    """Return whole numbers in exactly the ratio of the weights, as they are written in decimal."""
    fractions = [Fraction(str(weight)) for weight in weights]
    denominator = lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * denominator) for fraction in fractions]


@lru_cache(maxsize=MAX_ORDERS)
def shuffled(size: int, seed: int, source: int, number: int) -> np.ndarray:
    """Return the order of a source's rows in one pass over it: [size] int64.

    Args:
        source: the number of the source: two sources of the same size have different orders.
        number: the number of the pass, from 0.
    """
    digest = hashlib.sha256(repr((seed, source, number)).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 2)
    return torch.randperm(size, generator=generator).numpy()
