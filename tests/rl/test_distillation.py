"""On-policy distillation: a whole step against plain autograd in float64, and users' mistakes."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
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
from engines.heads import Head
from engines.memory import LABELS
from engines.teacher_settings import teacher_roles
from engines.teaching import Teachers
from examples.arithmetic import make_rows, make_tokenizer
from rl import updates
from rl.estimation import set_advantages
from rl.losses import ActorLoss
from rl.models import check_models, mini_batch_prompts, role_configs
from rl.settings import check_settings
from rl.teacher import (
    after_teacher_prompts,
    check_rows,
    check_teachers,
    compute,
    number_teachers,
    teacher_metrics,
)
from rollout.samples import Samples
from rollout.sharing import divide
from tests.engines.test_divergence import formula, with_rest
from tests.support.cases import slow_unless_quick
from tests.support.guarded import unguarded
from tests.support.launch import launch, metrics, run
from tests.support.models import make_model
from tests.support.ranks import on_ranks
from tests.support.samples import configure, make_samples

PROMPTS = [[5, 6], [7, 8, 9]]
RESPONSES = [[10, 11, 12, 13], [14], [15, 16, 17], [18, 19], [20, 21, 22], [23, 24]]
GROUPS = [0, 0, 0, 1, 1, 1]
SCORES = [0.0, 0.2, 1.0, 0.4, 0.1, 0.9]
COEF = 0.7
TEMPERATURE = 1.5


# The prompts that a teacher may see in place of PROMPTS, and the teacher of each of them.
TEACHER_PROMPTS = [[5, 40, 41, 6], [42, 7]]
TEACHER_OF_GROUP = ["narrow", "wide"]


class Case(NamedTuple):
    """A step: the number of ranks, settings of the divergence, and whether it is the whole loss.

    teacher: one, several or self. With `prompts`, teachers see TEACHER_PROMPTS.
    student: student, or experts: a student with experts beside a teacher without them.
    """

    num_ranks: int
    mode: str
    top_k: int
    only: bool
    more: tuple[str, ...] = ()
    teacher: str = "one"
    prompts: bool = False
    student: str = "student"


MEGATRON = ("model_engine=megatron", "engine.tensor_model_parallel_size=2")
PIPELINE = ("model_engine=megatron", "engine.pipeline_model_parallel_size=2")
CONTEXT = ("engine.context_parallel_size=2",)
SEQUENCE_MEAN = ("algorithm.loss_agg_mode=seq-mean-token-mean",)
DYNAMIC = ("engine.context_parallel_size=auto", "data.max_tokens_per_micro_batch=6")
ADAPTERS = ("model.lora.rank=4",)
EXPERTS_MEGATRON = (
    "model_engine=megatron",
    "engine.expert_model_parallel_size=2",
    "engine.router_aux_loss_coef=0.0",
)
EXPERTS = ("engine.router_aux_loss_coef=0.0",)
BF16 = ("engine.compute_dtype=bfloat16",)
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
    Case(2, "jsd", 0, False, PIPELINE),
    Case(2, "reverse_kl", 5, True, CONTEXT),
    Case(1, "reverse_kl", 0, True, SEQUENCE_MEAN),
    Case(1, "forward_kl", 5, True, BF16),
    Case(1, "jsd", 0, True, BF16),
    Case(1, "reverse_kl", 0, False, teacher="several"),
    Case(2, "jsd", 5, True, teacher="several"),
    Case(2, "forward_kl", 0, True, teacher="several", prompts=True),
    Case(2, "reverse_kl", 0, True, DYNAMIC, teacher="several"),
    Case(2, "reverse_kl", 0, True, MEGATRON, teacher="several"),
    Case(2, "jsd", 5, False, PIPELINE, teacher="several"),
    Case(1, "reverse_kl", 0, True, teacher="self", prompts=True),
    Case(2, "forward_kl", 5, False, teacher="self", prompts=True),
    Case(2, "jsd", 0, True, CONTEXT, teacher="self", prompts=True),
    Case(2, "reverse_kl", 0, True, MEGATRON, teacher="self", prompts=True),
    Case(2, "jsd", 0, False, PIPELINE, teacher="self", prompts=True),
    Case(1, "jsd", 0, True, ADAPTERS, teacher="self", prompts=True),
    Case(2, "reverse_kl", 5, True, MEGATRON, teacher="several", prompts=True),
    Case(1, "jsd", 0, True, teacher="one", prompts=True),
    # Each rank has the whole student, and a part of the teacher.
    Case(2, "jsd", 0, True, ("engine.fsdp_size=1", "algorithm.distill.fsdp_size=-1")),
    Case(1, "reverse_kl", 0, True, EXPERTS, student="experts"),
    Case(2, "reverse_kl", 0, True, EXPERTS_MEGATRON, student="experts"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Make a student, and a teacher of another family whose embedding has more padding."""
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "student", "qwen3", num_hidden_layers=2)
    make_model(folder / "teacher", "llama", hidden_size=48, vocab_size=104, num_hidden_layers=2)
    make_model(folder / "experts", "qwen3_moe", num_hidden_layers=2)
    make_model(folder / "wide", "qwen3", hidden_size=80, num_hidden_layers=2)
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
        [prompt_of(GROUPS[i]) for i in held.tolist()],
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
    number_teachers(config, samples)
    mini_batches = samples.mini_batches(mini_batch_prompts(config))
    seen_by_teacher = None
    if config.data.teacher_prompt_key:
        seen_by_teacher = after_teacher_prompts(samples)
    return samples, divide(samples, mini_batches, actor, seen_by_teacher=seen_by_teacher)


