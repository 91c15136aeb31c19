"""Token weights that turn the aggregation of per-token losses into a plain sum.

Every function takes

    lengths     [n] fp32: the number of tokens of each response that count; 0 if the response is in
                another mini-batch or was rejected
    max_tokens  passed by name: the longest response that rollout.max_tokens allows

and returns [n] fp32: the weight of each token of a response, such that the sum of loss * weight is
the aggregate. So a rank needs the lengths of all responses in the mini-batch, but only its own
tokens. The sums of micro-batches and ranks add up to the same result, however the mini-batch is
divided.
"""

import torch
from torch import Tensor


def token_mean(lengths: Tensor, **_) -> Tensor:
    """The mean over all tokens (DAPO, Yu et al. 2025): 1 / number of tokens."""
    return torch.ones_like(lengths) / lengths.sum().clamp(min=1)


def seq_mean_token_sum(lengths: Tensor, **_) -> Tensor:
    """The mean over responses of the sum over tokens: 1 / number of responses with a token."""
    return torch.ones_like(lengths) / (lengths > 0).sum().clamp(min=1)


def seq_mean_token_mean(lengths: Tensor, **_) -> Tensor:
    """The mean over responses of the mean over tokens (GRPO, Shao et al. 2024).

    1 / number of tokens of the response / number of responses with a token
    """
    return seq_mean_token_sum(lengths) / lengths.clamp(min=1)


def seq_mean_token_sum_norm(lengths: Tensor, *, max_tokens: int, **_) -> Tensor:
    """The mean over responses of the sum over tokens, divided by a constant (Dr. GRPO, Liu et al.
    2025): the weight of a token depends on no response's length.

    1 / max_tokens / number of responses with a token
    """
    return seq_mean_token_sum(lengths) / max_tokens


AGGREGATIONS = {
    "token-mean": token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
    "seq-mean-token-mean": seq_mean_token_mean,
}
