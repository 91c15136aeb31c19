"""Stochastic rounding: up or down at random, so that the expected result is the exact number.

A number x between two neighbouring numbers a < b of a dtype becomes b with probability
(x - a) / (b - a), and a otherwise (Gupta et al. 2015, Deep Learning with Limited Numerical
Precision). Rounding to nearest loses every update smaller than half the distance b - a. Stochastic
rounding keeps such an update with a probability that is proportional to its size.

The random bits of an element depend on trainer.seed, the step, the parameter and the element's
position in the whole parameter, and on nothing else. So a resumed run draws the same bits, the
number of ranks that share a parameter does not matter, and copies of a parameter stay equal.
"""

import hashlib

import torch
from torch import Tensor

LOW_16 = 0xFFFF
# As a signed 32-bit number: a mask of the upper 16 bits, which hold a bfloat16 number.
HIGH_16 = -(2**16)
# Odd factors that mix bits well, as signed 32-bit numbers (lowbias32 by C. Wellons).
FACTORS = (0x7FEB352D, 0x846CA68B - 2**32)


def noise_key(seed: int, step: int, *names: str | int) -> tuple[int, int]:
    """Return two numbers of 32 bits that differ for each combination of arguments."""
    text = repr((seed, step, *names))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def random_bits(key: Tensor, first: Tensor, like: Tensor) -> Tensor:
    """Return 32 random bits for each element of a chunk.

    Args:
        key: [2] int64, the numbers of noise_key().
        first: int64, the position of the chunk's first element in the whole parameter.
        like: a contiguous chunk of the parameter; its shape and device are used.

    Returns:
        int32 numbers, in the chunk's shape.
    """
    positions = torch.arange(like.numel(), device=like.device) + first
    first_key, second_key = key.to(torch.int32).unbind()
    bits = mix(positions.to(torch.int32) ^ first_key)
    return mix(bits ^ second_key).view(like.shape)


def mix(x: Tensor) -> Tensor:
    """Map 32-bit numbers one to one to numbers that look random. Products wrap around."""
    x = x ^ upper_bits(x, 16)
    x = x * FACTORS[0]
    x = x ^ upper_bits(x, 15)
    x = x * FACTORS[1]
    return x ^ upper_bits(x, 16)


def upper_bits(x: Tensor, shift: int) -> Tensor:
    """Return x >> shift with zeros shifted in from the left, also for negative numbers."""
    return (x >> shift) & (2 ** (32 - shift) - 1)


def to_bfloat16(x: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 numbers stochastically. Infinities and NaN are kept.

    Args:
        x: fp32.
        bits: random numbers below 2**16, in the shape of x.
    """
    # A bfloat16 number is the upper half of an fp32 number. The sum carries into the upper half
    # with probability (lower half) / 2**16.
    rounded = (x.view(torch.int32) + bits.to(torch.int32)) & HIGH_16
    return torch.where(x.isfinite(), rounded.view(torch.float32), x).to(torch.bfloat16)