def prompt_of(group: int) -> Prompt:
    row = {"teacher": TEACHER_OF_GROUP[group]}
    return Prompt(PROMPTS[group], "", row, teacher_ids=TEACHER_PROMPTS[group])


def settings_of(case: Case, models: Path):
    teachers = {
        "one": f"algorithm.distill.teacher={models}/teacher",
        "several": f"algorithm.distill.teachers={{narrow: {models}/teacher, wide: {models}/wide}}",
        "self": "algorithm.distill.teacher=self",
    }
    if case.prompts:
        case = case._replace(more=("data.teacher_prompt_key=hint", *case.more))
    return configure(
        teachers[case.teacher],
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
        path=models / case.student,
    )


def distilled_step(case: Case, models: Path, num_steps: int = 1) -> list[dict[str, float]]:
    """Train on the same samples in each step, and return the metrics of the steps."""
    config = settings_of(case, models)
    device = torch.device("cpu")
    roles = role_configs(config)
    build = engine_class(config.model_engine)
    with unguarded():  # the engines' own tests have the guard
        actor = build(roles["actor"], device, num_steps)
        engines = [
            build(roles[role], device, num_steps, optimize=False) for role in teacher_roles(config)
        ]
    teachers = Teachers(config, engines, actor, [])
    results = []
    for step in range(num_steps):
        samples, share = make_share(config, actor)
        assert sum(len(plan.micro_batches) for _, plan in share.parts) > 1
        compute(teachers, share)
        set_advantages(config, samples, share, 0.0)
        loss_fn = ActorLoss(config, len(share.batch))
        with teachers.teaching(actor):
            metrics = updates.update(actor, share.parts, loss_fn, step, 1, "actor")
        results.append(teacher_metrics(config, metrics))
    assert not teachers.matrices
    return results


def distill_on_ranks(
    case: Case, folder: Path, models: Path, num_steps: int = 1
) -> list[list[dict[str, float]]]:
    """Return the metrics of the steps on every rank. Ranks meet in `folder`."""
    # Ranks are forks of this process, so that they need not import the engine themselves.
    engine_class(settings_of(case, models).model_engine)
    return on_ranks(case.num_ranks, folder, distilled_step, case, models, num_steps)


class Expected(NamedTuple):
    """The results of a step."""

    loss: float
    divergence: float
    grad_norm: float
    of_group: list[float]


