"""Distillation in train_sft.py: a whole step against plain autograd in float64, and mistakes."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import train_sft
from config import InputError, load
from data.batching.batch import Batch
from engines.build import engine_class
from engines.divergence import Divergence
from examples.arithmetic import make_rows, make_tokenizer
from job.distillation import (
    build_teachers,
    check_distillation,
    check_models,
    distillation_loss,
    role_configs,
)
from profiling import Profiler
from tests.engines.test_divergence import formula, with_rest
from tests.support.cases import slow_unless_quick
from tests.support.guarded import unguarded
from tests.support.launch import launch, metrics, run
from tests.support.models import make_model
from tests.support.ranks import on_ranks

SEQUENCES = [[5, 6, 10, 11, 12, 13], [7, 8, 14], [9, 15, 16, 17, 30], [7, 18, 19], [5, 20, 31, 22]]
# The trained tokens of each sequence: masks may have gaps, as between several turns.
MASKS = [[0, 0, 1, 1, 1, 1], [0, 0, 1], [0, 1, 0, 1, 1], [0, 1, 1], [0, 0, 1, 0]]
COEF = 0.7
TEMPERATURE = 1.5


class Case(NamedTuple):
    """A step: the number of ranks, settings of the divergence, and whether it is the whole loss."""

    num_ranks: int
    mode: str
    top_k: int
    only: bool
    more: tuple[str, ...] = ()


CASES = [
    Case(1, "forward_kl", 0, False),
    Case(1, "jsd", 5, True, ("engine.use_remove_padding=false",)),
    Case(2, "reverse_kl", 0, True),
    Case(2, "forward_kl", 5, False, ("engine.context_parallel_size=2",)),
    Case(2, "forward_kl", 0, True, ("engine.context_parallel_size=auto",)),
    Case(
        2, "forward_kl", 0, False, ("model_engine=megatron", "engine.tensor_model_parallel_size=2")
    ),
    Case(2, "jsd", 5, True, ("model_engine=megatron", "engine.pipeline_model_parallel_size=2")),
]


@pytest.mark.parametrize("only", [True, False])
def test_the_loss_is_a_mean_over_trained_tokens(only):
    """Two of five tokens are trained in this micro-batch, and four in the whole batch."""
    pairs = ["model.path=m", "data.train_files=t", "distill.teacher=n", f"distill.coef={COEF}"]
    config = load("sft.yaml", [*pairs, f"distill.only={str(only).lower()}"])
    log_probs = torch.tensor([-1.0, -2.0, -4.0, -8.0, -16.0])
    entropy = torch.tensor([0.5, 0.25, 1.5, 2.5, 3.5])
    divergence = torch.tensor([3.0, 5.0, 7.0, 9.0, 11.0])
    mask = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])
    fields = {"loss_mask": mask, "divergence": divergence}
    loss, amounts = distillation_loss(config, num_tokens=4)(log_probs, entropy, fields)
    expected = {
        "entropy": (0.25 + 2.5) / 4,
        "cross_entropy": (2 + 8) / 4,
        "distill/divergence": (5 + 9) / 4,
    }
    assert {name: amount.item() for name, amount in amounts.items()} == expected
    added = 0.0 if only else expected["cross_entropy"]
    assert loss.item() == pytest.approx(COEF * expected["distill/divergence"] + added)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Make a student, and a teacher of another family whose embedding has more padding."""
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "student", "qwen3", num_hidden_layers=2)
    make_model(folder / "teacher", "llama", hidden_size=48, vocab_size=104, num_hidden_layers=2)
    return folder


def configure(*settings, path="unused"):
    return load(
        "sft.yaml",
        [
            f"model.path={path}",
            "data.train_files=unused",
            "data.max_tokens_per_micro_batch=8",
            "engine.compute_dtype=float32",
            "engine.log_prob_chunk_size=2",
            "optim.clip_grad=0",
            *settings,
        ],
    )


def settings_of(case: Case, models: Path):
    return configure(
        f"distill.teacher={models}/teacher",
        f"distill.mode={case.mode}",
        f"distill.top_k={case.top_k}",
        f"distill.only={case.only}",
        f"distill.coef={COEF}",
        f"distill.temperature={TEMPERATURE}",
        *case.more,
        path=models / "student",
    )


def whole_batch() -> Batch:
    lengths = torch.tensor([0, *map(len, SEQUENCES)])
    mask = torch.tensor(sum(MASKS, []), dtype=torch.float32)
    return Batch(torch.tensor(sum(SEQUENCES, [])), lengths.cumsum(0), {"loss_mask": mask})


