"""Packed sequences in recurrent layers."""

import torch
from torch import Tensor, nn

from engines.fsdp.recurrence import StateResets


def running_sums(hidden: Tensor) -> Tensor:
    """Carry a state along each row, as a recurrent layer does: [rows, T, h]."""
    return hidden.cumsum(1)


def test_every_sequence_begins_anew_and_stays_in_its_place():
    """The first and the third sequence have similar lengths, and run together."""
    lengths = [9, 3, 10]
    resets = StateResets(nn.Module())
    resets.offsets = [0, 9, 12, 22]
    hidden = torch.randn(1, sum(lengths), 2)
    expected = torch.cat([running_sums(part) for part in hidden.split(lengths, 1)], 1)
    torch.testing.assert_close(resets.by_sequence(running_sums, hidden), expected)
