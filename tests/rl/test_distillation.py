"""On-policy distillation: a whole step against plain autograd in float64, and users' mistakes."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from config import InputError
from data.batching.batch import Batch
from data.prompts import Prompt
from engines.build import engine_class
from engines.divergence import Divergence
from examples.arithmetic import make_rows, make_tokenizer
from rl import updates
from rl.estimation import set_advantages
from rl.losses import ActorLoss
from rl.models import mini_batch_prompts, role_configs
from rl.settings import check_settings
from rl.teacher import Teacher, check_teacher
from rollout.samples import Samples
from rollout.sharing import divide
from tests.engines.test_divergence import formula, with_rest
from tests.support.launch import metrics, run
from tests.support.models import make_model
from tests.support.ranks import on_ranks
from tests.support.samples import configure

PROMPTS = [[5, 6], [7, 8, 9]]
RESPONSES = [[10, 11, 12, 13], [14], [15, 16, 17], [18, 19], [20, 21, 22], [23, 24]]
GROUPS = [0, 0, 0, 1, 1, 1]
SCORES = [0.0, 0.2, 1.0, 0.4, 0.1, 0.9]
COEF = 0.7
TEMPERATURE = 1.5


class Case(NamedTuple):
    """A step: the number of ranks, settings of the divergence, and whether it is the whole loss."""

    num_ranks: int
    mode: str
    top_k: int
    only: bool
    more: tuple[str, ...] = ()


MEGATRON = ("model_engine=megatron", "engine.tensor_model_parallel_size=2")
CASES = [
    Case(1, "reverse_kl", 0, False),
    Case(1, "forward_kl", 0, True),
    Case(1, "jsd", 0, True),
    Case(1, "reverse_kl", 5, True),
    Case(1, "forward_kl", 5, False),
    Case(1, "jsd", 5, False),
    Case(2, "reverse_kl", 0, True),
    Case(2, "jsd", 5, False),
    Case(2, "reverse_kl", 0, False, MEGATRON),
    Case(2, "forward_kl", 5, True, MEGATRON),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Make a student, and a teacher of another family whose embedding has more padding."""
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "student", "qwen3", num_hidden_layers=1)
    make_model(folder / "teacher", "llama", hidden_size=48, vocab_size=104, num_hidden_layers=2)
    return folder


def sequences() -> list[list[int]]:
    return [PROMPTS[group] + response for group, response in zip(GROUPS, RESPONSES)]


def make_share(config, actor):
    """Divide the samples over the ranks, each of which has drawn every second of them."""
    ids = [torch.tensor(sequence) for sequence in sequences()]
    masks = []
    for group, response in zip(GROUPS, RESPONSES):
        masks.append(torch.tensor([0.0] * len(PROMPTS[group]) + [1.0] * len(response)))
    mask = torch.cat(masks)
    cu_seqlens = torch.tensor([0, *map(len, ids)]).cumsum(0)
    fields = {"loss_mask": mask, "rollout_log_probs": -mask}
    owner = torch.arange(len(ids)) % dist.get_world_size()
    held = (owner == dist.get_rank()).nonzero()[:, 0]
    samples = Samples(
        Batch(torch.cat(ids), cu_seqlens, fields).select(held),
        ["" for _ in held],
        [Prompt([], "", {}) for _ in held],
        owner=owner,
        rank=dist.get_rank(),
        lengths=cu_seqlens.diff(),
        response_lengths=torch.tensor([len(response) for response in RESPONSES]),
        group=torch.tensor(GROUPS),
        scores=torch.tensor(SCORES),
        truncated=torch.zeros(len(ids), dtype=torch.bool),
        failures=[],
        num_drawn=len(ids),
    )
    return samples, divide(samples, samples.mini_batches(mini_batch_prompts(config)), actor)


def settings_of(case: Case, models: Path):
    return configure(
        f"algorithm.distill.teacher={models}/teacher",
        f"algorithm.distill.mode={case.mode}",
        f"algorithm.distill.top_k={case.top_k}",
        f"algorithm.distill.only={case.only}",
        f"algorithm.distill.coef={COEF}",
        f"algorithm.distill.temperature={TEMPERATURE}",
        "data.train_batch_size=2",
        "data.max_tokens_per_micro_batch=12",
        "engine.log_prob_chunk_size=2",
        "optim.clip_grad=0",
        *case.more,
        path=models / "student",
    )


