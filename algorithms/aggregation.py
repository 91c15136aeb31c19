"""From per-token losses to one number: weights that make any aggregate a plain sum.

Every function takes lengths [n] fp32, the number of tokens of each response of the global mini-batch that count (0: the
response is in another mini-batch, or rejected), and by name max_tokens, the longest response that rollout.max_tokens allows.
It returns weights [n] fp32 of a token of each response, such that the sum of loss * weight over these tokens is the
aggregate. So a rank needs the lengths of all responses of the mini-batch and the tokens of its own, and the sums of
micro-batches and ranks add up to the aggregate, however the mini-batch is divided.
"""

import torch
from torch import Tensor


def token_mean(lengths: Tensor, **_) -> Tensor:
    """1 / number of tokens (Yu 2025)"""
    return torch.ones_like(lengths) / lengths.sum().clamp(min=1)


def seq_mean_token_sum(lengths: Tensor, **_) -> Tensor:
    """1 / number of responses with a token"""
    return torch.ones_like(lengths) / (lengths > 0).sum().clamp(min=1)


def seq_mean_token_mean(lengths: Tensor, **_) -> Tensor:
    """1 / number of tokens of its response / number of responses with one (Shao 2024)"""
    return seq_mean_token_sum(lengths) / lengths.clamp(min=1)


def seq_mean_token_sum_norm(lengths: Tensor, *, max_tokens: int, **_) -> Tensor:
    """1 / max_tokens / number of responses with a token: a constant divisor, so that the weight of a token depends on no
    response's length (Dr. GRPO, Liu 2025)"""
    return seq_mean_token_sum(lengths) / max_tokens


AGGREGATIONS = {
    "token-mean": token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
    "seq-mean-token-mean": seq_mean_token_mean,
}
