"""From per-token losses to one number: weights that make any aggregate a plain sum.

Every function takes mask [T] fp32, sequence [T] int64, num_sequences and by name max_tokens, the longest response that
rollout.max_tokens allows, and returns weights [T] fp32 such that
sum(loss * weights) is the aggregate; an empty mask has weights of 0. Call it with the whole global mini-batch, of all
data-parallel ranks, and select each micro-batch's part of the weights: the sums of the parts add up to the aggregate,
however the mini-batch is divided. Weights computed from a micro-batch would not.
"""

from torch import Tensor

from algorithms.packed import sum_by_sequence


def token_mean(mask: Tensor, sequence: Tensor, num_sequences: int, **_) -> Tensor:
    """mask / number of masked tokens (Yu 2025)"""
    return mask / mask.sum().clamp(min=1)


def seq_mean_token_sum(mask: Tensor, sequence: Tensor, num_sequences: int, **_) -> Tensor:
    """mask / number of sequences with a masked token"""
    counts = sum_by_sequence(mask, sequence, num_sequences)
    return mask / (counts > 0).sum().clamp(min=1)


def seq_mean_token_mean(mask: Tensor, sequence: Tensor, num_sequences: int, **_) -> Tensor:
    """mask / number of masked tokens in its sequence / number of sequences with one (Shao 2024)"""
    counts = sum_by_sequence(mask, sequence, num_sequences)
    return mask / (counts > 0).sum().clamp(min=1) / counts.clamp(min=1)[sequence]


def seq_mean_token_sum_norm(mask: Tensor, sequence: Tensor, num_sequences: int, *, max_tokens: int, **_) -> Tensor:
    """mask / max_tokens / number of sequences with a masked token: a constant divisor, so that the weight of a token depends
    on no response's length (Dr. GRPO, Liu 2025)"""
    return seq_mean_token_sum(mask, sequence, num_sequences) / max_tokens


AGGREGATIONS = {"token-mean": token_mean, "seq-mean-token-sum": seq_mean_token_sum,
                "seq-mean-token-sum-norm": seq_mean_token_sum_norm, "seq-mean-token-mean": seq_mean_token_mean}
