"""The divergence between a teacher's and a student's next-token distributions, in chunks of tokens.

With the student's distribution p and the teacher's q, summed over events v:

    reverse_kl  sum_v p_v (log p_v - log q_v)
    forward_kl  sum_v q_v (log q_v - log p_v)
    jsd         beta * sum_v q_v (log q_v - log m_v) + (1 - beta) * sum_v p_v (log p_v - log m_v)
                with m = beta * q + (1 - beta) * p

The events are all tokens of the vocabulary, or the K tokens that the teacher finds most likely and
one more event, "any other token". By the data-processing inequality, the latter divergence is never
larger than the former.

With the student's logits z, and s_v = p_v * dD/dp_v, the gradient is
dD/dz_v = s_v - p_v * sum_u s_u:

    reverse_kl  s_v = p_v (log p_v - log q_v), up to a multiple of p_v, which cancels
    forward_kl  s_v = -q_v
    jsd         s_v = (1 - beta) * p_v (log p_v - log m_v)

As in engines/logprobs.py, only one chunk's logits are in memory at a time, and the backward pass
recomputes them.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engines.logprobs import (
    LogitTransform,
    LogProbSettings,
    compiled,
    to_logits_grad,
    transformed,
)

MODES = ("reverse_kl", "forward_kl", "jsd")
IMPOSSIBLE = -1e30  # the log-probability of an event without tokens; 0 * IMPOSSIBLE is still 0


class Divergence(NamedTuple):
    """The formula of a divergence: one of MODES, and the teacher's weight in jsd's mixture."""

    mode: str
    beta: float = 0.5


class TeacherHead(NamedTuple):
    """A teacher's output matrix.

    weight     [V, h] of the compute dtype: all rows, on every rank
    transform  the steps from the products with it to the softmax
    """

    weight: Tensor
    transform: LogitTransform


class Part(NamedTuple):
    """This rank's part of the vocabulary.

    first_token  the first token of the part
    num_tokens   the number of its tokens that both models have
    """

    first_token: int
    num_tokens: int

    def of(self, weight: Tensor) -> Tensor:
        """Return the rows of this part of the vocabulary from a whole output matrix."""
        return weight[self.first_token : self.first_token + self.num_tokens]


def full_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher: TeacherHead,
    divergence: Divergence,
    settings: LogProbSettings,
) -> Tensor:
    """Return the divergence over the whole vocabulary at each token: [T] fp32, differentiable.

    If one model has more tokens than the other, both distributions cover only the common tokens.

    Args:
        hidden: [T, h] of a floating dtype: the student's. As in linear_log_probs(), the caller sums
            the gradients of the ranks that divide the vocabulary.
        weight: [V, h] of the same dtype: this rank's rows of the student's output matrix.
        teacher_hidden: [T, h'] of the dtype of the teacher's output matrix.
        settings: the student's.
    """
    num_left = max(0, len(teacher.weight) - settings.first_token)
    part = Part(settings.first_token, min(len(weight), num_left))
    return FullDivergence.apply(
        hidden,
        weight[: part.num_tokens],
        teacher_hidden,
        TeacherHead(part.of(teacher.weight), teacher.transform),
        divergence,
        settings,
    )


def top_k_divergence(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    log_q: Tensor,
    divergence: Divergence,
    settings: LogProbSettings,
) -> Tensor:
    """Return the divergence over K tokens and the rest at each token: [T] fp32, differentiable.

    Args:
        hidden, weight, settings: as in full_divergence().
        token_ids: [T, K] int: the K tokens.
        log_q: [T, K + 1] fp32: the teacher's log-probabilities of the K tokens and of the rest.
    """
    return TopKDivergence.apply(hidden, weight, token_ids, log_q, divergence, settings)


def top_k_log_probs(
    hidden: Tensor, weight: Tensor, top_k: int, settings: LogProbSettings
) -> tuple[Tensor, Tensor]:
    """Return the K most likely tokens, their log-probabilities, and the rest's log-probability.

    Args:
        hidden, weight, settings: the teacher's, with shapes as in full_divergence().

    Returns:
        [T, K] int32 and [T, K + 1] fp32; the same on all ranks that divide the vocabulary.
    """
    token_ids = []
    log_probs = []
    for chunk in chunks_of(hidden, settings):
        z = transformed(hidden[chunk] @ weight.T, settings.transform)
        chunk_ids = most_likely(z, top_k, settings)
        token_ids.append(chunk_ids)
        log_probs.append(event_log_probs(z, chunk_ids, settings).log_events)
    return torch.cat(token_ids).int(), torch.cat(log_probs)


# -- the whole vocabulary --------------------------------------------------------------------------


class FullDivergence(torch.autograd.Function):
    """See full_divergence; the matrices have the rows of this rank's part of the vocabulary."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher: TeacherHead,
        divergence: Divergence,
        settings: LogProbSettings,
    ) -> Tensor:
        log_sum_exp = maybe_compiled(shard_log_sum_exp, settings)
        sums_of = maybe_compiled(full_sums, settings)
        normalizers = []
        sums = []
        for chunk in chunks_of(hidden, settings):
            logits = hidden[chunk] @ weight.T
            teacher_logits = teacher_hidden[chunk] @ teacher.weight.T
            shard_log_sums = torch.stack(
                [
                    log_sum_exp(logits, settings.transform),
                    log_sum_exp(teacher_logits, teacher.transform),
                ]
            )
            log_z = combine_log_sums(shard_log_sums, settings.group)
            transforms = (settings.transform, teacher.transform)
            normalizers.append(log_z)
            sums.append(sums_of(logits, teacher_logits, log_z, transforms, divergence))
        log_z = torch.cat(normalizers, 1)
        total, slope = sum_over(torch.cat(sums, 1), settings.group)
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher.weight, log_z, slope)
        ctx.options = (teacher.transform, divergence, settings)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        hidden, weight, teacher_hidden, teacher_weight, log_z, slope = ctx.saved_tensors
        teacher_transform, divergence, settings = ctx.options
        transforms = (settings.transform, teacher_transform)
        gradient_of = maybe_compiled(full_logits_grad, settings)

        def logits_grad(chunk: slice) -> Tensor:
            return gradient_of(
                hidden[chunk] @ weight.T,
                teacher_hidden[chunk] @ teacher_weight.T,
                log_z[:, chunk],
                slope[chunk],
                grad[chunk],
                transforms,
                divergence,
            )

        grads = accumulate(logits_grad, hidden, weight, ctx.needs_input_grad[1], settings)
        return *grads, None, None, None, None


