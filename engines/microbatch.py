"""A micro-batch as a rank sees it: padded, its share of the tokens, and the way back from places to tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from data.batching.packing import Batch
from engines.parallel.collectives import AllGather
from engines.parallel.device import to_device
from engines.parallel.varlen import Zigzag


@dataclass
class Ahead:
    """What k places further on stands in the same sequence.

    input_ids  [b, s] int64: the token k places behind each place; -1 behind the end of its sequence, and for its first place, where
               vLLM's drafters see no token either
    place      [own] int64: into the [s * b] places, what is k + 1 places before an asked token
    targets    [own] int64: that token
    """

    input_ids: Tensor
    place: Tensor
    targets: Tensor


@dataclass
class MicroBatch:
    """T tokens, of which k are asked about. This rank has `size` places, padding included, and answers some of the k.

    input_ids  [b, s] int64: this rank's share; packed: b = 1, all sequences in one row
    padding    [b, s] bool: where there is no token
    lengths    of the sequences, padding included; the last one may be padding alone
    packing    where the sequences lie, as the engine's attention reads it; None for plain attention in padded rows
    positions  [s] int64: the place of each token in its sequence, padding included
    group      the context-parallel ranks that share the micro-batch
    place      [own] int64: into the [s * b] places of the hidden states [s, b, h], what precedes an asked token
    targets    [own] int64: the token that follows each
    kept_words [own, K] int64: the words that it was drawn from, see Batch
    token      [k] int64: into the T tokens, those asked about
    source     [k] int64: into the [ranks * size] places of all context-parallel ranks, the answer of each
    fields     name -> [T]
    ahead      for each k from 1 on, as multi-token prediction needs it
    given      of a model of images, what it is given instead of input_ids
    """

    input_ids: Tensor
    padding: Tensor
    lengths: list[int]
    packing: Any
    positions: Tensor
    group: ProcessGroup
    place: Tensor
    targets: Tensor
    kept_words: Tensor
    token: Tensor
    source: Tensor
    fields: dict[str, Tensor]
    num_tokens: int
    ahead: list["Ahead"]
    given: dict[str, Tensor] = field(default_factory=dict)

    def to_tokens(self, answers: Tensor) -> Tensor:
        """[own] of this rank -> [T], 0 where nothing was asked; the same on all ranks of the context-parallel group."""
        if self.group.size() > 1:
            places = answers.new_zeros(self.input_ids.numel()).index_copy(0, self.place, answers)
            answers = AllGather.apply(places, self.group).index_select(0, self.source)
        return answers.new_zeros(self.num_tokens).index_copy(0, self.token, answers)


def lay_out(
    batch: Batch,
    packed: bool,
    packing_of: Callable[[list[int]], Any] | None,
    group: ProcessGroup,
    device: torch.device,
    multiple: int = 1,
    zigzag: bool = False,
    num_ahead: int = 0,
    filler: int = 0,
) -> MicroBatch:
    """A batch in host memory, divided over the context-parallel group. T may be 0: a sequence of padding takes part in
    the collectives that other ranks wait for. filler: the length of such a sequence, if there has to be one; for a group of one.

    packed: in one row; else each sequence in a row, padded to one length. packing_of: the lengths of what is in a row ->
    MicroBatch.packing. multiple: that of every sequence's length. Of the tokens of all sequences rank r has the r-th part; zigzag:
    of each sequence's 2 * ranks chunks the r-th from both ends. num_ahead: for how many k there is MicroBatch.ahead.
    """
    cp, rank, num_tokens = group.size(), group.rank(), len(batch.input_ids)
    padded = [-(-n // multiple) * multiple for n in batch.lengths]
    missing = filler or (-sum(padded) % cp if padded else max(multiple, cp))
    padded = torch.tensor(padded + [missing] * (missing > 0))
    if not packed:
        padded = padded.max().expand(len(padded))
    chunk, starts, size = padded // (2 * cp), padded.cumsum(0) - padded, int(padded.sum()) // cp

    def locate(row: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """(rank, place there) of the tokens at these positions of these sequences"""
        owner, local, start = torch.zeros_like(row), position, starts[row]
        if cp > 1 and zigzag:
            part = position // chunk[row]
            owner = torch.where(part < cp, part, 2 * cp - 1 - part)
            local, start = position % chunk[row] + (part >= cp) * chunk[row], start // cp
        elif cp > 1:
            owner, local, start = (start + position) // size, (start + position) % size, 0
        return owner, start + local if packed else local * len(padded) + row

    row = torch.repeat_interleave(torch.arange(len(batch)), batch.cu_seqlens.diff())
    position = batch.position_ids
    asked = (
        batch.fields["loss_mask"] != 0
        if "loss_mask" in batch.fields
        else torch.ones(num_tokens, dtype=torch.bool)
    )

    def behind(k: int) -> tuple[Tensor, ...]:
        """[b, s]: the token k places behind each place, -1 where there is none; and of tokens that are asked about, and have more
        than k before them: which of the T, and the rank and place there k + 1 places before."""
        there = position >= k + (k > 0)
        owner, place = locate(row[there], position[there] - k)
        mine, token = (
            owner == rank,
            (asked & (position > k)).nonzero()[:, 0],
        )  # nothing predicts a first token
        ids = torch.full((size,), -1).index_copy(0, place[mine], batch.input_ids[there][mine])
        return (
            ids[None] if packed else ids.view(-1, len(padded)).T,
            token,
            *locate(row[token], position[token] - 1 - k),
        )

    ids, token, owner, place = behind(0)
    mine, ahead = owner == rank, []
    on_device = {
        name: to_device(x, device)
        for name, x in dict(
            input_ids=ids.clamp(min=0),
            padding=ids < 0,
            place=place[mine],
            targets=batch.input_ids[token[mine]],
            kept_words=batch.kept_words[token[mine]],
            token=token,
            source=owner * size + place,
        ).items()
    }
    for k in range(1, num_ahead + 1):
        ids, token, owner, place = behind(k)
        of_mine = ids, place[owner == rank], batch.input_ids[token[owner == rank]]
        ahead.append(Ahead(*(to_device(x, device) for x in of_mine)))
    lengths = padded.tolist()
    in_row = lengths if packed else lengths[:1]
    if zigzag:
        positions = Zigzag([0, *accumulate(in_row)], group, device).positions
    else:
        positions = torch.cat([torch.arange(n) for n in in_row]).chunk(cp)[rank]
    return MicroBatch(
        lengths=lengths,
        packing=packing_of(in_row) if packing_of else None,
        num_tokens=num_tokens,
        ahead=ahead,
        positions=to_device(positions, device),
        group=group,
        fields={name: to_device(values, device) for name, values in batch.fields.items()},
        **on_device,
    )
