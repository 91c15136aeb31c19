"""Every token of a micro-batch is read once, and predicted from the right slot."""

import itertools

import pytest
import torch

from data.batching.batch import Batch, make_cu_seqlens
from engines.microbatch import Layout, MicroBatch, lay_out, make_grid, place_tokens
from engines.model.routes import FIELD as ROUTES, no_route
from engines.teaching import taught_by

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
        torch.arange(num_tokens),  # 0 is a token like any other
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


@pytest.mark.parametrize("layout, num_ranks", layouts_on_ranks(1, 2, 4), ids=str)
def test_every_slot_knows_the_position_of_its_token(layout, num_ranks):
    batch = make_batch()
    for rank in range(num_ranks):
        group = FakeGroup(rank, num_ranks)
        micro_batch = lay_out(batch, layout, group, torch.device("cpu"))
        has_token = ~micro_batch.padding
        positions = micro_batch.positions.expand_as(micro_batch.input_ids)
        tokens = micro_batch.input_ids[has_token]
        assert torch.equal(positions[has_token], batch.position_ids[tokens])


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


def lay_out_on_ranks(batch: Batch, layout: Layout, num_ranks: int, **options) -> list[MicroBatch]:
    cpu = torch.device("cpu")
    groups = [FakeGroup(rank, num_ranks) for rank in range(num_ranks)]
    return [lay_out(batch, layout, group, cpu, **options) for group in groups]


def in_slots(values: torch.Tensor) -> torch.Tensor:
    """Return values [b, s, ...] of a rank in the order of its slots, [s * b, ...]."""
    return values.transpose(0, 1).flatten(0, 1)


@pytest.mark.parametrize("layout, num_ranks", layouts_on_ranks(1, 2, 4), ids=str)
def test_a_rank_has_the_candidates_of_its_own_targets(layout, num_ranks):
    batch = make_batch()
    batch.fields["candidate_ids"] = torch.stack([batch.input_ids, batch.input_ids + 1000], 1).int()
    for micro_batch in lay_out_on_ranks(batch, layout, num_ranks):
        targets = micro_batch.targets
        assert torch.equal(micro_batch.candidate_ids, torch.stack([targets, targets + 1000], 1))


@pytest.mark.parametrize("layout, num_ranks", layouts_on_ranks(1, 2, 4), ids=str)
def test_layers_that_predict_further_ahead_are_numbered_from_1(layout, num_ranks):
    batch = make_batch()
    for micro_batch in lay_out_on_ranks(batch, layout, num_ranks, num_ahead=2):
        read = in_slots(micro_batch.input_ids)
        assert len(micro_batch.ahead) == 2
        for number, ahead in enumerate(micro_batch.ahead, start=1):
            targets = ahead.targets
            assert torch.equal(read[ahead.predicting_slots], targets - 1 - number)
            later = in_slots(ahead.input_ids)
            assert torch.equal(later[later >= 0], read[later >= 0] + number)


@pytest.mark.parametrize("layout, num_ranks", layouts_on_ranks(1, 2, 4), ids=str)
def test_the_slots_of_all_ranks_predict_the_tokens_of_the_batch(layout, num_ranks):
    batch = make_batch()
    micro_batches = lay_out_on_ranks(batch, layout, num_ranks)
    gathered = []
    for micro_batch in micro_batches:
        slots = torch.zeros(micro_batch.input_ids.numel(), dtype=torch.int64)
        gathered.append(slots.index_copy(0, micro_batch.predicting_slots, micro_batch.targets))
    for micro_batch in micro_batches:
        predicted = torch.cat(gathered)[micro_batch.source_slots]
        assert torch.equal(predicted, batch.input_ids[micro_batch.predicted_tokens])


@pytest.mark.parametrize("layout, num_ranks", layouts_on_ranks(1, 2, 4), ids=str)
def test_every_slot_has_the_experts_of_its_token_and_padding_has_none(layout, num_ranks):
    batch = make_batch()
    ids = batch.input_ids[:, None, None]
    batch.fields[ROUTES] = torch.cat([ids, ids + 1], 2).to(torch.uint8)
    for micro_batch in lay_out_on_ranks(batch, layout, num_ranks):
        read = micro_batch.input_ids
        expected = torch.stack([read, read + 1], 2)[:, :, None].to(torch.uint8)
        expected[micro_batch.padding] = no_route(torch.uint8)
        assert torch.equal(micro_batch.routes, expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_predictions_return_to_their_tokens(layout):
    batch = make_batch()
    micro_batch = lay_out(batch, layout, FakeGroup(0, 1), torch.device("cpu"))
    targets = micro_batch.targets.float()
    is_predicted = (batch.fields["loss_mask"] != 0) & (batch.position_ids > 0)
    expected = batch.input_ids * is_predicted.float()
    assert torch.equal(micro_batch.to_tokens(targets), expected)
    # Hidden states, and a teacher's most likely tokens, have several numbers for each token.
    of_two_numbers = micro_batch.to_tokens(torch.stack([targets, -targets], 1))
    assert torch.equal(of_two_numbers, torch.stack([expected, -expected], 1))


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


def test_a_teacher_computes_its_own_sequences_in_as_many_micro_batches():
    numbers = torch.tensor([1, 0, 1, 2])
    lengths = torch.tensor(LENGTHS)
    fields = {"teacher_number": numbers.repeat_interleave(lengths)}
    batch = Batch(torch.arange(sum(LENGTHS)), make_cu_seqlens(lengths), fields)
    micro_batches = [(2, [3, 1]), (1, [2, 0])]
    assert taught_by(0, batch, micro_batches) == [(2, [1]), (1, [])]
    assert taught_by(1, batch, micro_batches) == [(2, []), (1, [2, 0])]
    assert taught_by(2, batch, micro_batches) == [(2, [3]), (1, [])]
