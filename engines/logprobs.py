"""Final linear layer -> log-probability and entropy, a chunk of tokens at a time.

The logits of all tokens never exist together, nor in fp32 beyond one chunk: at 16k tokens and 152k words they would take
10 GB. Backward computes each chunk's logits again, which costs one more product with the output matrix.
"""

import torch
from torch import Tensor


def linear_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, chunk_size: int = 2048,
                     compiled: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), entropy and whether the target is the likeliest word, under softmax(hidden @ weight.T / temperature).

    hidden  [T, h], weight [V, h] of one floating dtype; targets [T] int64
    returns log_probs [T] fp32, entropy [T] fp32 (nats), both differentiable, and greedy [T] bool
    """
    return LinearLogProbs.apply(hidden, weight, targets, temperature, chunk_size, compiled)


class LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk_size, compiled):
        statistics = _compiled(_statistics) if compiled else _statistics
        outputs = [statistics(h @ weight.T, t, temperature)
                   for h, t in zip(hidden.split(chunk_size), targets.split(chunk_size))]
        log_probs, entropy, log_z, greedy = (torch.cat(parts) for parts in zip(*outputs))
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.temperature, ctx.chunk_size, ctx.compiled = temperature, chunk_size, compiled
        ctx.mark_non_differentiable(greedy)
        ctx.set_materialize_grads(False)        # None tells that the loss has no entropy in it
        return log_probs, entropy, greedy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy, _):
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        logits_grad = _compiled(_logits_grad) if ctx.compiled else _logits_grad
        grad_log_probs = torch.zeros_like(log_z) if grad_log_probs is None else grad_log_probs
        grad_hidden = torch.empty_like(hidden)
        # Summed over chunks in fp32: bf16 would round the sum away, one chunk after another.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            grad = logits_grad(hidden[part] @ weight.T, targets[part], log_z[part], entropy[part], grad_log_probs[part],
                               None if grad_entropy is None else grad_entropy[part], ctx.temperature)
            grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[c, V] -> log p(target), entropy, log Z, target is the argmax, each [c]. H = log Z - sum_v p_v z_v."""
    z = logits.float() if temperature == 1 else logits.float() / temperature
    log_z = z.logsumexp(-1)
    chosen = z.gather(-1, targets[:, None])[:, 0]
    entropy = log_z - (z - log_z[:, None]).exp_().mul_(z).sum(-1)
    return chosen - log_z, entropy, log_z, z.argmax(-1) == targets


def _logits_grad(logits: Tensor, targets: Tensor, log_z: Tensor, entropy: Tensor, grad_log_probs: Tensor,
                 grad_entropy: Tensor | None, temperature: float) -> Tensor:
    """d/dz [c, V], in the logits' dtype: dlogp/dz_v = 1[v = target] - p_v;  dH/dz_v = -p_v (log p_v + H)."""
    z = logits.float() if temperature == 1 else logits.float() / temperature
    log_p = z - log_z[:, None]
    scale = grad_log_probs[:, None]
    if grad_entropy is not None:
        scale = scale + grad_entropy[:, None] * (log_p + entropy[:, None])
    grad = log_p.exp().mul_(-scale)
    # Not scattered: compiled, this stays one pass from logits to gradient, with no fp32 copy of the chunk in between.
    words = torch.arange(logits.shape[1], device=logits.device)
    grad = torch.where(words == targets[:, None], grad + grad_log_probs[:, None], grad)
    return (grad if temperature == 1 else grad / temperature).to(logits.dtype)


_COMPILED = {}


def _compiled(function):
    """One fused kernel over the chunk's logits instead of half a dozen passes through memory."""
    if function not in _COMPILED:
        _COMPILED[function] = torch.compile(function)
    return _COMPILED[function]