def expected_step(case: Case, models: Path) -> Expected:
    """Compute a step with transformers and autograd in float64."""
    student = AutoModelForCausalLM.from_pretrained(
        models / case.student, dtype=torch.float64, experts_implementation="eager"
    )
    teachers = teachers_of_groups(case, models)
    num_tokens = sum(map(len, RESPONSES))
    sums = [0.0, 0.0]
    divergence = torch.zeros((), dtype=torch.float64)
    distill_loss = torch.zeros((), dtype=torch.float64)
    policy_loss = torch.zeros((), dtype=torch.float64)
    for i, sequence in enumerate(sequences()):
        ids = torch.tensor([sequence])
        targets = torch.tensor(RESPONSES[i])
        predicting = slice(-len(targets) - 1, -1)
        logits = student(ids).logits[0, predicting]
        with torch.no_grad():
            group = GROUPS[i]
            prompt = TEACHER_PROMPTS[group] if case.prompts else PROMPTS[group]
            seen = torch.tensor([prompt + RESPONSES[i]])
            teacher_logits = teachers[group](seen).logits[0, predicting]
        of_sequence = divergences(case, logits, teacher_logits).sum()
        divergence = divergence + of_sequence
        sums[GROUPS[i]] += of_sequence.item()
        is_sequence_mean = case.more == SEQUENCE_MEAN
        denominator = len(RESPONSES) * len(targets) if is_sequence_mean else num_tokens
        distill_loss = distill_loss + of_sequence / denominator
        log_probs = logits.log_softmax(-1).gather(1, targets[:, None])
        policy_loss = policy_loss - advantage(i) * (log_probs - log_probs.detach()).exp().sum()
    loss = COEF * distill_loss
    if not case.only:
        loss = loss + policy_loss / num_tokens
    loss.backward()
    norms = [p.grad.norm() for p in student.parameters() if p.grad is not None]
    grad_norm = torch.stack(norms).norm().item()
    lengths = [0, 0]
    for group, response in zip(GROUPS, RESPONSES):
        lengths[group] += len(response)
    of_group = [total / length for total, length in zip(sums, lengths)]
    return Expected(loss.item(), divergence.item() / num_tokens, grad_norm, of_group)


def teachers_of_groups(case: Case, models: Path) -> list:
    """Return the teacher of each group, with weights in float64."""
    names = {"one": ["teacher"] * 2, "several": ["teacher", "wide"], "self": ["student"] * 2}
    return [
        AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float64)
        for name in names[case.teacher]
    ]


def divergences(case: Case, logits: Tensor, teacher_logits: Tensor) -> Tensor:
    num_tokens = min(logits.shape[1], teacher_logits.shape[1])
    log_p = (logits[:, :num_tokens] / TEMPERATURE).log_softmax(-1)
    log_q = (teacher_logits[:, :num_tokens] / TEMPERATURE).log_softmax(-1)
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
    tolerance = 3e-2 if case.more == BF16 else 1e-5
    for (measured,) in results:
        assert measured["actor/loss"] == pytest.approx(expected.loss, rel=tolerance, abs=1e-7)
        # Adapters are trained in place of the weights.
        if case.more != ADAPTERS:
            assert measured["actor/grad_norm"] == pytest.approx(expected.grad_norm, rel=tolerance)
        # The difference of two log-probabilities of about -5, each rounded to fp32.
        divergence = pytest.approx(expected.divergence, rel=tolerance, abs=1e-6)
        assert measured["distill/divergence"] == divergence
        assert ("actor/pg_loss" in measured) != case.only
        if case.teacher == "several":
            for name, divergence in zip(TEACHER_OF_GROUP, expected.of_group):
                key = f"distill/divergence/{name}"
                assert measured[key] == pytest.approx(divergence, rel=tolerance)


def str_of_case(case: Case) -> str:
    prompts = ["prompts"] if case.prompts else []
    names = [*case[:4], *case.more, case.teacher, *prompts]
    if case.student != "student":
        names.append(case.student)
    return "-".join(map(str, names))


