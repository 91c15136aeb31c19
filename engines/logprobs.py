"""Final linear layer -> log-probability and entropy, a chunk of tokens at a time.

The logits of all tokens never exist together, nor in fp32 beyond one chunk: at 16k tokens and 152k words they would take
10 GB. Backward computes each chunk's logits again, which costs one more product with the output matrix.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

LEFT_OUT = -1e30  # a logit; its exponential is 0, its product with 0 is


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk_size: int = 2048,
    compiled: bool = False,
    group: dist.ProcessGroup | None = None,
    first_word: int = 0,
    kept_words: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), entropy and whether the target is the likeliest word, under softmax(z / temperature) of the logits
    z = scale * hidden @ weight.T or, with a soft cap c, c * tanh(scale * hidden @ weight.T / c).

    hidden  [T, h], weight [V, h] of one floating dtype; targets [T] int64
    kept_words  [T, K] int64, -1 where a token has fewer: the softmax is over these words alone (None or K = 0: over all)
    group   ranks that divide the vocabulary: weight holds the rows first_word, first_word + 1, ...; hidden and targets
            are the same on all of them. The gradient of hidden is then this rank's part: the caller adds up all ranks' parts
    returns log_probs [T] fp32, entropy [T] fp32 (nats), both differentiable, and greedy [T] bool
    """
    return LinearLogProbs.apply(
        hidden,
        weight,
        targets,
        temperature,
        chunk_size,
        compiled,
        group,
        first_word,
        kept_words,
        scale,
        softcap,
    )


class LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        targets,
        temperature,
        chunk_size,
        compiled,
        group,
        first_word,
        kept_words,
        scale,
        softcap,
    ):
        targets = targets - first_word
        kept_words = None if kept_words is None else kept_words - first_word
        statistics = _compiled(_statistics) if compiled else _statistics
        chunks = [
            slice(start, start + chunk_size) for start in range(0, max(1, len(hidden)), chunk_size)
        ]
        constants = temperature, scale, softcap
        outputs = [
            statistics(logits(hidden, weight, kept_words, chunk), targets[chunk], *constants)
            for chunk in chunks
        ]
        log_probs, entropy, log_z, greedy = _combine(
            *map(torch.cat, zip(*outputs)), targets, group, first_word
        )
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy, kept_words)
        ctx.constants, ctx.chunk_size, ctx.compiled = constants, chunk_size, compiled
        ctx.mark_non_differentiable(greedy)
        ctx.set_materialize_grads(False)  # None means that the loss does not use the entropy
        return log_probs, entropy, greedy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy, _):
        hidden, weight, targets, log_z, entropy, kept_words = ctx.saved_tensors
        logits_grad = _compiled(_logits_grad) if ctx.compiled else _logits_grad
        grad_log_probs = torch.zeros_like(log_z) if grad_log_probs is None else grad_log_probs
        grad_hidden = torch.empty_like(hidden)
        # Summed over chunks in fp32: bf16 would round the sum away, one chunk after another.
        grad_weight = (
            torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        )
        for start in range(0, len(hidden), ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            grad = logits_grad(
                logits(hidden, weight, kept_words, part),
                targets[part],
                log_z[part],
                entropy[part],
                grad_log_probs[part],
                None if grad_entropy is None else grad_entropy[part],
                *ctx.constants,
            )
            grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[part]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            *[None] * 9,
        )


def logits(hidden: Tensor, weight: Tensor, kept_words: Tensor | None, chunk: slice) -> Tensor:
    """[c, V] of a chunk; of words that were not kept so low that their probability is 0, and yet no infinity times 0 arises."""
    z = hidden[chunk] @ weight.T
    if kept_words is None or not kept_words.shape[1]:
        return z
    words = torch.where(
        (kept_words[chunk] >= 0) & (kept_words[chunk] < z.shape[1]), kept_words[chunk], z.shape[1]
    )
    kept = torch.zeros(len(z), z.shape[1] + 1, dtype=torch.bool, device=z.device).scatter_(
        1, words, True
    )
    return z.masked_fill(~kept[:, :-1], LEFT_OUT)


