"""Sums and recursions over packed sequences: [T] tokens, token t of sequence[t] in 0..n-1.

Functions that take a mask never use what is outside it, not even NaN: the first token of a sequence has no
log-probability. The number of sequences is an argument because sequence.max() would wait for the accelerator, and would
be wrong for a micro-batch, which holds only some of them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Total = Callable[[Tensor], Tensor]  # [T] -> a scalar


def sum_by_sequence(x: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """[n, ...] in x's dtype: the sum of x [T, ...] over the tokens of each sequence (sequence [T] int64); 0 where it has none."""
    return x.new_zeros(num_sequences, *x.shape[1:]).index_add(0, sequence, x)


def mean_by_sequence(x: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """[n] in x's dtype: the mean of x [T] over the masked tokens of each sequence; 0 where it has none.

    mask [T] fp32, 0 or 1; sequence [T] int64
    """
    total = sum_by_sequence(torch.where(mask > 0, x, 0), sequence, num_sequences)
    return total / sum_by_sequence(mask, sequence, num_sequences).clamp(min=1).to(x.dtype)


def log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """[T] fp32: log_probs - old_log_probs, 0 outside the mask."""
    return torch.where(mask > 0, log_probs - old_log_probs, 0)


def bounded_exp(x: Tensor) -> Tensor:
    """exp(x), with x clamped to +-20: beyond that a ratio only says that it is extreme, and fp32 would soon overflow."""
    return x.clamp(-20, 20).exp()


def from_mean(x: Tensor, weight: Tensor, total: Total = Tensor.sum) -> Tensor:
    """[T] float64: x - mean, where each x counts as often as its weight says; 0 where the weight is 0.

    x [T]; weight [T]: a mask, or numbers of tokens; total: a sum over x, and over other ranks if they have a part of it.
    Float64 is for the host: in fp32 the mean of equal numbers is not quite that number.
    """
    times, inside = weight.double(), torch.where(weight > 0, x, 0).double()
    return torch.where(weight > 0, inside - total(inside * times) / total(times).clamp(min=1), 0)


def whiten(x: Tensor, weight: Tensor, total: Total = Tensor.sum) -> Tensor:
    """[T] in x's dtype: from_mean(x) / sqrt(variance + 1e-8), with the unbiased variance. A single token becomes 0, and so do
    tokens that are all equal."""
    times, deviation = weight.double(), from_mean(x, weight, total)
    variance = total(deviation.square() * times) / (total(times) - 1).clamp(min=1)
    return (deviation * (variance + 1e-8).rsqrt()).to(x.dtype)


def tokens_in_order(mask: Tensor, sequence: Tensor) -> Tensor:
    """[number of masked tokens] int64: the positions of the masked tokens, sequence by sequence, each in order."""
    tokens = mask.nonzero()[:, 0]
    of_token = sequence[tokens]
    return tokens if (of_token.diff() >= 0).all() else tokens[of_token.argsort(stable=True)]


def next_in_sequence(x: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """[T]: x of the next masked token in the same sequence; 0 at the last one and outside the mask."""
    tokens = tokens_in_order(mask, sequence)
    here, following = tokens[:-1], tokens[1:]
    same = sequence[here] == sequence[following]
    return x.new_zeros(len(x)).index_copy(0, here[same], x[following[same]])


def sum_to_go(
    x: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int, decay: float
) -> Tensor:
    """[T] in x's dtype: y_t = x_t + decay * y_s, where s is the next masked token in the sequence (y = 0 after the last).

    x [T], mask [T] fp32, sequence [T] int64; 0 outside the mask. All sequences advance together, from their last token. For
    the host.
    """
    tokens = tokens_in_order(mask, sequence)
    of_token = sequence[tokens]
    lengths = torch.bincount(of_token, minlength=num_sequences)
    place = torch.arange(len(tokens)) - (lengths.cumsum(0) - lengths)[of_token]
    # First tokens, then second ones, ..., those of the longest sequence first: the tokens that follow one another are the
    # first of neighbouring slices, and no padding is needed.
    row = lengths.argsort(descending=True).argsort()
    counts = torch.bincount(place)
    at = (counts.cumsum(0) - counts)[place] + row[of_token]
    y = x.new_empty(len(tokens)).index_copy(0, at, x[tokens])
    slices = [
        part.numpy() for part in y.split(counts.tolist())
    ]  # faster than torch where there is little to add
    for here, following in zip(slices[-2::-1], slices[:0:-1]):
        here[: len(following)] += decay * following
    return x.new_zeros(len(x)).index_copy(0, tokens, y[at])