def is_quick(case: Case) -> bool:
    """Return whether quick tests include a case: two of those on one rank."""
    is_small = case.num_ranks == 1 and not case.only
    return is_small and (case.teacher == "several" or case.mode == "forward_kl")


@pytest.mark.parametrize("case", slow_unless_quick(CASES, is_quick, str_of_case))
def test_a_step_equals_plain_autograd_in_float64(models, tmp_path, case):
    check_step(case, models, distill_on_ranks(case, tmp_path, models))


@pytest.mark.parametrize(
    "case",
    slow_unless_quick(
        [
            Case(1, "reverse_kl", 5, False),
            Case(1, "reverse_kl", 0, False),
            Case(2, "jsd", 5, False, MEGATRON),
        ],
        lambda case: case.num_ranks == 1 and case.top_k == 5,
        str_of_case,
    ),
)
def test_tokens_of_the_student_alone_are_left_out(models, tmp_path, case):
    """The student's embedding has 104 rows, and the teacher's has 97."""
    (tmp_path / "student").symlink_to(models / "teacher")
    (tmp_path / "teacher").symlink_to(models / "student")
    check_step(case, tmp_path, distill_on_ranks(case, tmp_path, tmp_path))


@pytest.mark.slow
def test_a_policy_that_teaches_itself_does_so_with_its_current_weights(
    models, tmp_path, monkeypatch
):
    """With the same prompts, its divergence from itself is 0, also after a step."""
    monkeypatch.setattr(sys.modules[__name__], "TEACHER_PROMPTS", PROMPTS)
    case = Case(1, "reverse_kl", 0, False, ("optim.lr=0.1",), teacher="self", prompts=True)
    (steps,) = distill_on_ranks(case, tmp_path, models, num_steps=2)
    assert abs(steps[1]["actor/entropy"] - steps[0]["actor/entropy"]) > 1e-2
    assert [abs(step["distill/divergence"]) < 1e-6 for step in steps] == [True, True]


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
    ((measured,),) = distill_on_ranks(case, tmp_path, models)
    assert measured["distill/divergence"] == pytest.approx(loss.item(), rel=1e-5)


# -- users' mistakes -------------------------------------------------------------------------------

