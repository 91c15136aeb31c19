"""A batch: sequences of tokens laid end to end, with a value per token in every field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from data.images.processor import ImageStore


@dataclass
class Batch:
    """n sequences laid end to end, T tokens in total, in host memory.

    Attributes:
        input_ids: [T] int64.
        cu_seqlens: [n+1] int64; sequence i is cu_seqlens[i]:cu_seqlens[i+1].
        fields: name -> [T]; entry t belongs to token t. For example loss_mask, old_log_probs and
            advantages. candidate_ids is [T, K] int32: see the property of that name.
            routed_experts is [T, L, k]: see engines/model/routes.py.
        rows: [n] int64, the row of `image_store` that holds each sequence's images.
        image_store: the images of the whole dataset; batches that are concatenated must have the
            same one. None for a text model.
    """

    input_ids: Tensor
    cu_seqlens: Tensor
    fields: dict[str, Tensor] = field(default_factory=dict)
    rows: Tensor | None = None
    image_store: ImageStore | None = None

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> list[int]:
        return self.cu_seqlens.diff().tolist()

    @property
    def position_ids(self) -> Tensor:
        """[T] int64: the position of every token in its own sequence, from 0."""
        starts = torch.repeat_interleave(self.cu_seqlens[:-1], self.cu_seqlens.diff())
        return torch.arange(len(self.input_ids)) - starts

    @property
    def candidate_ids(self) -> Tensor:
        """[T, K] int64: the token ids that each token was sampled from (rollout.top_k).

        Padded with -1 where there are fewer than K. K = 0 means the full vocabulary.
        """
        return self.fields.get("candidate_ids", torch.empty(len(self.input_ids), 0)).long()

    @property
    def images(self) -> list[np.ndarray]:
        """The images of all sequences, in order: uint8 [height, width, 3] each."""
        if not self.image_store:
            return []
        return [image for row in self.rows.tolist() for image in self.image_store.images[row]]

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Concatenate batches, which must have the same fields."""
        first = batches[0]
        lengths = torch.cat([batch.cu_seqlens.diff() for batch in batches])
        fields = {}
        for name in first.fields:
            fields[name] = torch.cat([batch.fields[name] for batch in batches])
        rows = torch.cat([batch.rows for batch in batches]) if first.image_store else None
        input_ids = torch.cat([batch.input_ids for batch in batches])
        return Batch(input_ids, make_cu_seqlens(lengths), fields, rows, first.image_store)

    def select(self, indices: Sequence[int] | Tensor) -> Batch:
        """Return the sequences at these indices, in this order."""
        indices = torch.as_tensor(indices, dtype=torch.int64)
        lengths = self.cu_seqlens.diff()[indices]
        cu_seqlens = make_cu_seqlens(lengths)
        offsets = self.cu_seqlens[indices] - cu_seqlens[:-1]
        offset_of_token = torch.repeat_interleave(offsets, lengths)
        tokens = torch.arange(int(cu_seqlens[-1])) + offset_of_token
        fields = {name: values[tokens] for name, values in self.fields.items()}
        rows = self.rows[indices] if self.image_store else None
        return Batch(self.input_ids[tokens], cu_seqlens, fields, rows, self.image_store)

    def split(self, counts: list[int]) -> list[Batch]:
        """Return the first counts[0] sequences, the next counts[1], and so on.

        The parts are views that share their memory with this batch.
        """
        lengths = self.cu_seqlens.diff().split(counts)
        num_tokens = [int(part.sum()) for part in lengths]
        input_ids = self.input_ids.split(num_tokens)
        fields = {name: values.split(num_tokens) for name, values in self.fields.items()}
        rows = self.rows.split(counts) if self.image_store else [None] * len(counts)
        parts = []
        for i in range(len(counts)):
            own_fields = {name: values[i] for name, values in fields.items()}
            part = Batch(
                input_ids[i], make_cu_seqlens(lengths[i]), own_fields, rows[i], self.image_store
            )
            parts.append(part)
        return parts


def make_cu_seqlens(lengths: Tensor) -> Tensor:
    """Return cu_seqlens of n sequences with these lengths: [n+1] int64."""
    return torch.cat([lengths.new_zeros(1), lengths]).cumsum(0)