def shard_log_sum_exp(logits: Tensor, transform: LogitTransform) -> Tensor:
    """Return log sum_v e^(z_v) over this rank's tokens: [c] fp32."""
    if not logits.shape[1]:
        return logits.new_full((len(logits),), IMPOSSIBLE, dtype=torch.float32)
    return transformed(logits, transform).logsumexp(-1)


def full_sums(
    logits: Tensor,
    teacher_logits: Tensor,
    log_z: Tensor,
    transforms: tuple[LogitTransform, LogitTransform],
    divergence: Divergence,
) -> Tensor:
    """Return this rank's part of the divergence and of sum_v s_v: [2, c] fp32."""
    log_p = transformed(logits, transforms[0]) - log_z[0][:, None]
    log_q = transformed(teacher_logits, transforms[1]) - log_z[1][:, None]
    terms = divergence_terms(log_p, log_q, divergence).sum(-1)
    return torch.stack([terms, slopes(log_p, log_q, divergence).sum(-1)])


def full_logits_grad(
    logits: Tensor,
    teacher_logits: Tensor,
    log_z: Tensor,
    slope: Tensor,
    grad: Tensor,
    transforms: tuple[LogitTransform, LogitTransform],
    divergence: Divergence,
) -> Tensor:
    """Return the gradient [c, V] of a chunk's logits. slope: [c], sum_v s_v."""
    z = transformed(logits, transforms[0])
    log_p = z - log_z[0][:, None]
    log_q = transformed(teacher_logits, transforms[1]) - log_z[1][:, None]
    grad_z = slopes(log_p, log_q, divergence) - log_p.exp() * slope[:, None]
    return to_logits_grad(grad_z * grad[:, None], z, transforms[0], logits.dtype)


# -- K tokens and the rest -------------------------------------------------------------------------


