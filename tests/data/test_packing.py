import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from config import InputError
from data.batching.batch import Batch
from data.batching.order import global_batch, order
from data.batching.packing import pack, partition, spread

lengths_and_cap = st.integers(1, 400).flatmap(
    lambda cap: st.tuples(st.lists(st.integers(1, cap), max_size=60), st.just(cap))
)


@given(lengths_and_cap, st.booleans(), st.integers(0, 8))
@settings(max_examples=300, deadline=None)
def test_micro_batches_never_exceed_the_cap_and_hold_each_sequence_once(case, padded, more):
    lengths, cap = case
    bins = pack(lengths, cap, padded)
    bins = spread(bins, len(bins) + more, lengths)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    for b in bins:
        used = [lengths[i] for i in b]
        assert (max(used, default=0) * len(used) if padded else sum(used)) <= cap


@given(lengths_and_cap, st.integers(0, 8))
@settings(deadline=None)
def test_spread_gives_exactly_the_number_of_bins_that_other_ranks_have(case, more):
    lengths, cap = case
    bins = pack(lengths, cap)
    wanted = len(bins) + more
    got = spread(bins, wanted, lengths)
    assert len(got) == wanted
    if len(lengths) >= wanted:
        assert all(got), "no micro-batch stays empty while another holds two sequences"


def test_pack_fills_bins_where_a_naive_cut_overflows():
    assert pack([8000, 8000, 8000], 12000) == [[0], [1], [2]]
    assert pack([5, 4, 3, 2, 1], 8) == [[0, 2], [1, 3, 4]]


def test_a_sequence_longer_than_the_cap_is_an_error():
    with pytest.raises(
        InputError, match="9 tokens is longer than data.max_tokens_per_micro_batch=8"
    ):
        pack([3, 9], 8)


@given(st.lists(st.floats(1, 1e6), max_size=50), st.integers(1, 8))
@settings(deadline=None)
def test_partition_holds_each_item_once_and_is_balanced(costs, parts):
    got = partition(costs, parts)
    assert len(got) == parts
    assert sorted(i for p in got for i in p) == list(range(len(costs)))
    sums = [sum(costs[i] for i in p) for p in got]
    assert max(sums) - min(sums) <= max(costs, default=0) * (1 + 1e-9)


def test_partition_beats_round_robin_on_skewed_work():
    rng = np.random.default_rng(0)
    costs = [24576 * n + n * n for n in rng.lognormal(6, 1.2, 256).astype(int)]
    share = sum(costs) / 8
    assert max(sum(costs[i] for i in p) for p in partition(costs, 8)) < 1.001 * share
    assert max(sum(costs[i::8]) for i in range(8)) > 1.05 * share


def test_very_many_items_are_divided_as_evenly_and_in_no_time():
    """As 64 ranks have them. One that is larger than a whole share is alone."""
    costs = [
        24576 * n + n * n
        for n in np.random.default_rng(0).lognormal(6, 1.2, 30_000).astype(int).tolist()
    ]
    costs[7] = sum(costs) / 32
    start = time.process_time()
    parts = partition(costs, 64)
    assert (
        time.process_time() - start < 0.5
        and sorted(sum(parts, [])) == list(range(30_000))
        and [7] in parts
    )
    sums = sorted(sum(costs[i] for i in part) for part in parts)
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


def test_select_and_position_ids():
    batch = Batch(
        torch.arange(10), torch.tensor([0, 3, 4, 10]), {"loss_mask": torch.arange(10) / 10}
    )
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4, 5]
    part = batch.select([2, 0])
    assert part.input_ids.tolist() == [4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert part.cu_seqlens.tolist() == [0, 6, 9] and part.lengths == [6, 3]
    assert torch.equal(part.fields["loss_mask"], part.input_ids / 10)
    first, none, rest = batch.split([1, 0, 2])
    assert (
        first.input_ids.tolist() == [0, 1, 2]
        and rest.input_ids.tolist() == [3, 4, 5, 6, 7, 8, 9]
        and len(none) == 0
    )
    assert rest.cu_seqlens.tolist() == [0, 1, 7] and torch.equal(
        rest.fields["loss_mask"], rest.input_ids / 10
    )
    rest.input_ids[0] = 20
    assert batch.input_ids[3] == 20, "a view"
    empty = batch.select([])
    assert len(empty) == 0 and empty.input_ids.tolist() == [] and empty.cu_seqlens.tolist() == [0]
