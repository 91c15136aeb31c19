"""Divides a micro-batch over ranks: pads it, gives each rank its tokens, and collects results.

Terms in this file: a *token* is an index into the T tokens of the micro-batch. A *slot* is a
position in a rank's [b, s] input, padding included. Slots are numbered like the rows of hidden
states [s * b, h], which are flattened from [s, b, h]. The hidden state in the slot of token t - 1
predicts token t.

The index arithmetic is done first, on the host (Grid, place_tokens); then tensors are built and
moved to the device (lay_out).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from data.batching.batch import Batch
from data.batching.plan import MicroBatches
from engines.model.routes import FIELD as ROUTES, no_route
from engines.parallel.collectives import AllGatherSliceGrad
from engines.parallel.device import to_device
from engines.parallel.varlen import Zigzag
from engines.planning import round_up
from engines.teacher import OUTPUTS as TEACHER_OUTPUTS, TeacherRows


@dataclass(frozen=True)
class Layout:
    """How sequences are arranged in rows and divided over a context-parallel group.

    is_packed         all sequences lie in one row; else each has its own row, padded to a common
                      length
    padding_multiple  the length of every sequence is padded to a multiple of this
    is_zigzag         each sequence is cut into 2 * ranks chunks, and rank r has the r-th from each
                      end; else all sequences are laid end to end, and rank r has the r-th part
    """

    is_packed: bool
    padding_multiple: int = 1
    is_zigzag: bool = False


@dataclass
class TokensAhead:
    """Inputs and targets of a multi-token-prediction layer that predicts k tokens further ahead.

    input_ids         [b, s] int64: the token k positions after the token in each slot. -1 past the
                      end of a sequence, and in its first slot, where vLLM's drafters see no token
                      either
    predicting_slots  [m] int64: the slots that predict, k + 1 positions before their targets
    targets           [m] int64: the tokens to predict
    """

    input_ids: Tensor
    predicting_slots: Tensor
    targets: Tensor


@dataclass
class MicroBatch:
    """T tokens, k of which are predicted. This rank has s * b slots and predicts m of the tokens.

    input_ids         [b, s] int64: the token in each slot of this rank; b = 1 if packed
    padding           [b, s] bool: slots without a token
    lengths           of the sequences, padding included; the last one may be padding alone
    packing           the sequences' boundaries for the engine's attention; None for plain attention
    positions         [s] int64: each slot's position in its sequence
    group             the context-parallel ranks that share the micro-batch
    predicting_slots  [m] int64: the slots of this rank that predict a token
    targets           [m] int64: the token that each of these slots predicts
    candidate_ids     [m, K] int64: the tokens that each target was sampled from, see Batch
    predicted_tokens  [k] int64: the tokens that are predicted on any rank of the group
    source_slots      [k] int64: the slot that predicts each of them. With R ranks, the slots of all
                      ranks are numbered from 0 to R * s * b - 1.
    fields            name -> [T]
    num_tokens        T
    ahead             entry i is for the MTP layer that predicts i + 1 tokens further ahead
    image_inputs      inputs of a vision-language model, which replace input_ids and positions
    routes            [b, s, L, k]: the experts that vLLM chose for the token in each slot, see
                      engines/model/routes.py; None: there are none
    teacher           a teacher's outputs for each target, in host memory until they are used
    """

    input_ids: Tensor
    padding: Tensor
    lengths: list[int]
    packing: Any
    positions: Tensor
    group: ProcessGroup
    predicting_slots: Tensor
    targets: Tensor
    candidate_ids: Tensor
    predicted_tokens: Tensor
    source_slots: Tensor
    fields: dict[str, Tensor]
    num_tokens: int
    ahead: list[TokensAhead]
    image_inputs: dict[str, Tensor] = field(default_factory=dict)
    routes: Tensor | None = None
    teacher: TeacherRows | None = None

    def to_tokens(self, predictions: Tensor) -> Tensor:
        """Scatter this rank's predictions [m, ...] to tokens [T, ...], with 0 where there is none.

        The result is the same on all ranks of the context-parallel group.
        """
        if self.group.size() > 1:
            slots = predictions.new_zeros(self.input_ids.numel(), *predictions.shape[1:])
            slots = slots.index_copy(0, self.predicting_slots, predictions)
            predictions = AllGatherSliceGrad.apply(slots, self.group).index_select(
                0, self.source_slots
            )
        tokens = predictions.new_zeros(self.num_tokens, *predictions.shape[1:])
        return tokens.index_copy(0, self.predicted_tokens, predictions)


class TokenResults:
    """Collects the head's outputs for all tokens of a batch from its micro-batches.

    outputs: [T, ...] each; None before the first micro-batch.
    """

    def __init__(self, batch: Batch, micro_batches: MicroBatches, device: torch.device):
        self.num_tokens = len(batch.input_ids)
        self.device = device
        numbers = Batch(torch.arange(self.num_tokens), batch.cu_seqlens)
        self.tokens = iter(
            [numbers.select(members).input_ids.to(device) for _, members in micro_batches]
        )
        self.outputs: tuple[Tensor, ...] | None = None

    def add(self, outputs: tuple[Tensor, ...]) -> None:
        """Add the outputs of the next micro-batch, one entry per token."""
        outputs = [x.to(self.device) for x in outputs]
        if self.outputs is None:
            self.outputs = tuple(x.new_zeros(self.num_tokens, *x.shape[1:]) for x in outputs)
        tokens = next(self.tokens)
        for of_batch, of_micro_batch in zip(self.outputs, outputs):
            of_batch[tokens] = of_micro_batch


# -- index arithmetic -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Slots:
    """Where n tokens are: the rank of each token, and its slot on that rank; both [n] int64."""

    rank: Tensor
    slot: Tensor

    def on(self, rank: int) -> Tensor:
        """Return [n] bool: whether each token is on this rank."""
        return self.rank == rank


@dataclass(frozen=True)
class Grid:
    """Maps each position of each sequence to a rank and a slot.

    lengths     [n] int64: of the sequences, padding included
    starts      [n] int64: where each sequence begins, with all of them laid end to end
    num_slots   number of slots on each rank
    num_ranks   number of ranks in the context-parallel group
    """

    layout: Layout
    lengths: Tensor
    starts: Tensor
    num_slots: int
    num_ranks: int

    def locate(self, sequence: Tensor, position: Tensor) -> Slots:
        """Return the slots of m tokens: token i is at position[i] of sequence[i]."""
        if self.num_ranks == 1:
            rank = torch.zeros_like(sequence)
            start = self.starts[sequence]
            offset = position
        elif self.layout.is_zigzag:
            rank, start, offset = self._locate_zigzag(sequence, position)
        else:
            token = self.starts[sequence] + position
            rank = token // self.num_slots
            start = 0
            offset = token % self.num_slots
        if self.layout.is_packed:
            return Slots(rank, start + offset)
        return Slots(rank, offset * len(self.lengths) + sequence)

    def _locate_zigzag(self, sequence: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return each token's rank, the start of that rank's part, and the offset in the part."""
        chunk_length = self.lengths[sequence] // (2 * self.num_ranks)
        chunk = position // chunk_length
        is_second_half = chunk >= self.num_ranks
        rank = torch.where(is_second_half, 2 * self.num_ranks - 1 - chunk, chunk)
        offset = position % chunk_length + is_second_half * chunk_length
        return rank, self.starts[sequence] // self.num_ranks, offset


