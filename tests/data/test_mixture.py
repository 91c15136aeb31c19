"""Batches that mix sources by weight."""

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from data.batching.mixture import Mixture, shuffled, to_whole_numbers


def rows_of_batches(mixture: Mixture, num_batches: int) -> np.ndarray:
    """Return the rows of the first batches, one after another: [num_batches * batch_size]."""
    return np.concatenate([mixture.rows_of_batch(k) for k in range(num_batches)])


def sources_of(mixture: Mixture, rows: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum(mixture.sizes), rows, side="right")


def random_mixtures(count: int) -> list[Mixture]:
    generator = random.Random(5)
    mixtures = []
    for seed in range(count):
        num_sources = generator.randint(2, 6)
        sizes = [generator.randint(1, 40) for _ in range(num_sources)]
        weights = [generator.choice([1, 2, 5, 0.1, 0.37, 12.5]) for _ in range(num_sources)]
        mixtures.append(Mixture(sizes, weights, generator.randint(1, 24), seed))
    return mixtures


MIXTURES = random_mixtures(40)


def test_the_order_has_these_values():
    mixture = Mixture(sizes=[6, 3], weights=[3, 1], batch_size=8, seed=1)
    assert mixture.rows_of_batch(0).tolist() == [3, 4, 8, 1, 0, 2, 6, 5]
    assert mixture.rows_of_batch(1).tolist() == [0, 5, 7, 1, 2, 4, 6, 3]
    unshuffled = Mixture([6, 3], [3, 1], 8, seed=1, shuffle=False)
    assert unshuffled.rows_of_batch(0).tolist() == [0, 1, 6, 2, 3, 4, 7, 5]
    assert unshuffled.rows_of_batch(1).tolist() == [0, 1, 8, 2, 3, 4, 6, 5]


@pytest.mark.parametrize("mixture", MIXTURES)
def test_the_shares_hold_in_every_part_of_the_sequence(mixture):
    """Rounding errors add up to at most half a row per source."""
    num_batches = 400 // mixture.batch_size + 2
    rows = rows_of_batches(mixture, num_batches)
    assert len(rows) == num_batches * mixture.batch_size
    sources = sources_of(mixture, rows)
    num_sources = len(mixture.sizes)
    total_weight = sum(mixture.weights)
    for source in range(num_sources):
        drawn = np.cumsum(sources == source)
        exact = np.arange(1, len(rows) + 1) * mixture.weights[source] / total_weight
        assert np.abs(drawn - exact).max() <= num_sources / 2 + 1e-6
        assert drawn[-1] > 0


@pytest.mark.parametrize("mixture", MIXTURES)
def test_no_row_is_repeated_before_its_source_is_used_up(mixture):
    rows = rows_of_batches(mixture, 400 // mixture.batch_size + 2)
    sources = sources_of(mixture, rows)
    first = 0
    for source, size in enumerate(mixture.sizes):
        drawn = rows[sources == source]
        whole_passes = drawn[: len(drawn) // size * size].reshape(-1, size)
        for one_pass in whole_passes:
            assert sorted(one_pass) == list(range(first, first + size))
        rest = drawn[whole_passes.size :]
        assert len(set(rest)) == len(rest)
        first += size


@pytest.mark.parametrize("mixture", MIXTURES[:10])
def test_a_batch_does_not_depend_on_earlier_calls(mixture):
    """Batches of half the size are the halves of batches."""
    in_order = [mixture.rows_of_batch(k).tolist() for k in range(12)]
    shuffled.cache_clear()
    assert [mixture.rows_of_batch(k).tolist() for k in reversed(range(12))] == in_order[::-1]
    double = Mixture(mixture.sizes, mixture.weights, 2 * mixture.batch_size, mixture.seed)
    assert double.rows_of_batch(3).tolist() == in_order[6] + in_order[7]


def test_whole_shares_are_the_same_in_every_batch():
    mixture = Mixture([50, 7, 3], [2, 1, 1], batch_size=16, seed=0)
    for k in range(20):
        sources = sources_of(mixture, mixture.rows_of_batch(k))
        assert np.bincount(sources).tolist() == [8, 4, 4]
        assert np.bincount(sources[:8]).tolist() == [4, 2, 2], "also in a mini-batch"


def test_only_the_ratio_of_the_weights_matters():
    batches = []
    for weights in ([3, 1], [0.75, 0.25], [75, 25], [0.3, 0.1]):
        batches.append(Mixture([20, 20], weights, 8, seed=4).rows_of_batch(3).tolist())
    assert batches == [batches[0]] * 4


def test_weights_are_exact():
    """0.1 + 0.2 is not 0.3 in binary."""
    assert to_whole_numbers([0.1, 0.2, 0.3]) == [1, 2, 3]
    assert to_whole_numbers([1e-3, 7]) == [1, 7000]
    weights = [0.123456789, 0.987654321]
    first, second = to_whole_numbers(weights)
    assert Fraction(first, second) == Fraction("0.123456789") / Fraction("0.987654321")
    far = Mixture([10, 10], weights, batch_size=4096, seed=0)
    draws = far.draws_before(np.array([10**12]))[:, 0]
    assert draws.sum() == 10**12
    assert draws[0] == round(10**12 * Fraction(first, first + second))


def test_seeds_sources_and_passes_have_orders_of_their_own():
    orders = {tuple(shuffled(30, seed, source, number)) for seed, source, number in NUMBERS}
    assert len(orders) == len(NUMBERS)


NUMBERS = [*itertools.product(range(3), repeat=3)]


def test_the_global_random_state_is_left_alone():
    shuffled.cache_clear()
    state = torch.get_rng_state()
    Mixture([20, 20], [1, 1], 8, seed=4).rows_of_batch(3)
    assert torch.equal(torch.get_rng_state(), state)