TEACHER = "algorithm.distill.teacher=there"
ONLY = "algorithm.distill.only=true"
SEVERAL = "algorithm.distill.teachers={math: there, code: here}"
HINT = "data.teacher_prompt_key=hint"
MISTAKES = {
    "whitened advantages that nothing reads": (
        [TEACHER, ONLY, "algorithm.whiten_advantages=true"],
        "algorithm.whiten_advantages=True does nothing with algorithm.distill.only=true",
    ),
    "only without a teacher": ([ONLY], "does nothing without algorithm.distill.teacher"),
    "a mode without a teacher": (
        ["algorithm.distill.mode=jsd"],
        "algorithm.distill.mode=jsd does nothing without algorithm.distill.teacher",
    ),
    "no reward and no teacher": (
        ["reward.function=none"],
        "set algorithm.distill.teacher and algorithm.distill.only=true",
    ),
    "no reward, and a reward model without weight": (
        ["reward.function=none", "reward.model.path=there", "reward.model.weight=0"],
        "reward.model.weight=0 and reward.function=none give every response 0",
    ),
    "no reward, and a policy loss": (
        ["reward.function=none", TEACHER],
        "set algorithm.distill.teacher and algorithm.distill.only=true",
    ),
    "an estimator that nothing reads": (
        [TEACHER, ONLY, "algorithm.adv_estimator=rloo"],
        "algorithm.adv_estimator=rloo does nothing with algorithm.distill.only=true",
    ),
    "a correction that nothing reads": (
        [TEACHER, ONLY, "algorithm.rollout_is=token"],
        "algorithm.rollout_is=token does nothing with algorithm.distill.only=true",
    ),
    "groups that are filtered for nothing": (
        [TEACHER, ONLY, "algorithm.filter_groups.enable=true"],
        "algorithm.filter_groups.enable=True does nothing with algorithm.distill.only=true",
    ),
    "a penalty that nothing reads": (
        [TEACHER, ONLY, "reward.overlong_buffer=16"],
        "reward.overlong_buffer=16 does nothing with algorithm.distill.only=true",
    ),
    "an unknown mode": (
        [TEACHER, "algorithm.distill.mode=kl"],
        "algorithm.distill.mode='kl' must be one of reverse_kl, forward_kl, jsd",
    ),
    "one teacher and several": (
        [TEACHER, SEVERAL],
        "algorithm.distill.teacher=there and algorithm.distill.teachers name teachers twice",
    ),
    "a column of teachers without teachers": (
        [TEACHER, "algorithm.distill.teacher_key=source"],
        "algorithm.distill.teacher_key=source does nothing without algorithm.distill.teachers",
    ),
    "a policy that teaches itself nothing": (
        ["algorithm.distill.teacher=self"],
        "algorithm.distill.teacher=self teaches nothing without data.teacher_prompt_key",
    ),
    "a policy that is one of several teachers": (
        ["algorithm.distill.teachers={math: self, code: here}", HINT],
        "algorithm.distill.teachers.math=self does not work",
    ),
    "prompts of no teacher": (
        [HINT],
        "data.teacher_prompt_key=hint does nothing without algorithm.distill.teacher",
    ),
    "prompts of a teacher in episodes": (
        [TEACHER, HINT, "rollout.episode=agent.py:play", "rollout.max_episode_tokens=4096"],
        "data.teacher_prompt_key=hint does not work with rollout.episode=agent.py:play",
    ),
    "prompts of a teacher with images": (
        [TEACHER, HINT, "model.images=true"],
        "data.teacher_prompt_key=hint does not work with model.images=true",
    ),
    "prompts of a teacher with dynamic groups": (
        [TEACHER, HINT, "engine.context_parallel_size=auto"],
        "data.teacher_prompt_key=hint does not work with engine.context_parallel_size=auto",
    ),
    "no weight": ([TEACHER, "algorithm.distill.coef=0"], "algorithm.distill.coef=0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name):
    settings, message = MISTAKES[name]
    with pytest.raises(InputError) as error:
        check_settings(configure(*settings))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        [TEACHER],
        [TEACHER, ONLY, "reward.function=none", "rollout.n=1"],
        [TEACHER, ONLY, "algorithm.use_kl_loss=true", "algorithm.rollout_rs=token"],
        [SEVERAL, "algorithm.distill.teacher_key=source", "algorithm.distill.top_k=8"],
        ["algorithm.distill.teacher=self", HINT, "algorithm.distill.mode=jsd"],
        [SEVERAL, HINT, "offload.reference=false"],
    ],
)
def test_these_settings_are_right(settings):
    check_settings(configure(*settings))


def test_a_path_of_a_teacher_is_text():
    with pytest.raises(InputError) as error:
        configure("algorithm.distill.teachers={math: 3}")
    assert "algorithm.distill.teachers.math=3 must be a string" in str(error.value)


@pytest.mark.parametrize(
    "row, message",
    [({"teacher": "mth"}, "names the teacher 'mth'"), ({}, "names no teacher in the column")],
)
def test_a_row_that_names_no_teacher_is_one_line(row, message):
    dataset = SimpleNamespace(rows=[{"teacher": "math"}, row])
    with pytest.raises(InputError) as error:
        check_rows(configure(SEVERAL), dataset)
    assert message in str(error.value)
    assert "row 2 of the selected rows" in str(error.value)
    assert "one of math, code" in str(error.value)
    check_rows(configure(SEVERAL), SimpleNamespace(rows=[{"teacher": "code"}]))