def distilled_step(case: Case, models: Path) -> dict[str, float]:
    """Return the results of a step."""
    config = settings_of(case, models)
    with unguarded():  # the engines' own tests have the guard
        engine = engine_class(config.model_engine)(config, torch.device("cpu"), 1)
        teachers = build_teachers(config, engine, 1)
    batch = whole_batch()
    plan = engine.plan(batch.lengths)
    assert len(plan.micro_batches) > 1
    job = SimpleNamespace(config=config, progress=SimpleNamespace(step=0), profiler=Profiler())
    num_trained = int(batch.fields["loss_mask"].sum())
    share = batch.select(plan.sequences)
    results = train_sft.train_batch(job, engine, teachers, share, plan.micro_batches, num_trained)
    assert not teachers.matrices
    assert engine.head.distillation is None
    return results


def divergences(case: Case, logits: Tensor, teacher_logits: Tensor) -> Tensor:
    log_p = (logits / TEMPERATURE).log_softmax(-1)
    log_q = (teacher_logits / TEMPERATURE).log_softmax(-1)
    if case.top_k:
        token_ids = log_q.topk(case.top_k).indices
        log_p = with_rest(log_p, token_ids)
        log_q = with_rest(log_q, token_ids)
    return formula(log_p, log_q, Divergence(case.mode))


def expected_step(case: Case, models: Path) -> dict[str, float]:
    """Compute a step with transformers and autograd in float64."""
    student = AutoModelForCausalLM.from_pretrained(models / "student", dtype=torch.float64)
    teacher = AutoModelForCausalLM.from_pretrained(models / "teacher", dtype=torch.float64)
    num_trained = sum(map(sum, MASKS))
    divergence = torch.zeros((), dtype=torch.float64)
    cross_entropy = torch.zeros((), dtype=torch.float64)
    for ids, mask in zip(SEQUENCES, MASKS):
        ids = torch.tensor(ids)
        mask = torch.tensor(mask[1:])
        logits = student(ids[None]).logits[0, :-1]
        with torch.no_grad():
            teacher_logits = teacher(ids[None]).logits[0, :-1, : logits.shape[1]]
        divergence = divergence + (divergences(case, logits, teacher_logits) * mask).sum()
        log_probs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        cross_entropy = cross_entropy - (log_probs * mask).sum()
    loss = COEF * divergence / num_trained
    if not case.only:
        loss = loss + cross_entropy / num_trained
    loss.backward()
    norms = [p.grad.norm() for p in student.parameters() if p.grad is not None]
    return {
        "loss": loss.item(),
        "grad_norm": torch.stack(norms).norm().item(),
        "distill/divergence": divergence.item() / num_trained,
        "cross_entropy": cross_entropy.item() / num_trained,
    }


def name_of(case: Case) -> str:
    return "-".join(map(str, [*case[:4], *case.more]))


@pytest.mark.parametrize(
    "case", slow_unless_quick(CASES, lambda case: case.num_ranks == 1, name_of)
)
def test_a_step_equals_plain_autograd_in_float64(models, tmp_path, case):
    expected = expected_step(case, models)
    assert expected["distill/divergence"] > 1e-3
    # Ranks are forks of this process, so that they need not import the engine themselves.
    engine_class(settings_of(case, models).model_engine)
    for measured in on_ranks(case.num_ranks, tmp_path, distilled_step, case, models):
        for name, value in expected.items():
            assert measured[name] == pytest.approx(value, rel=1e-5), name


# -- users' mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting, message",
    [
        ("distill.only=true", "distill.only=True does nothing without distill.teacher"),
        ("distill.top_k=3", "distill.top_k=3 does nothing without distill.teacher"),
        ("distill.teacher=self", "distill.teacher=self does not work in train_sft.py"),
    ],
)
def test_a_mistake_is_one_line(setting, message):
    with pytest.raises(InputError, match=message):
        check_distillation(configure(setting))


def test_the_divergence_is_alone_in_the_gradient_of_the_model():
    mtp = ["model.mtp.enable=true", "model.mtp.enable_train=true"]
    alone = configure("distill.teacher=there", "distill.only=true", *mtp)
    with pytest.raises(InputError, match="set model.mtp.detach_encoder=true, so that only these"):
        check_distillation(alone)
    detached = "model.mtp.detach_encoder=true"
    check_distillation(configure("distill.teacher=there", "distill.only=true", *mtp, detached))
    check_distillation(configure("distill.teacher=there", *mtp))


