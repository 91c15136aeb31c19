"""The divergences against the formulas in float64, and against TRL's."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from engines.divergence import (
    MODES,
    Divergence,
    TeacherHead,
    full_divergence,
    gather_columns,
    top_k_divergence,
    top_k_log_probs,
)
from engines.heads import LogProbHead
from engines.logprobs import LogitTransform, LogProbSettings
from engines.teacher import Distillation, TeacherRows
from tests.support.ranks import group_beside_rank0, on_ranks

NUM_TOKENS = 24
VOCAB_SIZE = 53
TRANSFORMS = [
    LogitTransform(),
    LogitTransform(0.6),
    LogitTransform(2.5, scale=0.25),
    LogitTransform(0.6, scale=2.0, softcap=1.5),
]
TEACHER_TRANSFORM = LogitTransform(0.8, scale=1.3, softcap=4.0)
DIVERGENCES = [Divergence(mode) for mode in MODES] + [Divergence("jsd", 0.1)]


class Case(NamedTuple):
    """A student with 16 and a teacher with 24 hidden numbers."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    grad: Tensor


def make_case(teacher_tokens: int = VOCAB_SIZE) -> Case:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return Case(
        normal(NUM_TOKENS, 16).requires_grad_(),
        (normal(VOCAB_SIZE, 16) / 3).requires_grad_(),
        normal(NUM_TOKENS, 24),
        normal(teacher_tokens, 24) / 3,
        normal(NUM_TOKENS),
    )


def softmax_log(hidden: Tensor, weight: Tensor, transform: LogitTransform) -> Tensor:
    """Return the log-probabilities [T, V] in float64."""
    logits = transform.scale * hidden.double() @ weight.double().T
    if transform.softcap:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    return (logits / transform.temperature).log_softmax(-1)


def formula(log_p: Tensor, log_q: Tensor, divergence: Divergence) -> Tensor:
    """Return the divergence [T], written out with probabilities."""
    p = log_p.exp()
    q = log_q.exp()
    if divergence.mode == "reverse_kl":
        return (p * (p / q).log()).sum(-1)
    if divergence.mode == "forward_kl":
        return (q * (q / p).log()).sum(-1)
    beta = divergence.beta
    m = beta * q + (1 - beta) * p
    return beta * (q * (q / m).log()).sum(-1) + (1 - beta) * (p * (p / m).log()).sum(-1)


def with_rest(log_p: Tensor, token_ids: Tensor) -> Tensor:
    """Return the log-probabilities of the K tokens and of all others together: [T, K + 1].

    If there are no others: [T, K].
    """
    chosen = log_p.gather(1, token_ids)
    if token_ids.shape[1] == log_p.shape[1]:
        return chosen
    others = log_p.scatter(1, token_ids, -torch.inf).exp().sum(-1, keepdim=True)
    return torch.cat([chosen, others.log()], 1)


def expected(case: Case, transform: LogitTransform, divergence: Divergence, top_k: int = 0):
    """Return the divergence and its gradients, computed in float64."""
    hidden = case.hidden.detach().double().requires_grad_()
    weight = case.weight.detach().double().requires_grad_()
    num_common = min(len(weight), len(case.teacher_weight))
    log_q = softmax_log(case.teacher_hidden, case.teacher_weight[:num_common], TEACHER_TRANSFORM)
    if top_k:
        log_p = softmax_log(hidden, weight, transform)
        token_ids = log_q.topk(top_k).indices
        log_p = with_rest(log_p, token_ids)
        log_q = with_rest(log_q, token_ids)
    else:
        log_p = softmax_log(hidden, weight[:num_common], transform)
    result = formula(log_p, log_q, divergence)
    result.backward(case.grad.double())
    return result, hidden.grad, weight.grad