class Events(NamedTuple):
    """A model's distribution over K tokens and the rest, for c tokens.

    log_z        [c] fp32: log of the sum of the exponentials of all logits
    log_rest     [c] fp32: the log-probability of the rest
    log_events   [c, K + 1] fp32: the log-probabilities of the K tokens, and of the rest
    """

    log_z: Tensor
    log_rest: Tensor
    log_events: Tensor


class TopKDivergence(torch.autograd.Function):
    """See top_k_divergence."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        token_ids: Tensor,
        log_q: Tensor,
        divergence: Divergence,
        settings: LogProbSettings,
    ) -> Tensor:
        token_ids = token_ids.long()
        chunks = []
        for chunk in chunks_of(hidden, settings):
            z = transformed(hidden[chunk] @ weight.T, settings.transform)
            chunks.append(event_log_probs(z, token_ids[chunk], settings))
        events = Events(*[torch.cat(pieces) for pieces in zip(*chunks)])
        ctx.save_for_backward(hidden, weight, token_ids, log_q, *events)
        ctx.options = (divergence, settings)
        return divergence_terms(events.log_events, log_q, divergence).sum(-1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        hidden, weight, token_ids, log_q, *events = ctx.saved_tensors
        divergence, settings = ctx.options
        log_z, log_rest, log_p = Events(*events)
        slope = slopes(log_p, log_q, divergence)
        gradient_of = maybe_compiled(top_k_logits_grad, settings)
        columns, is_on_rank = local_columns(token_ids, len(weight), settings)
        # Tokens of other ranks go to an additional last column, which is dropped.
        columns = torch.where(is_on_rank, columns, len(weight))

        def logits_grad(chunk: slice) -> Tensor:
            return gradient_of(
                hidden[chunk] @ weight.T,
                columns[chunk],
                log_z[chunk],
                log_rest[chunk],
                slope[chunk],
                grad[chunk],
                settings.transform,
            )

        grads = accumulate(logits_grad, hidden, weight, ctx.needs_input_grad[1], settings)
        return *grads, None, None, None, None


def top_k_logits_grad(
    logits: Tensor,
    columns: Tensor,
    log_z: Tensor,
    log_rest: Tensor,
    slope: Tensor,
    grad: Tensor,
    transform: LogitTransform,
) -> Tensor:
    """Return the gradient [c, V] of a chunk's logits.

    A token among the rest gets the share p_v / p_rest of the slope of the rest.

    Args:
        columns: [c, K], the columns of the K tokens, or V for a token of another rank.
        slope: [c, K + 1], s_v of the K tokens and of the rest.
    """
    z = transformed(logits, transform)
    log_p = z - log_z[:, None]
    of_rest = (log_p - log_rest[:, None]).clamp(max=0).exp() * slope[:, -1:]
    padded = with_column(of_rest).scatter(1, columns, slope[:, :-1])
    grad_z = padded[:, :-1] - log_p.exp() * slope.sum(-1, keepdim=True)
    return to_logits_grad(grad_z * grad[:, None], z, transform, logits.dtype)


def with_column(x: Tensor) -> Tensor:
    """Return [c, n + 1]: x [c, n] with a column of zeros appended."""
    return torch.nn.functional.pad(x, (0, 1))


def event_log_probs(z: Tensor, token_ids: Tensor, settings: LogProbSettings) -> Events:
    """Return the distribution over K tokens and the rest.

    z: [c, V], this rank's input of the softmax. token_ids: [c, K] int64.

    The probability of the rest is a sum over its tokens. One minus the probability of the K tokens
    would round to zero where these have nearly all of the probability.
    """
    columns, is_on_rank = local_columns(token_ids, z.shape[1], settings)
    outside = torch.where(is_on_rank, columns, z.shape[1])
    padded = with_column(z)
    chosen = sum_over(padded.gather(1, outside), settings.group)
    without_chosen = padded.scatter(1, outside, IMPOSSIBLE)[:, :-1]
    log_sums = torch.stack([z.logsumexp(-1), without_chosen.logsumexp(-1)])
    log_z, log_z_rest = combine_log_sums(log_sums, settings.group)
    log_rest = torch.where(log_z_rest > IMPOSSIBLE / 2, log_z_rest - log_z, IMPOSSIBLE)
    log_events = torch.cat([chosen - log_z[:, None], log_rest[:, None]], 1)
    return Events(log_z, log_rest, log_events)


def local_columns(
    token_ids: Tensor, num_columns: int, settings: LogProbSettings
) -> tuple[Tensor, Tensor]:
    """Return the columns of tokens in this rank's logits, and whether they are on this rank."""
    columns = token_ids - settings.first_token
    is_on_rank = (columns >= 0) & (columns < num_columns)
    return columns.clamp(0, num_columns - 1), is_on_rank


