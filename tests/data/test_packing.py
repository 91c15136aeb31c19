"""Packing sequences into micro-batches, dividing work over ranks, and batches of sequences."""

import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from config import InputError
from data.batching.batch import Batch
from data.batching.order import global_batch, order
from data.batching.packing import pack, partition, split_micro_batches

lengths_and_cap = st.integers(1, 400).flatmap(
    lambda cap: st.tuples(st.lists(st.integers(1, cap), max_size=60), st.just(cap))
)


@given(lengths_and_cap, st.booleans(), st.integers(0, 8))
@settings(max_examples=100, deadline=None)
def test_micro_batches_never_exceed_the_cap_and_hold_each_sequence_once(case, padded, num_added):
    lengths, cap = case
    bins = pack(lengths, cap, padded)
    bins = split_micro_batches(bins, len(bins) + num_added, lengths)
    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    for sequences in bins:
        used = [lengths[i] for i in sequences]
        num_tokens = max(used, default=0) * len(used) if padded else sum(used)
        assert num_tokens <= cap


@given(lengths_and_cap, st.integers(0, 8))
@settings(deadline=None)
def test_spread_gives_exactly_the_number_of_bins_that_other_ranks_have(case, num_added):
    lengths, cap = case
    bins = pack(lengths, cap)
    num_bins = len(bins) + num_added
    bins = split_micro_batches(bins, num_bins, lengths)
    assert len(bins) == num_bins
    if len(lengths) >= num_bins:
        assert all(bins), "no micro-batch stays empty while another holds two sequences"


def test_pack_fills_bins_where_a_naive_cut_overflows():
    assert pack([8000, 8000, 8000], 12000) == [[0], [1], [2]]
    assert pack([5, 4, 3, 2, 1], 8) == [[0, 2], [1, 3, 4]]


def test_a_sequence_longer_than_the_cap_is_an_error():
    with pytest.raises(
        InputError, match="9 tokens is longer than data.max_tokens_per_micro_batch=8"
    ):
        pack([3, 9], 8)


def sums_of(parts, costs):
    """Return the total cost of each part."""
    sums = []
    for part in parts:
        sums.append(sum(costs[i] for i in part))
    return sums


@given(st.lists(st.floats(1, 1e6), max_size=50), st.integers(1, 8))
@settings(deadline=None)
def test_partition_holds_each_item_once_and_is_balanced(costs, num_parts):
    parts = partition(costs, num_parts)
    assert len(parts) == num_parts
    assert sorted(itertools.chain(*parts)) == list(range(len(costs)))
    sums = sums_of(parts, costs)
    assert max(sums) - min(sums) <= max(costs, default=0) * (1 + 1e-9)


def test_largest_differencing_is_that_of_the_textbook():
    """The example of Karmarkar and Karp: the largest two are separated, and so on; 16 and 14."""
    assert sorted(sums_of(partition([8, 7, 6, 5, 4], 2), [8, 7, 6, 5, 4])) == [14, 16]
    costs = [13, 12, 11, 9, 8, 8, 7, 6, 5, 4, 4, 3, 2, 1]
    assert sorted(sums_of(partition(costs, 3), costs)) == [31, 31, 31]
    assert partition([3, 1, 2], 4) == [[0], [2], [1], []]
    assert partition([], 2) == [[], []]


def test_splitting_leaves_the_micro_batches_as_they_were():
    bins = [[0, 1, 2], [3]]
    lengths = [5, 3, 3, 9]
    assert split_micro_batches(bins, 4, lengths) == [[3], [0], [1], [2]]
    assert bins == [[0, 1, 2], [3]]
    assert split_micro_batches(bins, 2, lengths) == [[0, 1, 2], [3]], "the fullest first"
    assert split_micro_batches([], 2, []) == [[], []]
    assert split_micro_batches([[0, 1], [2, 3]], 3, [1, 2, 6, 4]) == [[2], [3], [0, 1]]


def test_partition_beats_round_robin_on_skewed_work():
    rng = np.random.default_rng(0)
    costs = [24576 * n + n * n for n in rng.lognormal(6, 1.2, 256).astype(int)]
    share = sum(costs) / 8
    assert max(sums_of(partition(costs, 8), costs)) < 1.001 * share
    round_robin = [range(i, len(costs), 8) for i in range(8)]
    assert max(sums_of(round_robin, costs)) > 1.05 * share


def test_very_many_items_are_divided_evenly_and_fast():
    """As many as 64 ranks have. An item that is larger than a whole share is alone in its part."""
    costs = [
        24576 * n + n * n
        for n in np.random.default_rng(0).lognormal(6, 1.2, 30_000).astype(int).tolist()
    ]
    costs[7] = sum(costs) / 32
    start = time.process_time()
    parts = partition(costs, 64)
    assert time.process_time() - start < 0.5
    assert sorted(itertools.chain(*parts)) == list(range(30_000))
    assert [7] in parts
    sums = sorted(sums_of(parts, costs))
    assert sums[-2] < 1.0001 * sums[0]


def test_the_order_is_stateless_and_an_epoch_sees_each_row_once():
    batches = [global_batch(103, 10, seed=3, step=k) for k in range(20)]
    for epoch in range(2):
        rows = np.concatenate(batches[10 * epoch : 10 * epoch + 10])
        assert len(set(rows)) == 100
        assert (rows == order(103, 3, epoch)[:100]).all()
    assert (batches[0] != batches[10]).any()
    assert (global_batch(103, 10, seed=3, step=13) == batches[13]).all()
    assert (global_batch(103, 10, seed=4, step=13) != batches[13]).any()


def test_batches_are_concatenated_with_their_fields():
    first = Batch(
        torch.arange(3), torch.tensor([0, 1, 3]), {"loss_mask": torch.tensor([0.0, 1, 1])}
    )
    second = Batch(torch.tensor([7]), torch.tensor([0, 1]), {"loss_mask": torch.tensor([5.0])})
    both = Batch.concat([first, second, first.select([])])
    assert both.input_ids.tolist() == [0, 1, 2, 7]
    assert both.cu_seqlens.tolist() == [0, 1, 3, 4]
    assert both.fields["loss_mask"].tolist() == [0, 1, 1, 5]
    assert both.rows is None
    assert both.images == []
    assert both.candidate_ids.shape == (4, 0)


def test_select_and_position_ids():
    batch = Batch(
        torch.arange(10), torch.tensor([0, 3, 4, 10]), {"loss_mask": torch.arange(10) / 10}
    )
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4, 5]
    part = batch.select([2, 0])
    assert part.input_ids.tolist() == [4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert part.cu_seqlens.tolist() == [0, 6, 9]
    assert part.lengths == [6, 3]
    assert torch.equal(part.fields["loss_mask"], part.input_ids / 10)
    first, none, rest = batch.split([1, 0, 2])
    assert first.input_ids.tolist() == [0, 1, 2]
    assert rest.input_ids.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert len(none) == 0
    assert rest.cu_seqlens.tolist() == [0, 1, 7]
    assert torch.equal(rest.fields["loss_mask"], rest.input_ids / 10)
    rest.input_ids[0] = 20
    assert batch.input_ids[3] == 20, "a view"
    empty = batch.select([])
    assert len(empty) == 0
    assert empty.input_ids.tolist() == []
    assert empty.cu_seqlens.tolist() == [0]
