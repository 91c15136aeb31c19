"""The order of rows: a function of the seed and the step alone."""

import numpy as np
import torch

from data.batching.order import global_batch, order, unshuffled_batch


def test_an_epoch_is_the_permutation_of_its_seed():
    generator = torch.Generator().manual_seed(7 * 1_000_003 + 2)
    expected = torch.randperm(50, generator=generator)
    assert order(50, seed=7, epoch=2).tolist() == expected.tolist()


def test_seeds_and_epochs_have_streams_of_their_own():
    orders = {}
    for seed in range(4):
        for epoch in range(4):
            orders[tuple(order(50, seed, epoch).tolist())] = seed, epoch
    assert len(orders) == 16


def test_a_step_is_a_slice_of_its_epoch():
    num_rows = 10
    batch_size = 3
    for step in range(7):
        epoch = step // 3
        start = step % 3 * batch_size
        expected = order(num_rows, 5, epoch)[start : start + batch_size]
        assert np.array_equal(global_batch(num_rows, batch_size, 5, step), expected)


def test_the_default_order_has_these_values():
    batches = [global_batch(10, 3, seed=7, step=step).tolist() for step in range(4)]
    assert batches == [[3, 1, 8], [7, 6, 2], [0, 5, 9], [4, 1, 7]]


def test_without_shuffling_every_epoch_is_the_order_of_the_files():
    batches = [unshuffled_batch(10, 3, step).tolist() for step in range(4)]
    assert batches == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 2]]
