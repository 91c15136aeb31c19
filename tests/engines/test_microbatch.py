"""Every token of a micro-batch is read once, and predicted from the right slot."""

import itertools

import pytest
import torch

from data.batching.batch import Batch, make_cu_seqlens
from engines.microbatch import Layout, lay_out, make_grid, place_tokens

LENGTHS = [5, 1, 12, 7]
LAYOUTS = [
    Layout(is_packed=True),
    Layout(is_packed=False),
    Layout(is_packed=True, padding_multiple=8, is_zigzag=True),
    Layout(is_packed=False, padding_multiple=8, is_zigzag=True),
]


def layouts_on_ranks(*group_sizes: int) -> list[tuple[Layout, int]]:
    """Return the layouts that there are with each number of ranks.

    Padded rows are only divided over ranks in zigzag.
    """
    cases = []
    for layout, num_ranks in itertools.product(LAYOUTS, group_sizes):
        if num_ranks == 1 or layout.is_packed or layout.is_zigzag:
            cases.append((layout, num_ranks))
    return cases


class FakeGroup:
    """One rank of a group that never communicates."""

    def __init__(self, rank: int, size: int):
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def make_batch(lengths: list[int] = LENGTHS) -> Batch:
    num_tokens = sum(lengths)
    loss_mask = torch.ones(num_tokens)
    loss_mask[::4] = 0
    fields = {"loss_mask": loss_mask}
    return Batch(
        torch.arange(100, 100 + num_tokens),
        make_cu_seqlens(torch.tensor(lengths, dtype=torch.int64)),
        fields,
    )


@pytest.mark.parametrize("layout, num_ranks", layouts_on_ranks(1, 2, 4), ids=str)
def test_every_token_is_read_once(layout, num_ranks):
    batch = make_batch()
    ids = []
    for rank in range(num_ranks):
        group = FakeGroup(rank, num_ranks)
        micro_batch = lay_out(batch, layout, group, torch.device("cpu"))
        ids += micro_batch.input_ids[~micro_batch.padding].tolist()
    assert sorted(ids) == batch.input_ids.tolist()


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("layout, num_ranks", layouts_on_ranks(1, 2, 4), ids=str)
def test_tokens_are_predicted_from_an_earlier_token(layout, num_ranks, ahead):
    """The slot of a prediction holds the token 1 + ahead positions before its target."""
    batch = make_batch()
    grid = make_grid(batch.lengths, layout, num_ranks, filler=0)
    num_predicted = 0
    for rank in range(num_ranks):
        read = place_tokens(batch, grid, rank).input_ids.T.flatten()
        placement = place_tokens(batch, grid, rank, ahead)
        is_own = placement.slots.on(rank)
        targets = batch.input_ids[placement.predicted[is_own]]
        assert torch.equal(read[placement.slots.slot[is_own]], targets - 1 - ahead)
        num_predicted += len(targets)
    has_loss = batch.fields["loss_mask"] != 0
    assert num_predicted == int((has_loss & (batch.position_ids > ahead)).sum())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_later_tokens_are_read_from_the_second_slot_on(layout):
    """A slot holds the token k positions further on; nothing in a sequence's first slot."""
    batch = make_batch()
    grid = make_grid(batch.lengths, layout, 1, filler=0)
    main = place_tokens(batch, grid, 0).input_ids
    for ahead in (1, 2):
        later = place_tokens(batch, grid, 0, ahead).input_ids
        has_token = later >= 0
        assert torch.equal(later[has_token], main[has_token] + ahead)
        is_first_token = torch.isin(main, batch.input_ids[batch.position_ids == 0])
        assert not has_token[is_first_token].any()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_predictions_return_to_their_tokens(layout):
    batch = make_batch()
    micro_batch = lay_out(batch, layout, FakeGroup(0, 1), torch.device("cpu"))
    predictions = micro_batch.to_tokens(micro_batch.targets.float())
    is_predicted = (batch.fields["loss_mask"] != 0) & (batch.position_ids > 0)
    assert torch.equal(predictions, batch.input_ids * is_predicted.float())


@pytest.mark.parametrize("layout, num_ranks", layouts_on_ranks(1, 2), ids=str)
def test_a_micro_batch_without_tokens_is_padding(layout, num_ranks):
    micro_batch = lay_out(make_batch([]), layout, FakeGroup(0, num_ranks), torch.device("cpu"))
    assert micro_batch.num_tokens == 0
    assert micro_batch.padding.all()
    assert micro_batch.input_ids.numel() > 0


def test_filler_adds_a_sequence_of_padding():
    layout = Layout(is_packed=True)
    micro_batch = lay_out(make_batch(), layout, FakeGroup(0, 1), torch.device("cpu"), filler=9)
    assert micro_batch.lengths == [*LENGTHS, 9]
    assert micro_batch.padding.sum() == 9