def test_these_settings_are_right():
    check_distillation(configure())
    check_distillation(configure("distill.teacher=there", "distill.mode=jsd", "distill.top_k=8"))


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_a_teacher_is_checked_before_its_weights_are_read(models, engine):
    """It has more rows in its embedding, but no tokenizer that explains them."""
    config = configure(
        f"model_engine={engine}", f"distill.teacher={models}/teacher", path=models / "student"
    )
    assert [*role_configs(config)] == [None, "teacher"]
    with pytest.raises(InputError, match="and distill.teacher=.* has no tokenizer that explains"):
        check_models(config, 1)
    config = configure(
        f"model_engine={engine}",
        f"distill.teacher={models}/student",
        "distill.top_k=1000",
        path=models / "student",
    )
    with pytest.raises(InputError, match="distill.top_k=1000 is more than the"):
        check_models(config, 1)
    config = configure(
        f"model_engine={engine}", f"distill.teacher={models}", path=models / "student"
    )
    with pytest.raises(InputError, match="^distill.teacher=.* contains no config.json"):
        check_models(config, 1)


ROWS = {"student": 8, "teacher": 6}  # in the embedding


class StubEngine:
    """An engine that computes nothing. Its model's path names its role."""

    def __init__(self, config, device, num_steps, **options):
        self.built = (Path(config.model.path).name, device, num_steps, options)
        self.device = "its device"
        self.head = SimpleNamespace(vocab_size=ROWS[self.built[0]])

    @staticmethod
    def check(config, world_size):
        if not Path(config.model.path).exists():
            raise InputError(f"model.path={config.model.path} is not there")
        return SimpleNamespace(vocab_size=ROWS[Path(config.model.path).name])


@pytest.mark.parametrize(
    "settings, has_teacher, message",
    [
        (["distill.fsdp_size=3"], True, "distill.fsdp_size=3 does not divide the number of ranks"),
        (["distill.top_k=7"], True, "distill.top_k=7 is more than the 6 tokens of the vocabulary"),
        (["distill.top_k=6"], True, "distill.teacher={teacher} has 6 tokens and model.path="),
        ([], False, "distill.teacher={teacher} is not there"),
    ],
)
def test_a_teacher_that_does_not_fit_is_a_mistake(
    tmp_path, monkeypatch, settings, has_teacher, message
):
    monkeypatch.setattr("job.distillation.engine_class", lambda name: StubEngine)
    (tmp_path / "student").mkdir()
    if has_teacher:
        (tmp_path / "teacher").mkdir()
    teacher = tmp_path / "teacher"
    config = configure(f"distill.teacher={teacher}", *settings, path=tmp_path / "student")
    with pytest.raises(InputError) as caught:
        check_models(config, 4)
    assert str(caught.value).startswith(message.format(teacher=teacher))


def test_a_teacher_is_built_frozen_from_its_own_model(monkeypatch):
    monkeypatch.setattr("job.distillation.engine_class", lambda name: StubEngine)
    config = configure("distill.teacher=teacher", path="student")
    student = StubEngine(config, "cpu", 7)
    teachers = build_teachers(config, student, 7)
    assert teachers.engine.built == ("teacher", "its device", 7, {"optimize": False})
    assert teachers.num_tokens == 6
    assert build_teachers(configure(path="student"), student, 7) is None


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    tokenizer = make_tokenizer()
    shape = dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    make_model(folder / "student", "qwen3", num_hidden_layers=1, **shape)
    make_model(folder / "teacher", "llama", num_hidden_layers=2, hidden_size=64, **shape)
    for name in ("student", "teacher"):
        tokenizer.save_pretrained(folder / name)
    train, _ = make_rows()
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, train[:64])))
    return folder


def arguments(assets: Path, out: Path, *more: str) -> list[str]:
    return [
        "train_sft.py",
        f"model.path={assets}/student",
        f"distill.teacher={assets}/teacher",
        f"data.train_files={assets}/train.jsonl",
        f"data.cache_dir={assets}/cache",
        f"output_dir={out}",
        "trainer.report=false",
        "engine.compute_dtype=float32",
        "data.train_batch_size=8",
        "data.max_length=64",
        "data.max_tokens_per_micro_batch=128",
        "optim.lr=1e-2",
        "trainer.total_epochs=4",
        *more,
    ]


@pytest.mark.slow
def test_a_student_approaches_its_teacher_on_given_answers(assets, tmp_path):
    launch(2, *arguments(assets, tmp_path, "distill.only=true", "model.lora.rank=4"))
    lines = metrics(tmp_path)
    divergences = [line["distill/divergence"] for line in lines]
    assert all(line["train/loss"] == line["distill/divergence"] for line in lines)
    assert lines[0]["timing/teacher_compute"] > 0
    # 0.76 was measured; a student that does not learn stays near 1.
    assert sum(divergences[-4:]) < 0.88 * sum(divergences[:4])


@pytest.mark.slow
def test_a_dry_run_shows_the_teacher(assets, tmp_path):
    command = [sys.executable, *arguments(assets, tmp_path, "dry_run=true")]
    output = run(command).stdout
    assert "memory of one rank for the teacher" in output
    assert "output matrix of the teacher" in output
    assert "teacher outputs, host" in output