def _scaled(logits: Tensor, temperature: float, scale: float, softcap: float | None) -> Tensor:
    """[c, V] -> what the softmax is of, fp32"""
    z = logits.float() if scale == 1 else logits.float() * scale
    if softcap:
        z = torch.where(logits > LEFT_OUT / 2, softcap * torch.tanh(z / softcap), LEFT_OUT)
    return z if temperature == 1 else z / temperature


def _statistics(
    logits: Tensor, targets: Tensor, temperature: float, scale: float, softcap: float | None
) -> tuple[Tensor, ...]:
    """[c, V] -> what _combine needs of this rank's words, each [c]: the largest logit m and its word, sum_v e^(z_v - m),
    sum_v e^(z_v - m) (z_v - m), and z_target (0 where the target is another rank's word).

    Relative to m, because sums of z_v would lose the digits of an offset that all logits have in common.
    """
    z = _scaled(logits, temperature, scale, softcap)
    largest, word = z.max(-1)
    below = z - largest[:, None]
    weights = below.exp()
    mine = (targets >= 0) & (targets < z.shape[1])
    chosen = z.gather(-1, targets.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
    return (
        largest,
        word,
        weights.sum(-1),
        below.mul_(weights).sum(-1),
        torch.where(mine, chosen, 0.0),
    )


def _combine(
    largest: Tensor,
    word: Tensor,
    total: Tensor,
    total_below: Tensor,
    chosen: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None,
    first_word: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What all ranks (group None: this one) have of the statistics -> log p(target), H = -sum_v p_v log p_v, log Z, target is
    the argmax, each [T]; targets count from first_word."""

    def over_ranks(x: Tensor, operation) -> Tensor:
        if group is not None:
            dist.all_reduce(x, op=operation, group=group)
        return x

    highest = over_ranks(largest.clone(), dist.ReduceOp.MAX)
    below = largest - highest
    scale = below.exp()
    total, total_below, chosen = over_ranks(
        torch.stack([total * scale, (total_below + total * below) * scale, chosen]),
        dist.ReduceOp.SUM,
    )
    # Of equal logits the first counts, as in argmax.
    likeliest = over_ranks(
        torch.where(largest == highest, word + first_word, torch.iinfo(word.dtype).max),
        dist.ReduceOp.MIN,
    )
    log_z = highest + total.log()
    return (
        chosen - log_z,
        total.log() - total_below / total,
        log_z,
        likeliest == targets + first_word,
    )


def _logits_grad(
    logits: Tensor,
    targets: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """d/dlogits [c, V], in their dtype, by dz: dlogp/dz_v = 1[v = target] - p_v;  dH/dz_v = -p_v (log p_v + H)."""
    z = _scaled(logits, temperature, scale, softcap)
    log_p = z - log_z[:, None]
    upstream = grad_log_probs[:, None]
    if grad_entropy is not None:
        upstream = upstream + grad_entropy[:, None] * (log_p + entropy[:, None])
    grad = log_p.exp().mul_(-upstream)
    # Not scattered: compiled, this stays one pass from logits to gradient, with no fp32 copy of the chunk in between.
    words = torch.arange(logits.shape[1], device=logits.device)
    grad = torch.where(words == targets[:, None], grad + grad_log_probs[:, None], grad)
    if softcap:
        grad = grad * (1 - (z * (temperature / softcap)).clamp(-1, 1).square())  # d tanh
    return (grad if temperature == scale == 1 else grad * (scale / temperature)).to(logits.dtype)


@cache
def _compiled(function: Callable) -> Callable:
    """One fused kernel over the chunk's logits instead of half a dozen passes through memory."""
    return torch.compile(function)
