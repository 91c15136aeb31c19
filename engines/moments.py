"""How an optimizer's moments are stored: fp32, bfloat16, or 8 bits with a scale per block.

A block is up to 256 neighbours in a row of a parameter. Its 8-bit codes stand for numbers between
-1 and 1, which are multiplied by the block's scale. A block never spans two rows, so a parameter
that is sharded by rows keeps its blocks, and a checkpoint can be loaded on another number of ranks.

The values of the codes are spaced as in dynamic quantization (Dettmers et al. 2022, 8-bit
Optimizers via Block-wise Quantization): each decade below the largest number of a block, down to
less than a millionth of it, has half as many values as the one above. Adam's second moment is
stored as its square root, which covers as many orders of magnitude as the first moment. Otherwise
the second moment of a small gradient would round to zero while the first one does not, and an
update divides the first moment by that root.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
NUM_DECADES = 7


def num_blocks(width: int) -> int:
    """Return the number of blocks in a row."""
    return math.ceil(width / BLOCK)


class Codes(NamedTuple):
    """A set of 256 codes.

    values   [256] fp32, ascending: the number between -1 and 1 that each code stands for
    signed   whether there are negative ones
    """

    values: Tensor
    signed: bool


class CodesOfMoments(NamedTuple):
    first: Codes
    second: Codes


@cache
def codes_of_moments(device: torch.device) -> CodesOfMoments:
    """Return the codes of Adam's first moment, and of its second moment's square root."""
    return CodesOfMoments(make_codes(True, device), make_codes(False, device))


def make_codes(signed: bool, device: torch.device) -> Codes:
    """Return codes on a device.

    Each decade has twice as many values as the one below it. A decade is divided into equal parts,
    with a value in the middle of each. Zero and one are added. Among negative values, minus one
    replaces the one nearest to zero, since the largest number of a block may be negative.
    """
    magnitudes = []
    for decade in range(NUM_DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        bounds = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        middles = (bounds[:-1] + bounds[1:]) / 2
        magnitudes += (middles * 10.0 ** (decade + 1 - NUM_DECADES)).tolist()
    values = [0.0, 1.0, *magnitudes]
    if signed:
        values += [-1.0, *(-x for x in magnitudes[1:])]
    return Codes(torch.tensor(sorted(values), dtype=torch.float32, device=device), signed)


def to_blocks(rows: Tensor) -> Tensor:
    """Return rows [R, C] as blocks [R, B, 256]; the last block of each row is padded with zeros."""
    num_rows, width = rows.shape
    padded = F.pad(rows, (0, num_blocks(width) * BLOCK - width))
    return padded.view(num_rows, -1, BLOCK)


def decode(stored: Tensor, scale: Tensor, codes: Codes) -> Tensor:
    """Return the numbers [R, C] fp32 of codes [R, C] uint8 with a scale per block [R, B]."""
    blocks = codes.values[to_blocks(stored).int()] * scale[:, :, None]
    return blocks.flatten(1)[:, : stored.shape[1]]


def encode(x: Tensor, codes: Codes, bits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the codes [R, C] uint8 of numbers [R, C] fp32, and the scale per block [R, B] fp32.

    With unsigned codes, positive numbers never become zero, since the update divides by them.

    Args:
        bits: [R, C] random numbers below 2**16 for stochastic rounding; None rounds to the nearest.
    """
    values = codes.values
    blocks = to_blocks(x)
    scale = blocks.abs().amax(-1)
    safe_scale = torch.where(scale > 0, scale, 1.0)
    fractions = blocks / safe_scale[:, :, None]
    below = torch.bucketize(fractions, values, right=True) - 1
    below = below.clamp(0, len(values) - 2)
    low = values[below]
    share = (fractions - low) / (values[below + 1] - low)
    threshold = 0.5 if bits is None else to_blocks(bits).float() / 2**16
    stored = below + (share > threshold)
    if not codes.signed:
        stored = torch.where(fractions > 0, stored.clamp(min=1), stored)
    return stored.to(torch.uint8).flatten(1)[:, : x.shape[1]].contiguous(), scale