def test_a_policy_that_teaches_itself_needs_another_prompt_in_some_row(capsys):
    config = configure("algorithm.distill.teacher=self", HINT)
    same = Prompt([1, 2], "", {}, teacher_ids=[1, 2])
    other = Prompt([1, 2], "", {}, teacher_ids=[1, 3])
    with pytest.raises(InputError, match="data.teacher_prompt_key=hint names the policy's own"):
        check_rows(config, [same, same])
    check_rows(config, [same, other, same])
    assert "hint names the policy's own prompt in 2 of 3 rows" in capsys.readouterr().out
    check_rows(config, [other, other])
    assert not capsys.readouterr().out


@pytest.mark.parametrize("name", [1, "1"])
def test_the_name_of_a_teacher_may_be_a_number(name):
    config = configure("algorithm.distill.teachers={0: there, 1: here}")
    check_rows(config, SimpleNamespace(rows=[{"teacher": name}]))
    with pytest.raises(InputError, match="names the teacher 2 in .* one of 0, 1"):
        check_rows(config, SimpleNamespace(rows=[{"teacher": 2}]))
    samples = make_samples([2], [0.0], [0])
    samples.prompts[0].row["teacher"] = name
    number_teachers(config, samples)
    assert samples.batch.fields["teacher_number"].tolist() == [1] * 4


def test_an_error_about_a_teacher_names_its_key(models):
    config = configure(
        f"algorithm.distill.teachers={{math: {models}/teacher, code: {models}}}",
        path=models / "student",
    )
    with pytest.raises(InputError, match=r"^algorithm.distill.teachers.code=.* no config.json"):
        check_models(config, 1)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Save the demo's tokenizer, one with a further token, and one of which a token differs."""
    folder = tmp_path_factory.mktemp("tokenizers")
    make_tokenizer().save_pretrained(folder / "policy")
    larger = make_tokenizer()
    larger.add_tokens(["<further>"])
    larger.save_pretrained(folder / "larger")
    make_tokenizer().save_pretrained(folder / "other")
    file = folder / "other" / "tokenizer.json"
    contents = json.loads(file.read_text())
    tokens = contents["model"]["vocab"]
    tokens["7"], tokens["8"] = tokens["8"], tokens["7"]
    file.write_text(json.dumps(contents))
    (folder / "nothing").mkdir()
    return folder


def check_tokenizers(folder: Path, policy: str, teacher: str, *more, num_teacher_tokens: int):
    settings = [f"algorithm.distill.teacher={folder / teacher}", *more]
    config = configure(*settings, path=folder / policy)
    sizes = {"actor": 200, "teacher": num_teacher_tokens}
    check_teachers(config, {role: SimpleNamespace(vocab_size=n) for role, n in sizes.items()})


def test_a_teacher_may_have_a_larger_embedding_and_further_tokens(tokenizers):
    check_tokenizers(tokenizers, "policy", "policy", num_teacher_tokens=264)
    check_tokenizers(tokenizers, "policy", "larger", num_teacher_tokens=264)
    check_tokenizers(tokenizers, "policy", "nothing", num_teacher_tokens=200)


@pytest.mark.parametrize(
    "settings, message",
    [
        (["algorithm.distill.fsdp_size=3"], "fsdp_size=3 does not divide the number of ranks, 2"),
        (
            ["algorithm.distill.fsdp_size=1", "model_engine=megatron"],
            "fsdp_size=1 does nothing with model_engine=megatron, where the teacher has the",
        ),
        (
            ["algorithm.distill.fsdp_size=1", "algorithm.distill.teacher=self"],
            "fsdp_size=1 does nothing if the teacher is the policy: leave it out",
        ),
    ],
)
def test_a_teacher_cannot_be_divided_so(models, settings, message):
    teacher = f"algorithm.distill.teacher={models}/teacher"
    config = configure(teacher, *settings, path=models / "student")
    with pytest.raises(InputError, match=f"^algorithm.distill.{message}"):
        check_models(config, 2)