def make_grid(lengths: list[int], layout: Layout, num_ranks: int, filler: int) -> Grid:
    """Pad the sequences so that all ranks have equally many slots, and at least one.

    If padding to the multiple is not enough, a last sequence is added that is only padding.

    Args:
        lengths: number of tokens in each sequence.
        layout: rows, padding and the division over ranks.
        num_ranks: number of ranks in the context-parallel group.
        filler: the length of a padding sequence that is always added; only for a group of one rank.
            0: add one only if it is needed.
    """
    padded = [round_up(length, layout.padding_multiple) for length in lengths]
    if filler:
        num_missing = filler
    elif padded:
        num_missing = -sum(padded) % num_ranks
    else:
        num_missing = max(layout.padding_multiple, num_ranks)
    if num_missing:
        padded.append(num_missing)
    padded_lengths = torch.tensor(padded)
    if not layout.is_packed:
        padded_lengths = padded_lengths.max().expand(len(padded_lengths))
    starts = padded_lengths.cumsum(0) - padded_lengths
    num_slots = int(padded_lengths.sum()) // num_ranks
    return Grid(layout, padded_lengths, starts, num_slots, num_ranks)


@dataclass(frozen=True)
class Placement:
    """The tokens that a rank reads and predicts; tensors in host memory.

    input_ids  [b, s] int64: the token in each slot of this rank, -1 if there is none
    predicted  [k] int64: the tokens that are predicted, on all ranks
    slots      [k]: the slots that predict them
    """

    input_ids: Tensor
    predicted: Tensor
    slots: Slots


def place_tokens(batch: Batch, grid: Grid, rank: int, ahead: int = 0) -> Placement:
    """Put the token that comes `ahead` positions later into each slot of a rank.

    Every token with loss_mask is predicted from the slot 1 + ahead positions before it. The first
    1 + ahead tokens of a sequence are not predicted.
    """
    num_tokens = len(batch.input_ids)
    sequence = torch.repeat_interleave(torch.arange(len(batch)), batch.cu_seqlens.diff())
    position = batch.position_ids

    # If ahead > 0, the first slot of a sequence gets no token, see TokensAhead.
    first_read = ahead + 1 if ahead else 0
    is_read = position >= first_read
    slots = grid.locate(sequence[is_read], position[is_read] - ahead)
    is_own = slots.on(rank)
    own_ids = batch.input_ids[is_read][is_own]
    input_ids = torch.full((grid.num_slots,), -1).index_copy(0, slots.slot[is_own], own_ids)
    if grid.layout.is_packed:
        input_ids = input_ids[None]
    else:
        input_ids = input_ids.view(-1, len(grid.lengths)).T

    if "loss_mask" in batch.fields:
        has_loss = batch.fields["loss_mask"] != 0
    else:
        has_loss = torch.ones(num_tokens, dtype=torch.bool)
    predicted = (has_loss & (position > ahead)).nonzero()[:, 0]
    predicting = grid.locate(sequence[predicted], position[predicted] - 1 - ahead)
    return Placement(input_ids, predicted, predicting)