def compute(case: Case, settings: LogProbSettings, divergence: Divergence, top_k: int = 0):
    """Return the divergence and its gradients of hidden and weight."""
    if top_k:
        teacher_settings = LogProbSettings(
            TEACHER_TRANSFORM, settings.chunk_size, settings.is_compiled
        )
        candidates = top_k_log_probs(
            case.teacher_hidden, case.teacher_weight, top_k, teacher_settings
        )
        result = top_k_divergence(case.hidden, case.weight, *candidates, divergence, settings)
    else:
        teacher = TeacherHead(case.teacher_weight, TEACHER_TRANSFORM)
        result = full_divergence(
            case.hidden, case.weight, case.teacher_hidden, teacher, divergence, settings
        )
    result.backward(case.grad)
    return result, case.hidden.grad, case.weight.grad


def assert_all_close(actual, wanted, tolerance: float = 2e-5) -> None:
    for x, y in zip(actual, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("top_k", [0, 1, 5, VOCAB_SIZE])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
def test_values_and_gradients(divergence, transform, top_k):
    wanted = expected(make_case(), transform, divergence, top_k)
    assert wanted[0].mean() > 1e-2
    for chunk_size in (7, 1000):
        settings = LogProbSettings(transform, chunk_size)
        actual = compute(make_case(), settings, divergence, top_k)
        assert actual[0].dtype == torch.float32
        assert_all_close(actual, wanted)


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_bf16_weight_gradient_is_summed_over_chunks_in_fp32(top_k):
    """A sum in bf16 stops growing once it is 256 times as large as the next chunk's part."""
    num_tokens = 4096
    case = make_case()
    of_tokens = (case.hidden, case.teacher_hidden, case.grad)
    hidden, teacher_hidden, grad = [
        x.detach()[:1].repeat_interleave(num_tokens, 0) for x in of_tokens
    ]
    case = Case(
        hidden.bfloat16().requires_grad_(),
        case.weight.detach().bfloat16().requires_grad_(),
        teacher_hidden.bfloat16(),
        case.teacher_weight.bfloat16(),
        grad,
    )
    settings = LogProbSettings(TRANSFORMS[0], 4)
    *_, exact = expected(case, TRANSFORMS[0], DIVERGENCES[0], top_k)
    *_, actual = compute(case, settings, DIVERGENCES[0], top_k)
    assert (actual - exact).abs().max() < 0.02 * exact.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("mode", MODES)
def test_compiled(mode, top_k):
    transform = TRANSFORMS[-1]
    wanted = expected(make_case(), transform, Divergence(mode), top_k)
    settings = LogProbSettings(transform, 7, is_compiled=True)
    assert_all_close(compute(make_case(), settings, Divergence(mode), top_k), wanted)


@pytest.mark.parametrize("teacher_tokens", [VOCAB_SIZE - 9, VOCAB_SIZE + 9])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_of_one_model_alone_are_left_out(mode, teacher_tokens):
    wanted = expected(make_case(teacher_tokens), TRANSFORMS[1], Divergence(mode))
    settings = LogProbSettings(TRANSFORMS[1], 7)
    assert_all_close(compute(make_case(teacher_tokens), settings, Divergence(mode)), wanted)


def own_rows(weight: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """Return this rank's rows of a matrix [V, h] that ranks divide, and the first one's number."""
    rows_per_rank = -(-len(weight) // group.size())
    first = group.rank() * rows_per_rank
    return weight.detach()[first : first + rows_per_rank].clone(), first


def part_of_rank(
    divergence: Divergence, top_k: int, teacher_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what compute() returns, where ranks divide the vocabulary."""
    case = make_case(teacher_tokens)
    group = group_beside_rank0()
    weight, first_token = own_rows(case.weight, group)
    weight.requires_grad_()
    settings = LogProbSettings(TRANSFORMS[-1], 7, group=group, first_token=first_token)
    if top_k:
        teacher_weight, first_of_teacher = own_rows(case.teacher_weight, group)
        teacher_settings = LogProbSettings(
            TEACHER_TRANSFORM, 7, group=group, first_token=first_of_teacher
        )
        candidates = top_k_log_probs(case.teacher_hidden, teacher_weight, top_k, teacher_settings)
        result = top_k_divergence(case.hidden, weight, *candidates, divergence, settings)
    else:
        teacher = TeacherHead(case.teacher_weight, TEACHER_TRANSFORM)
        result = full_divergence(
            case.hidden, weight, case.teacher_hidden, teacher, divergence, settings
        )
    result.backward(case.grad)
    return result.detach(), case.hidden.grad, weight.grad


@pytest.mark.parametrize(
    "top_k, teacher_tokens",
    [(0, VOCAB_SIZE), (0, VOCAB_SIZE - 20), (0, VOCAB_SIZE + 20), (5, VOCAB_SIZE)],
)
@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_divide_the_vocabulary(tmp_path: Path, mode, top_k, teacher_tokens):
    divergence = Divergence(mode)
    wanted = expected(make_case(teacher_tokens), TRANSFORMS[-1], divergence, top_k)
    alone, *parts = on_ranks(4, tmp_path, part_of_rank, divergence, top_k, teacher_tokens)
    assert_all_close(alone, wanted)
    for result, *_ in parts:
        assert_all_close([result], wanted[:1])
    assert_all_close([sum(part[1] for part in parts)], wanted[1:2])
    assert_all_close([torch.cat([part[2] for part in parts])], wanted[2:])


def gathered_columns() -> list[torch.Tensor]:
    """Gather columns of which a group's first rank has one, and each further rank one more."""
    group = group_beside_rank0()
    rank = group.rank()
    x = torch.arange(2 * (rank + 1)).view(2, rank + 1) + 10 * (rank + 1)
    return [gather_columns(x, group), gather_columns(x.float(), group)]


def test_columns_of_ranks_are_gathered_whatever_their_number(tmp_path):
    for token_ids, log_probs in on_ranks(4, tmp_path, gathered_columns)[1:]:
        columns = [
            [10, 0, 0, 20, 21, 0, 30, 31, 32],
            [11, 0, 0, 22, 23, 0, 33, 34, 35],
        ]
        assert token_ids.tolist() == columns
        padded = torch.tensor(columns).float()
        padded[padded == 0] = -torch.inf
        assert torch.equal(log_probs, padded)


def test_the_most_likely_tokens_and_the_rest():
    case = make_case()
    settings = LogProbSettings(TEACHER_TRANSFORM, 7)
    token_ids, log_probs = top_k_log_probs(case.teacher_hidden, case.teacher_weight, 5, settings)
    log_q = softmax_log(case.teacher_hidden, case.teacher_weight, TEACHER_TRANSFORM)
    assert torch.equal(token_ids.long(), log_q.topk(5).indices)
    assert_all_close([log_probs], [with_rest(log_q, token_ids.long())])
    assert token_ids.dtype == torch.int32


@pytest.mark.parametrize("mode", MODES)
def test_a_rest_that_would_be_lost_in_rounding(mode):
    """The rest has a probability below 1e-12, so 1 minus the others' would be 0 in float32."""
    case = make_case()
    with torch.no_grad():
        case.hidden.mul_(100)
    settings = LogProbSettings(LogitTransform(), 7)
    teacher_hidden = 0.9 * case.hidden.detach()
    token_ids, log_q = top_k_log_probs(teacher_hidden, case.weight.detach(), 3, settings)
    result = top_k_divergence(
        case.hidden, case.weight, token_ids, log_q, Divergence(mode), settings
    )
    result.backward(case.grad)

    hidden = case.hidden.detach().double().requires_grad_()
    log_p = softmax_log(hidden, case.weight.detach(), LogitTransform())
    wanted_log_q = softmax_log(teacher_hidden, case.weight.detach(), LogitTransform())
    assert with_rest(log_p, token_ids.long())[:, -1].min() < -27
    events = [with_rest(x, token_ids.long()) for x in (log_p, wanted_log_q)]
    wanted = formula(*events, Divergence(mode))
    wanted.backward(case.grad.double())
    torch.testing.assert_close(log_q.double(), events[1], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(result.double(), wanted, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(case.hidden.grad.double(), hidden.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("top_k", [0, 3])
def test_no_tokens(top_k):
    """A rank without tokens still takes part in the backward pass."""
    full = make_case()
    empty = full.hidden.detach()[:0].requires_grad_()
    case = full._replace(hidden=empty, teacher_hidden=full.teacher_hidden[:0], grad=full.grad[:0])
    result, _, grad_weight = compute(case, LogProbSettings(), Divergence("jsd"), top_k)
    assert result.shape == (0,)
    assert not grad_weight.any()


@pytest.mark.parametrize("top_k", [0, 3])
def test_a_frozen_output_matrix_has_no_gradient(top_k):
    """As with adapters; the hidden states have the same gradient."""
    settings = LogProbSettings(TRANSFORMS[-1], 7)
    _, expected_grad, _ = compute(make_case(), settings, Divergence("jsd"), top_k)
    case = make_case()
    case.weight.requires_grad_(False)
    _, grad, of_weight = compute(case, settings, Divergence("jsd"), top_k)
    assert torch.equal(grad, expected_grad)
    assert of_weight is None


@pytest.mark.parametrize(
    "divergence, beta",
    [
        (Divergence("forward_kl"), 0.0),
        (Divergence("reverse_kl"), 1.0),
        (Divergence("jsd"), 0.5),
        (Divergence("jsd", 0.1), 0.1),
    ],
    ids=str,
)
def test_trl(divergence, beta):
    """The mean equals the loss of TRL's GKDTrainer, and so do the gradients."""
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    case = make_case()
    hidden = case.hidden.detach().double().requires_grad_()
    weight = case.weight.detach().double().requires_grad_()
    teacher_logits = case.teacher_hidden.double() @ case.teacher_weight.double().T
    loss = GKDTrainer.generalized_jsd_loss(
        (hidden @ weight.T)[None],
        teacher_logits[None],
        labels=torch.zeros(1, NUM_TOKENS),
        beta=beta,
        temperature=0.7,
    )
    loss.backward()
    transform = LogitTransform(0.7)
    result = full_divergence(
        case.hidden,
        case.weight,
        case.teacher_hidden,
        TeacherHead(case.teacher_weight, transform),
        divergence,
        LogProbSettings(transform, 7),
    ).mean()
    result.backward()
    assert_all_close([result, case.hidden.grad, case.weight.grad], [loss, hidden.grad, weight.grad])


def part_of_head() -> tuple[Tensor, Tensor]:
    """Return a head's divergence from five tokens of a teacher, and this rank's gradient."""
    case = make_case()
    group = group_beside_rank0()
    head = LogProbHead(1.0, 7, False, VOCAB_SIZE, group)
    head.distillation = Distillation(Divergence("forward_kl"), 1.0, VOCAB_SIZE)
    num_padding = -VOCAB_SIZE % group.size()
    weight, _ = own_rows(F.pad(case.weight, (0, 0, 0, num_padding)), group)
    weight.requires_grad_()
    targets = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    candidate_ids = torch.zeros(NUM_TOKENS, 0, dtype=torch.int64)
    teacher_settings = LogProbSettings(TEACHER_TRANSFORM, 7)
    candidates = top_k_log_probs(case.teacher_hidden, case.teacher_weight, 5, teacher_settings)
    teacher = TeacherRows(*candidates)
    # As in an evaluation of the student.
    assert len(head(case.hidden, weight, targets, candidate_ids)) == head.num_outputs
    *_, result = head(case.hidden, weight, targets, candidate_ids, teacher)
    result.backward(case.grad)
    return result.detach(), weight.grad


def test_a_divided_head_compares_its_own_tokens_with_a_teacher(tmp_path: Path):
    wanted, _, wanted_grad = expected(make_case(), TRANSFORMS[0], Divergence("forward_kl"), 5)
    _, *parts = on_ranks(3, tmp_path, part_of_head)
    for result, _ in parts:
        assert_all_close([result], [wanted])
    assert_all_close([torch.cat([grad for _, grad in parts])[:VOCAB_SIZE]], [wanted_grad])