def test_a_teacher_has_a_layout_of_its_own(models):
    teacher = f"algorithm.distill.teacher={models}/teacher"
    settings = ["engine.fsdp_size=1", "algorithm.distill.fsdp_size=-1"]
    roles = role_configs(configure(teacher, *settings, path=models / "student"))
    assert roles["actor"].engine.fsdp_size == 1
    assert roles["teacher"].engine.fsdp_size == -1


@pytest.mark.parametrize(
    "teacher, more, num_teacher_tokens, message",
    [
        ("other", [], 200, "has another vocabulary"),
        ("policy", [], 10, "lacks the token"),
        ("nothing", [], 264, "nothing has 264 tokens and model.path="),
        ("nothing", [], 264, "and algorithm.distill.teacher="),
        ("policy", ["algorithm.distill.top_k=201"], 264, "is more than the 200 tokens"),
        ("policy", ["algorithm.distill.top_k=151"], 150, "is more than the 150 tokens"),
    ],
)
def test_another_vocabulary_is_one_line(tokenizers, teacher, more, num_teacher_tokens, message):
    with pytest.raises(InputError) as error:
        check_tokenizers(
            tokenizers, "policy", teacher, *more, num_teacher_tokens=num_teacher_tokens
        )
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_student_without_a_tokenizer_is_the_one_that_is_named(tokenizers):
    with pytest.raises(InputError) as error:
        check_tokenizers(tokenizers, "nothing", "policy", num_teacher_tokens=264)
    lacking = f"and model.path={tokenizers}/nothing has no tokenizer that explains"
    assert lacking in str(error.value)


@pytest.mark.parametrize("num_teacher_tokens", [200, 264])
def test_a_tokenizer_that_cannot_be_read_is_an_error(tokenizers, tmp_path, num_teacher_tokens):
    for name in ("policy", "damaged"):
        shutil.copytree(tokenizers / "policy", tmp_path / name)
    (tmp_path / "damaged" / "tokenizer.json").write_text('{"added_tokens": [], "model": "new"}')
    with pytest.raises(InputError) as error:
        check_tokenizers(tmp_path, "damaged", "policy", num_teacher_tokens=num_teacher_tokens)
    assert f"cannot read the tokenizer of {tmp_path}/damaged: " in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_the_estimate_knows_the_teacher(models, engine):
    """Its output matrix stays on the device during the update, unless the divergence is of K."""
    build = engine_class(engine)

    def estimate(top_k: int, role: str):
        case = Case(1, "jsd", top_k, False, (f"model_engine={engine}",))
        config = role_configs(settings_of(case, models))[role]
        return build.estimate_memory(config, 1, "cpu", Head.LOG_PROBS, role == "actor")[0]

    assert estimate(0, "actor").teacher_matrix == 104 * 48 * 4
    assert estimate(5, "actor").teacher_matrix is None
    assert estimate(0, "teacher").teacher_matrix is None
    # Two prompts with eight responses each, of the longest sequence.
    num_tokens = 2 * 8 * (1024 + 1024)
    assert estimate(0, "actor").teacher_outputs == num_tokens * 48 * 4
    assert estimate(5, "actor").teacher_outputs == num_tokens * (5 * 4 + 6 * 4)
    assert estimate(5, "teacher").teacher_outputs is None
    on_device = [name for name in vars(estimate(0, "actor")) if name in LABELS]
    on_device = [name for name in on_device if name not in ("offloaded", "teacher_outputs")]
    total = sum(getattr(estimate(0, "actor"), name) or 0 for name in on_device)
    assert estimate(0, "actor").device_total == total
    assert estimate(0, "teacher").optimizer is None
    assert estimate(0, "teacher").parameters > estimate(0, "actor").parameters


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """Make a student, a larger teacher of another family, and prompts without answers."""
    folder = tmp_path_factory.mktemp("assets")
    tokenizer = make_tokenizer()
    shape = dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    # vLLM has no attention on CPUs for heads of less than 32 numbers.
    make_model(folder / "student", "qwen3", num_hidden_layers=1, head_dim=32, **shape)
    make_model(folder / "teacher", "llama", num_hidden_layers=2, hidden_size=64, **shape)
    for name in ("student", "teacher"):
        tokenizer.save_pretrained(folder / name)
    train, _ = make_rows()
    rows = [json.dumps({"messages": row["messages"]}) for row in train[:64]]
    (folder / "train.jsonl").write_text("\n".join(rows))
    rows = []
    for number, row in enumerate(train[:64]):
        (message,) = row["messages"][:1]
        hint = [{"role": "user", "content": f"{row['answer']} = {message['content']}"}]
        teacher = ("even", "odd")[number % 2]
        rows.append(json.dumps({"messages": row["messages"][:1], "hint": hint, "teacher": teacher}))
    (folder / "hints.jsonl").write_text("\n".join(rows))
    return folder


