"""Log-probabilities and entropy from the last linear layer, a chunk of tokens at a time.

Only one chunk's logits are in memory at a time: the fp32 logits of 16k tokens with a vocabulary of
152k would take 10 GB. The backward pass recomputes each chunk's logits, which costs one more
product with the output matrix.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# The logit of a token that is not a candidate. Both exp(logit) and logit * exp(logit) are 0; with
# minus infinity, the product would be NaN.
EXCLUDED_LOGIT = -1e30


class LogitTransform(NamedTuple):
    """The steps from the product z = hidden @ weight.T to the softmax.

    With a = scale * z, or a = softcap * tanh(scale * z / softcap) if there is a soft cap, the
    distribution is softmax(a / temperature).
    """

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class LogProbSettings:
    """Settings of linear_log_probs.

    transform    the steps from the products with the output matrix to the softmax
    chunk_size   number of tokens whose logits are in memory at once
    is_compiled  whether torch.compile fuses the passes over a chunk's logits
    group        ranks that divide the vocabulary; None for one rank
    first_token  the rows of this rank's weight belong to tokens first_token, first_token + 1, ...
    """

    transform: LogitTransform = LogitTransform()
    chunk_size: int = 2048
    is_compiled: bool = False
    group: dist.ProcessGroup | None = None
    first_token: int = 0


class ShardStatistics(NamedTuple):
    """Statistics of the logits z of one rank's part of the vocabulary; all [T], fp32.

    The sums are over differences to the largest logit m: if all logits were large, sums of the
    logits themselves would lose precision.

    largest         m
    largest_token   int64, index of m in this part of the vocabulary
    total           sum_v e^(z_v - m)
    weighted_total  sum_v e^(z_v - m) (z_v - m)
    target          z_target, or 0 if the target is in another rank's part
    """

    largest: Tensor
    largest_token: Tensor
    total: Tensor
    weighted_total: Tensor
    target: Tensor


class TokenStatistics(NamedTuple):
    """Results over the whole vocabulary, all [T].

    log_probs  log p(target)
    entropy    -sum_v p_v log p_v
    log_z      log of the sum of the exponentials of all logits
    is_greedy  bool, whether the target is the most likely token
    """

    log_probs: Tensor
    entropy: Tensor
    log_z: Tensor
    is_greedy: Tensor


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    settings: LogProbSettings = LogProbSettings(),
    candidate_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p(target), the entropy, and whether the target is the most likely token.

    Args:
        hidden: [T, h] of a floating dtype, the same on all ranks that divide the vocabulary. Each
            of these ranks computes only its part of the gradient; the caller sums the parts.
        weight: [V, h] of the same dtype, this rank's rows of the output matrix.
        targets: [T] int64, numbered as in the whole vocabulary.
        settings: temperature, chunks and the division of the vocabulary.
        candidate_ids: [T, K] int64; rows with fewer than K tokens are padded with -1. The softmax
            is over these tokens only. None or K = 0: it is over the whole vocabulary.

    Returns:
        log_probs [T] fp32 and entropy [T] fp32 (nats), both differentiable, and is_greedy [T] bool.
    """
    return LinearLogProbs.apply(hidden, weight, targets, settings, candidate_ids)


class LinearLogProbs(torch.autograd.Function):
    """See linear_log_probs."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        settings: LogProbSettings,
        candidate_ids: Tensor | None,
    ):
        targets = targets - settings.first_token
        if candidate_ids is not None:
            candidate_ids = candidate_ids - settings.first_token
        statistics_of = compiled(_statistics) if settings.is_compiled else _statistics
        chunks = []
        for start in range(0, max(1, len(hidden)), settings.chunk_size):
            chunk = slice(start, start + settings.chunk_size)
            logits = chunk_logits(hidden, weight, candidate_ids, chunk)
            chunks.append(statistics_of(logits, targets[chunk], settings.transform))
        statistics = ShardStatistics(*[torch.cat(pieces) for pieces in zip(*chunks)])
        results = _combine(statistics, targets, settings)

        ctx.save_for_backward(
            hidden, weight, targets, results.log_z, results.entropy, candidate_ids
        )
        ctx.settings = settings
        ctx.mark_non_differentiable(results.is_greedy)
        ctx.set_materialize_grads(False)  # a gradient is None if the loss ignores the output
        return results.log_probs, results.entropy, results.is_greedy

    @staticmethod
    def backward(ctx, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _):
        hidden, weight, targets, log_z, entropy, candidate_ids = ctx.saved_tensors
        chunk_size = ctx.settings.chunk_size
        gradient_of = compiled(_logits_grad) if ctx.settings.is_compiled else _logits_grad
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_z)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            # Sum over chunks in fp32: a bf16 sum would soon be too large for a chunk to change it.
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)

        for start in range(0, len(hidden), chunk_size):
            chunk = slice(start, start + chunk_size)
            chunk_grad_entropy = None if grad_entropy is None else grad_entropy[chunk]
            grad_logits = gradient_of(
                chunk_logits(hidden, weight, candidate_ids, chunk),
                targets[chunk],
                log_z[chunk],
                entropy[chunk],
                grad_log_probs[chunk],
                chunk_grad_entropy,
                ctx.settings.transform,
            )
            grad_hidden[chunk] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[chunk]

        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None


def chunk_logits(
    hidden: Tensor, weight: Tensor, candidate_ids: Tensor | None, chunk: slice
) -> Tensor:
    """Return a chunk's products hidden @ weight.T [c, V]; non-candidates get EXCLUDED_LOGIT."""
    logits = hidden[chunk] @ weight.T
    if candidate_ids is None or not candidate_ids.shape[1]:
        return logits
    vocab_size = logits.shape[1]
    candidate_ids = candidate_ids[chunk]
    is_on_rank = (candidate_ids >= 0) & (candidate_ids < vocab_size)
    columns = torch.where(is_on_rank, candidate_ids, vocab_size)
    # The additional last column is for tokens of other ranks, and for -1.
    is_candidate = torch.zeros(len(logits), vocab_size + 1, dtype=torch.bool, device=logits.device)
    is_candidate = is_candidate.scatter_(1, columns, True)[:, :-1]
    return logits.masked_fill(~is_candidate, EXCLUDED_LOGIT)


