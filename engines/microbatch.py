"""A micro-batch as a rank sees it: padded, its share of the tokens, and the way back from places to tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.packing import Batch
from engines.collectives import AllGather
from engines.device import to_device


@dataclass
class MicroBatch:
    """T tokens, of which k are asked about. This rank has `size` places, padding included, and answers some of the k.

    input_ids  [b, s] int64: this rank's share; packed: b = 1, all sequences in one row
    padding    [b, s] bool: where there is no token
    lengths    of the sequences, padding included; the last one may be padding alone
    packing    where the sequences lie, as the engine's attention reads it; None when they are padded to one length
    place      [own] int64: into the [s * b] places of the hidden states [s, b, h], what precedes an asked token
    targets    [own] int64: the token that follows each
    kept_words [own, K] int64: the words that it was drawn from, see Batch
    token      [k] int64: into the T tokens, those asked about
    source     [k] int64: into the [ranks * size] places of all context-parallel ranks, the answer of each
    fields     name -> [T]
    """

    input_ids: Tensor
    padding: Tensor
    lengths: list[int]
    packing: Any
    place: Tensor
    targets: Tensor
    kept_words: Tensor
    token: Tensor
    source: Tensor
    fields: dict[str, Tensor]
    num_tokens: int

    def to_tokens(self, answers: Tensor, group) -> Tensor:
        """[own] of this rank -> [T], 0 where nothing was asked; the same on all ranks of the context-parallel group."""
        if group.size() > 1:
            places = answers.new_zeros(self.input_ids.numel()).index_copy(0, self.place, answers)
            answers = AllGather.apply(places, group).index_select(0, self.source)
        return answers.new_zeros(self.num_tokens).index_copy(0, self.token, answers)


def lay_out(batch: Batch, packing_of: Callable[[list[int]], Any] | None, group, device: torch.device, multiple: int = 1,
            zigzag: bool = False) -> MicroBatch:
    """A batch in host memory, divided over the context-parallel group. T may be 0: a sequence of padding takes part in
    the collectives that other ranks wait for.

    packing_of: MicroBatch.lengths -> its packing; None: pad to one length. multiple: that of every sequence's length. Of the
    tokens of all sequences rank r has the r-th part; zigzag: of each sequence's 2 * ranks chunks the r-th from both ends.
    """
    cp, rank, num_tokens, packed = group.size(), group.rank(), len(batch.input_ids), packing_of is not None
    padded = [-(-n // multiple) * multiple for n in batch.lengths]
    missing = -sum(padded) % cp if padded else max(multiple, cp)
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
    owner, place = locate(row, position)
    ids = torch.zeros(size, dtype=torch.int64).index_copy(0, place[owner == rank], batch.input_ids[owner == rank])
    padding = torch.ones(size, dtype=torch.bool).index_fill(0, place[owner == rank], False)
    ids, padding = (x[None] if packed else x.view(-1, len(padded)).T for x in (ids, padding))

    asked = batch.fields["loss_mask"] != 0 if "loss_mask" in batch.fields else torch.ones(num_tokens, dtype=torch.bool)
    token = (asked & (position > 0)).nonzero()[:, 0]                  # the first token of a sequence is not predicted
    owner, place = locate(row[token], position[token] - 1)
    on_device = {name: to_device(x, device) for name, x in dict(
        input_ids=ids, padding=padding, place=place[owner == rank], targets=batch.input_ids[token][owner == rank],
        kept_words=batch.kept_words[token][owner == rank], token=token, source=owner * size + place).items()}
    lengths = padded.tolist()
    return MicroBatch(lengths=lengths, packing=packing_of(lengths) if packed else None, num_tokens=num_tokens,
                      fields={name: to_device(values, device) for name, values in batch.fields.items()}, **on_device)