def place_routes(batch: Batch, grid: Grid, rank: int) -> Tensor:
    """Put the experts of each token into its slot on a rank: [b, s, L, k]. See MicroBatch."""
    values = batch.fields[ROUTES]
    sequence = torch.repeat_interleave(torch.arange(len(batch)), batch.cu_seqlens.diff())
    slots = grid.locate(sequence, batch.position_ids)
    is_own = slots.on(rank)
    shape = (grid.num_slots, *values.shape[1:])
    placed = torch.full(shape, no_route(values.dtype), dtype=values.dtype)
    placed[slots.slot[is_own]] = values[is_own]
    if grid.layout.is_packed:
        return placed[None]
    return placed.unflatten(0, (-1, len(grid.lengths))).transpose(0, 1)


# -- tensors --------------------------------------------------------------------------------------


def lay_out(
    batch: Batch,
    layout: Layout,
    group: ProcessGroup,
    device: torch.device,
    make_packing: Callable[[list[int]], Any] | None = None,
    num_ahead: int = 0,
    filler: int = 0,
) -> MicroBatch:
    """Build this rank's part of a micro-batch on the device.

    T may be 0. Then this rank computes a sequence of padding, because other ranks wait for it in
    collectives.

    Args:
        batch: in host memory, the same on all ranks of the group.
        layout: rows, padding and the division over ranks.
        group: the context-parallel ranks that share the micro-batch.
        device: where the tensors go.
        make_packing: lengths of the sequences in a row -> MicroBatch.packing. None: no packing.
        num_ahead: the number of layers of multi-token prediction, see MicroBatch.ahead.
        filler: the length of a padding sequence that is always added; only for a group of one rank.
            0: add one only if it is needed.
    """
    rank = group.rank()
    grid = make_grid(batch.lengths, layout, group.size(), filler)
    placement = place_tokens(batch, grid, rank)
    is_own = placement.slots.on(rank)
    own_targets = placement.predicted[is_own]
    lengths = grid.lengths.tolist()
    row_lengths = lengths if layout.is_packed else lengths[:1]

    def move(tensor: Tensor) -> Tensor:
        return to_device(tensor, device)

    return MicroBatch(
        input_ids=move(placement.input_ids.clamp(min=0)),
        padding=move(placement.input_ids < 0),
        lengths=lengths,
        packing=make_packing(row_lengths) if make_packing else None,
        positions=move(slot_positions(row_lengths, layout, group, device)),
        group=group,
        predicting_slots=move(placement.slots.slot[is_own]),
        targets=move(batch.input_ids[own_targets]),
        candidate_ids=move(batch.candidate_ids[own_targets]),
        predicted_tokens=move(placement.predicted),
        source_slots=move(placement.slots.rank * grid.num_slots + placement.slots.slot),
        fields={
            name: move(values)
            for name, values in batch.fields.items()
            if name not in (*TEACHER_OUTPUTS, ROUTES)
        },
        num_tokens=len(batch.input_ids),
        ahead=[
            lay_out_ahead(batch, place_tokens(batch, grid, rank, k), rank, device)
            for k in range(1, num_ahead + 1)
        ],
        routes=move(place_routes(batch, grid, rank)) if ROUTES in batch.fields else None,
        teacher=TeacherRows.of(batch.fields, own_targets),
    )


def lay_out_ahead(
    batch: Batch, placement: Placement, rank: int, device: torch.device
) -> TokensAhead:
    """Build this rank's tensors for one multi-token-prediction layer, on the device."""
    is_own = placement.slots.on(rank)
    return TokensAhead(
        input_ids=to_device(placement.input_ids, device),
        predicting_slots=to_device(placement.slots.slot[is_own], device),
        targets=to_device(batch.input_ids[placement.predicted[is_own]], device),
    )


def slot_positions(
    row_lengths: list[int], layout: Layout, group: ProcessGroup, device: torch.device
) -> Tensor:
    """Return [s] int64: for each slot of this rank, the position in its sequence."""
    if layout.is_zigzag:
        return Zigzag([0, *accumulate(row_lengths)], group, device).positions
    positions = torch.cat([torch.arange(length) for length in row_lengths])
    return positions.chunk(group.size())[group.rank()]