def arguments(assets: Path, out: Path, *more: str) -> list[str]:
    return [
        sys.executable,
        "train_ppo.py",
        f"model.path={assets}/student",
        f"algorithm.distill.teacher={assets}/teacher",
        "algorithm.distill.only=true",
        "reward.function=none",
        "reward.num_workers=1",
        f"data.train_files={assets}/train.jsonl",
        f"data.cache_dir={assets}/cache",
        f"output_dir={out}",
        "trainer.report=false",
        "engine.compute_dtype=float32",
        "data.train_batch_size=8",
        "data.max_prompt_length=40",
        "data.max_tokens_per_micro_batch=200",
        "rollout.n=1",
        "rollout.max_tokens=12",
        "rollout.kv_cache_gib=0.05",
        "optim.lr=1e-2",
        *more,
    ]


@pytest.mark.slow
def test_a_student_approaches_its_teacher(assets, tmp_path):
    """Without a reward, and with one response to each prompt."""
    run(arguments(assets, tmp_path, "trainer.total_epochs=4", "algorithm.distill.top_k=16"))
    divergences = [line["distill/divergence"] for line in metrics(tmp_path)]
    assert len(divergences) == 32
    assert divergences[0] > 0.05
    assert sum(divergences[-4:]) < 0.5 * sum(divergences[:4])


@pytest.mark.slow
def test_a_policy_learns_from_itself_with_hints(assets, tmp_path):
    """The policy without the hint approaches the policy with the hint, on two ranks.

    The rows of the validation have no hint.
    """
    more = [
        f"data.train_files={assets}/hints.jsonl",
        f"data.val_files={assets}/train.jsonl",
        "data.val_max_samples=2",
        "algorithm.distill.teacher=self",
        "data.teacher_prompt_key=hint",
        "trainer.total_epochs=4",
    ]
    launch(2, *arguments(assets, tmp_path, *more)[1:])
    _, *lines = metrics(tmp_path)  # The first line is the validation's.
    divergences = [line["distill/divergence"] for line in lines]
    assert sum(divergences[-4:]) < 0.5 * sum(divergences[:4])


@pytest.mark.slow
def test_a_run_with_two_teachers(assets, tmp_path):
    more = [
        f"data.train_files={assets}/hints.jsonl",
        "algorithm.distill.teacher=null",
        f"algorithm.distill.teachers={{even: {assets}/teacher, odd: {assets}/student}}",
        "trainer.total_steps=3",
    ]
    run(arguments(assets, tmp_path, *more))
    first, *_, last = metrics(tmp_path)
    # One of the teachers is the student before the first step.
    assert abs(first["distill/divergence/odd"]) < 1e-6
    assert first["distill/divergence/even"] > 0.05
    assert last["distill/divergence/odd"] > 1e-6
    assert first["distill/share/even"] + first["distill/share/odd"] == pytest.approx(1)


@pytest.mark.slow
def test_a_dry_run_shows_the_teacher(assets, tmp_path):
    output = run(arguments(assets, tmp_path, "dry_run=true")).stdout
    assert "memory of one rank for the teacher" in output
    assert "output matrix of the teacher" in output
    assert "teacher outputs, host" in output
