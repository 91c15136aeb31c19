"""Sums and recursions over packed sequences: token t of T belongs to sequence[t] in 0..n-1.

Functions that take a mask never read a value outside it, not even a NaN: the first token of a
sequence has no log-probability. The number of sequences is an argument because `sequence.max()`
would wait for the accelerator, and would be wrong for a micro-batch, which holds only some of them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Total = Callable[[Tensor], Tensor]  # [T] -> a scalar
MAX_LOG_RATIO = 20.0  # larger ratios carry no more information, and fp32 soon overflows


def sum_by_sequence(x: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Sum x over the tokens of each sequence.

    Args:
        x: [T, ...].
        sequence: [T] int64.

    Returns:
        [n, ...] in x's dtype; 0 for a sequence without tokens.
    """
    return x.new_zeros(num_sequences, *x.shape[1:]).index_add(0, sequence, x)


def mean_by_sequence(x: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Average x over the masked tokens of each sequence.

    Args:
        x: [T].
        mask: [T] fp32, 0 or 1.
        sequence: [T] int64.

    Returns:
        [n] in x's dtype; 0 for a sequence without masked tokens.
    """
    total = sum_by_sequence(torch.where(mask > 0, x, 0), sequence, num_sequences)
    num_tokens = sum_by_sequence(mask, sequence, num_sequences).clamp(min=1)
    return total / num_tokens.to(x.dtype)


def log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return log_probs - old_log_probs, [T] fp32, and 0 outside the mask."""
    return torch.where(mask > 0, log_probs - old_log_probs, 0)


def bounded_exp(x: Tensor) -> Tensor:
    """Return exp(x) with x clamped to +-MAX_LOG_RATIO."""
    return x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def center(x: Tensor, weight: Tensor, total: Total = Tensor.sum) -> Tensor:
    """Subtract the weighted mean from x. For the host.

    Computed in float64: in fp32 the mean of equal numbers is not quite that number.

    Args:
        x: [T].
        weight: [T], how often each x counts: a mask, or numbers of tokens.
        total: sums over [T] and, if ranks divide x, over ranks.

    Returns:
        [T] float64; 0 where the weight is 0.
    """
    counts = weight.double()
    inside = torch.where(weight > 0, x, 0).double()
    mean = total(inside * counts) / total(counts).clamp(min=1)
    return torch.where(weight > 0, inside - mean, 0)


def whiten(x: Tensor, weight: Tensor, total: Total = Tensor.sum) -> Tensor:
    """Shift and scale x to mean 0 and variance 1. For the host.

    The variance is the unbiased one: deviation / sqrt(variance + 1e-8). A single token becomes 0,
    and so do tokens that are all equal. Arguments as for `center`.

    Returns:
        [T] in x's dtype.
    """
    counts = weight.double()
    deviation = center(x, weight, total)
    variance = total(deviation.square() * counts) / (total(counts) - 1).clamp(min=1)
    return (deviation * (variance + 1e-8).rsqrt()).to(x.dtype)


def tokens_in_order(mask: Tensor, sequence: Tensor) -> Tensor:
    """Return the positions of the masked tokens, sequence by sequence, each in order (int64)."""
    tokens = mask.nonzero()[:, 0]
    sequence_of_token = sequence[tokens]
    is_sorted = (sequence_of_token.diff() >= 0).all()
    return tokens if is_sorted else tokens[sequence_of_token.argsort(stable=True)]


def next_in_sequence(x: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """Shift x by one masked token: [T], x of the next masked token in the same sequence.

    0 at the last masked token of a sequence, and outside the mask.
    """
    tokens = tokens_in_order(mask, sequence)
    current = tokens[:-1]
    following = tokens[1:]
    is_same_sequence = sequence[current] == sequence[following]
    following_values = x[following[is_same_sequence]]
    return x.new_zeros(len(x)).index_copy(0, current[is_same_sequence], following_values)


def sum_to_go(
    x: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int, decay: float
) -> Tensor:
    """Return the discounted sum of x from each token to the end of its sequence. For the host.

    y_t = x_t + decay * y_s, where s is the next masked token; y = 0 after the last one.

    All sequences advance together, from their last token. The masked tokens are laid out by their
    position, one slice for each: the first tokens of all sequences, then the second ones, and so
    on. In each slice, longer sequences come first. So the entries of a slice are the successors of
    as many entries at the beginning of the slice before it, and no padding is needed.

    Args:
        x: [T].
        mask: [T] fp32.
        sequence: [T] int64.

    Returns:
        [T] in x's dtype; 0 outside the mask.
    """
    tokens = tokens_in_order(mask, sequence)
    sequence_of_token = sequence[tokens]
    lengths = torch.bincount(sequence_of_token, minlength=num_sequences)
    starts = lengths.cumsum(0) - lengths
    position = torch.arange(len(tokens)) - starts[sequence_of_token]
    rank_by_length = lengths.argsort(descending=True).argsort()
    num_at_position = torch.bincount(position)
    slice_starts = num_at_position.cumsum(0) - num_at_position
    place = slice_starts[position] + rank_by_length[sequence_of_token]
    y = x.new_empty(len(tokens)).index_copy(0, place, x[tokens])
    # numpy is faster than torch for small sums. The slices share y's memory.
    slices = [part.numpy() for part in y.split(num_at_position.tolist())]
    for current, following in zip(slices[-2::-1], slices[:0:-1]):
        current[: len(following)] += decay * following
    return x.new_zeros(len(x)).index_copy(0, tokens, y[place])