def most_likely(z: Tensor, top_k: int, settings: LogProbSettings) -> Tensor:
    """Return the K most likely tokens, the most likely one first: [c, K] int64."""
    values, columns = z.topk(min(top_k, z.shape[1]))
    token_ids = columns + settings.first_token
    if settings.group is not None:
        values = gather_columns(values, settings.group)
        token_ids = gather_columns(token_ids, settings.group)
    return token_ids.gather(1, values.topk(top_k).indices)


# -- terms -----------------------------------------------------------------------------------------


def divergence_terms(log_p: Tensor, log_q: Tensor, divergence: Divergence) -> Tensor:
    """Return the terms of the divergence, one for each event. Their sum is the divergence."""
    if divergence.mode == "reverse_kl":
        return log_p.exp() * (log_p - log_q)
    if divergence.mode == "forward_kl":
        return log_q.exp() * (log_q - log_p)
    log_m = log_mixture(log_p, log_q, divergence.beta)
    teacher_terms = log_q.exp() * (log_q - log_m)
    student_terms = log_p.exp() * (log_p - log_m)
    return divergence.beta * teacher_terms + (1 - divergence.beta) * student_terms


def slopes(log_p: Tensor, log_q: Tensor, divergence: Divergence) -> Tensor:
    """Return s_v of each event, as defined at the top of this file."""
    if divergence.mode == "reverse_kl":
        return log_p.exp() * (log_p - log_q)
    if divergence.mode == "forward_kl":
        return -log_q.exp()
    log_m = log_mixture(log_p, log_q, divergence.beta)
    return (1 - divergence.beta) * log_p.exp() * (log_p - log_m)


def log_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))


# -- chunks and ranks ------------------------------------------------------------------------------


def chunks_of(hidden: Tensor, settings: LogProbSettings) -> list[slice]:
    """Return the chunks of the tokens: at least one, which may be empty."""
    starts = range(0, max(1, len(hidden)), settings.chunk_size)
    return [slice(start, start + settings.chunk_size) for start in starts]


def accumulate(
    logits_grad: Callable[[slice], Tensor],
    hidden: Tensor,
    weight: Tensor,
    needs_weight: bool,
    settings: LogProbSettings,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of hidden and weight from the gradient of each chunk's logits.

    The sum over chunks is in fp32: a bf16 sum would soon be too large for a chunk to change it.
    """
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
    for chunk in chunks_of(hidden, settings):
        grad_logits = logits_grad(chunk)
        grad_hidden[chunk] = grad_logits @ weight
        if grad_weight is not None:
            grad_weight += grad_logits.T @ hidden[chunk]
    if grad_weight is not None:
        grad_weight = grad_weight.to(weight.dtype)
    return grad_hidden, grad_weight


def maybe_compiled(function: Callable, settings: LogProbSettings) -> Callable:
    """Return the function, compiled if settings.is_compiled is true."""
    return compiled(function) if settings.is_compiled else function


def combine_log_sums(log_sums: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the log of the sum over ranks of exp(log_sums), elementwise."""
    if group is None:
        return log_sums
    largest = log_sums.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest + sum_over((log_sums - largest).exp(), group).log()


def sum_over(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of x over ranks."""
    if group is not None:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
    return x


def gather_columns(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the columns of all ranks, which may have different numbers of them."""
    num_columns = torch.tensor(x.shape[1], device=x.device)
    dist.all_reduce(num_columns, op=dist.ReduceOp.MAX, group=group)
    lowest = -torch.inf if x.is_floating_point() else 0
    x = torch.nn.functional.pad(x, (0, int(num_columns) - x.shape[1]), value=lowest)
    columns = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(columns, x, group=group)
    return torch.cat(columns, 1)