def distilled_step(case: Case, models: Path, num_steps: int = 1) -> list[dict[str, float]]:
    """Train on the same samples in each step, and return the metrics of the steps."""
    config = settings_of(case, models)
    device = torch.device("cpu")
    roles = role_configs(config)
    build = engine_class(config.model_engine)
    actor = build(roles["actor"], device, num_steps)
    engine = build(roles["teacher"], device, num_steps, optimize=False)
    teacher = Teacher(config, engine, actor.head.vocab_size, [])
    results = []
    for step in range(num_steps):
        samples, share = make_share(config, actor)
        assert sum(len(plan.micro_batches) for _, plan in share.parts) > 1
        teacher.compute(share)
        set_advantages(config, samples, share, 0.0)
        loss_fn = ActorLoss(config, len(share.batch))
        with teacher.teaching(actor):
            results.append(updates.update(actor, share.parts, loss_fn, step, 1, "actor"))
    assert teacher.matrix is None
    return results


class Expected(NamedTuple):
    """The results of a step."""

    loss: float
    divergence: float
    grad_norm: float


def expected_step(case: Case, models: Path) -> Expected:
    """Compute a step with transformers and autograd in float64."""
    student = AutoModelForCausalLM.from_pretrained(models / "student", dtype=torch.float64)
    teacher = AutoModelForCausalLM.from_pretrained(models / "teacher", dtype=torch.float64)
    num_tokens = sum(map(len, RESPONSES))
    divergence = torch.zeros((), dtype=torch.float64)
    policy_loss = torch.zeros((), dtype=torch.float64)
    for i, sequence in enumerate(sequences()):
        ids = torch.tensor([sequence])
        targets = torch.tensor(RESPONSES[i])
        predicting = slice(-len(targets) - 1, -1)
        logits = student(ids).logits[0, predicting]
        with torch.no_grad():
            teacher_logits = teacher(ids).logits[0, predicting, : logits.shape[1]]
        divergence = divergence + divergences(case, logits, teacher_logits).sum()
        log_probs = logits.log_softmax(-1).gather(1, targets[:, None])
        policy_loss = policy_loss - advantage(i) * (log_probs - log_probs.detach()).exp().sum()
    loss = COEF * divergence / num_tokens
    if not case.only:
        loss = loss + policy_loss / num_tokens
    loss.backward()
    norms = [p.grad.norm() for p in student.parameters() if p.grad is not None]
    grad_norm = torch.stack(norms).norm().item()
    return Expected(loss.item(), divergence.item() / num_tokens, grad_norm)


def divergences(case: Case, logits: Tensor, teacher_logits: Tensor) -> Tensor:
    log_p = (logits / TEMPERATURE).log_softmax(-1)
    log_q = (teacher_logits / TEMPERATURE).log_softmax(-1)
    if case.top_k:
        token_ids = log_q.topk(case.top_k).indices
        log_p = with_rest(log_p, token_ids)
        log_q = with_rest(log_q, token_ids)
    return formula(log_p, log_q, Divergence(case.mode))


def advantage(i: int) -> float:
    """GRPO's advantage of a response."""
    scores = torch.tensor([s for s, group in zip(SCORES, GROUPS) if group == GROUPS[i]])
    return (SCORES[i] - scores.mean().item()) / (scores.std().item() + 1e-6)


def check_step(case: Case, models: Path, results: list[list[dict[str, float]]]) -> None:
    """Compare the metrics of every rank with the float64 step."""
    expected = expected_step(case, models)
    assert expected.divergence > 1e-3
    for (measured,) in results:
        assert measured["actor/loss"] == pytest.approx(expected.loss, rel=1e-5, abs=1e-7)
        assert measured["actor/grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-5)
        assert measured["distill/divergence"] == pytest.approx(expected.divergence, rel=1e-5)
        assert ("actor/pg_loss" in measured) != case.only


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:4])))
def test_a_step_equals_plain_autograd_in_float64(models, tmp_path, case):
    check_step(case, models, on_ranks(case.num_ranks, tmp_path, distilled_step, case, models))


@pytest.mark.slow
def test_a_step_of_jsd_equals_trls_loss(models, tmp_path):
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    student = AutoModelForCausalLM.from_pretrained(models / "student", dtype=torch.float64)
    teacher = AutoModelForCausalLM.from_pretrained(models / "teacher", dtype=torch.float64)
    logits = []
    teacher_logits = []
    for sequence, response in zip(sequences(), RESPONSES):
        predicting = slice(-len(response) - 1, -1)
        ids = torch.tensor([sequence])
        logits.append(student(ids).logits[0, predicting])
        teacher_logits.append(teacher(ids).logits[0, predicting, : logits[0].shape[1]])
    loss = GKDTrainer.generalized_jsd_loss(
        torch.cat(logits)[None],
        torch.cat(teacher_logits)[None],
        labels=torch.zeros(1, sum(map(len, RESPONSES))),
        beta=0.5,
        temperature=TEMPERATURE,
    )
    case = Case(1, "jsd", 0, True)
    ((measured,),) = on_ranks(1, tmp_path, distilled_step, case, models)
    assert measured["distill/divergence"] == pytest.approx(loss.item(), rel=1e-5)