def transformed(logits: Tensor, transform: LogitTransform) -> Tensor:
    """Return the fp32 input [c, V] of the softmax."""
    temperature, scale, softcap = transform
    z = logits.float() if scale == 1 else logits.float() * scale
    if softcap:
        capped = softcap * torch.tanh(z / softcap)
        z = torch.where(logits > EXCLUDED_LOGIT / 2, capped, EXCLUDED_LOGIT)
    return z if temperature == 1 else z / temperature


def _statistics(logits: Tensor, targets: Tensor, transform: LogitTransform) -> ShardStatistics:
    """Summarize a chunk's logits [c, V]; targets [c] are relative to this rank's first token."""
    z = transformed(logits, transform)
    largest, largest_token = z.max(-1)
    below = z - largest[:, None]
    weights = below.exp()
    is_on_rank = (targets >= 0) & (targets < z.shape[1])
    target = z.gather(-1, targets.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
    total = weights.sum(-1)
    weighted_total = below.mul_(weights).sum(-1)
    return ShardStatistics(
        largest, largest_token, total, weighted_total, torch.where(is_on_rank, target, 0.0)
    )


def _combine(
    statistics: ShardStatistics, targets: Tensor, settings: LogProbSettings
) -> TokenStatistics:
    """Combine the statistics of all ranks that divide the vocabulary.

    targets [T] are relative to this rank's first token.
    """

    def reduce(values: Tensor, operation) -> Tensor:
        if settings.group is not None:
            dist.all_reduce(values, op=operation, group=settings.group)
        return values

    largest, largest_token, total, weighted_total, target = statistics
    highest = reduce(largest.clone(), dist.ReduceOp.MAX)
    below = largest - highest
    factor = below.exp()
    sums = torch.stack([total * factor, (weighted_total + total * below) * factor, target])
    total, weighted_total, target = reduce(sums, dist.ReduceOp.SUM)
    # If logits are equal, the first token counts as the most likely one, as in argmax.
    no_token = torch.iinfo(largest_token.dtype).max
    candidates = torch.where(largest == highest, largest_token + settings.first_token, no_token)
    most_likely = reduce(candidates, dist.ReduceOp.MIN)
    log_z = highest + total.log()
    return TokenStatistics(
        log_probs=target - log_z,
        entropy=total.log() - weighted_total / total,
        log_z=log_z,
        is_greedy=most_likely == targets + settings.first_token,
    )


def _logits_grad(
    logits: Tensor,
    targets: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    transform: LogitTransform,
) -> Tensor:
    """Return the gradient [c, V] of a chunk's logits, in their dtype.

    With z the input of the softmax:
        d log p / d z_v = 1[v = target] - p_v
        d H / d z_v = -p_v (log p_v + H)
    """
    z = transformed(logits, transform)
    log_p = z - log_z[:, None]
    upstream = grad_log_probs[:, None]
    if grad_entropy is not None:
        upstream = upstream + grad_entropy[:, None] * (log_p + entropy[:, None])
    grad = log_p.exp().mul_(-upstream)
    # A comparison instead of a scatter: compiled, this is one pass from logits to gradient, with no
    # fp32 copy of the chunk in between.
    tokens = torch.arange(logits.shape[1], device=logits.device)
    grad = torch.where(tokens == targets[:, None], grad + grad_log_probs[:, None], grad)
    return to_logits_grad(grad, z, transform, logits.dtype)


def to_logits_grad(
    grad: Tensor, z: Tensor, transform: LogitTransform, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the products with the output matrix from that of z [c, V].

    z: the input of the softmax. dtype: the dtype of the products.
    """
    temperature, scale, softcap = transform
    if softcap:
        tanh = (z * (temperature / softcap)).clamp(-1, 1)
        grad = grad * (1 - tanh.square())
    if not temperature == scale == 1:
        grad = grad * (scale / temperature)
    return grad.to(dtype)


@cache
def compiled(function: Callable) -> Callable:
    """Compile a function, which fuses its half-dozen passes over a chunk's logits."""
    return torch.compile(function)
