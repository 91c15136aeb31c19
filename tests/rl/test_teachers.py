"""What a step adds for teachers, a reference or a reward model, with numbers worked out by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import train_ppo
from config import InputError
from data.batching.batch import Batch
from data.prompts import Prompt
from engines.model.model_files import fingerprint
from engines.model.routes import FIELD as ROUTES
from engines.teacher import NUMBER
from job.resume import IDENTITY_OF_REFERENCE
from rl import models, scoring, teacher, updates
from rl.losses import ActorLoss
from rl.settings import check_settings
from rollout.grading.results import Reward
from tests.rl.test_losses import loss_of
from tests.support.models import make_model
from tests.support.samples import configure, failure, make_samples, whole

TEACHER = "algorithm.distill.teacher=wise"
TWO_TEACHERS = "algorithm.distill.teachers={a: first, b: second}"
REFERENCE = "algorithm.use_kl_loss=true"
LORA = "model.lora.rank=4"


@pytest.mark.parametrize("only", [False, True])
def test_the_divergence_from_a_teacher_is_weighted_like_the_policy_loss(only):
    settings = [TEACHER, "algorithm.distill.coef=0.4", f"algorithm.distill.only={only}"]
    fields = {
        "loss_weight": torch.tensor([0.5, 0.25]),
        "token_weight": torch.tensor([0.5, 0.5]),
        "advantages": torch.tensor([1.0, -1.0]),
        "rollout_log_probs": torch.tensor([-1.0, -1.0]),
        "sequence": torch.tensor([0, 1]),
        "divergence": torch.tensor([2.0, 8.0], requires_grad=True),
    }
    log_probs = torch.tensor([-1.5, -0.5])
    loss, amounts = ActorLoss(configure(*settings), 2)(log_probs, torch.ones(2), fields)
    loss.backward()
    assert fields["divergence"].grad.tolist() == pytest.approx([0.4 * 0.5, 0.4 * 0.25])
    policy_loss = 0.0 if only else -0.5 + 0.25
    assert loss.item() == pytest.approx(policy_loss + 0.4 * (0.5 * 2 + 0.25 * 8))
    assert amounts["distill/divergence"].item() == pytest.approx(0.5 * 2 + 0.5 * 8)
    assert ("pg_loss" in amounts) != only
    assert not any(name.startswith("distill/share") for name in amounts)


def test_each_of_several_teachers_has_a_mean_divergence():
    """A teacher without tokens has none."""
    fields = {"divergence": [2.0, 8.0], NUMBER: [1, 1]}
    _, amounts, _ = loss_of([-1.5, -0.5], TWO_TEACHERS, token_weight=[0.25, 0.75], **fields)
    expected = {"distill/share/a": 0.0, "distill/share/b": 1.0, "distill/divergence/a": 0.0}
    expected |= {"distill/divergence/b": 6.5, "distill/divergence": 6.5}
    assert {name: amounts[name] for name in expected} == pytest.approx(expected)
    half = {"distill/share/a": 0.0, "distill/divergence/a": 0.0, "actor/loss": 1.0}
    half |= {"distill/share/b": 0.5, "distill/divergence/b": 3.0}
    metrics = teacher.teacher_metrics(configure(TWO_TEACHERS), half)
    expected = {"distill/share/a": 0.0, "actor/loss": 1.0}
    assert metrics == expected | {"distill/share/b": 0.5, "distill/divergence/b": 6.0}
    unmeasured = {"actor/loss": 1.0}
    assert teacher.teacher_metrics(configure(TWO_TEACHERS), unmeasured) == unmeasured


@pytest.mark.parametrize("has_several", [False, True])
def test_a_teacher_sees_the_same_responses_after_its_own_prompts(has_several):
    """Of the tokens [0 1 | 2 3], [4 5 | 6] and [8 9], whose response has no learned token.

    The second response has an end that is not learned.
    """
    samples = make_samples([2, 1, 1], [1.0, 0.0, 0.0], [0, 0, 0])
    mask = torch.tensor([0, 0, 1, 1, 0, 0, 1, 0, 0, 0.0])
    fields = {"loss_mask": mask}
    if has_several:
        fields[NUMBER] = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0, 1, 1])
    cu_seqlens = torch.tensor([0, 4, 8, 10])
    batch = replace(samples.batch, input_ids=torch.arange(10), cu_seqlens=cu_seqlens, fields=fields)
    prompts = [Prompt([], "", {}, teacher_ids=x) for x in ([20, 21, 22], [30], [40])]
    samples = replace(samples, batch=batch, prompts=prompts, lengths=cu_seqlens.diff())
    seen = teacher.after_teacher_prompts(samples)
    assert seen.batch.input_ids.tolist() == [20, 21, 22, 2, 3, 30, 6, 7, 40]
    assert seen.batch.fields["loss_mask"].tolist() == [0, 0, 0, 1, 1, 0, 1, 0, 0]
    assert seen.batch.lengths == seen.lengths.tolist() == [5, 3, 1]
    if has_several:
        assert seen.batch.fields[NUMBER].tolist() == [1] * 5 + [0] * 3 + [1]
    else:
        assert NUMBER not in seen.batch.fields


def test_a_row_names_its_teacher_as_text_or_as_a_number():
    samples = make_samples([1, 2], [1.0, 0.0], [0, 0])
    prompts = [Prompt([], "", {"teacher": name}) for name in (2, "1")]
    samples = replace(samples, prompts=prompts)
    key = "algorithm.distill.teacher_key=teacher"
    teacher.number_teachers(configure("algorithm.distill.teachers={'1': x, '2': y}", key), samples)
    assert samples.batch.fields[NUMBER].tolist() == [1] * 3 + [0] * 4
    assert samples.batch.fields[NUMBER].dtype == torch.int64


def test_metrics_of_an_update_have_the_name_of_the_role_unless_they_have_a_group():
    """The mismatch of routing is that of the first step; all others are means."""

    class Engine:
        num_steps = 0

        def train_batch(self, batch, loss_fn, step, micro_batches):
            self.num_steps += 1
            number = float(self.num_steps)
            names = ("loss", "skipped", "distill/divergence", "routing_mismatch")
            return dict.fromkeys(names, number)

    part = (None, SimpleNamespace(micro_batches=None))
    metrics = updates.update(Engine(), [part, part], None, 0, 2, "actor")
    assert metrics == {
        "actor/loss": 2.5,
        "distill/divergence": 2.5,
        "actor/skipped": 10.0,
        "rollout_corr/routing_mismatch": 1.0,
    }


@pytest.mark.parametrize(
    "function, parts, names",
    [
        ("exact_match", {}, ["function", "model"]),
        ("none", {}, ["model"]),
        ("my.py:f", {"right": torch.ones(2)}, ["right", "model"]),
    ],
)
def test_the_score_of_a_reward_model_is_a_part_beside_those_of_the_function(function, parts, names):
    settings = ["reward.model.path=rm", "reward.model.weight=0.5", f"reward.function={function}"]
    samples = make_samples([1, 2], [1.0, 0.0], [0, 0])
    samples = replace(samples, parts={**parts, "model": torch.tensor([4.0, 2.0])})
    scored = scoring.add_to_scores(configure(*settings), samples)
    assert scored.scores.tolist() == [3.0, 1.0]
    assert [*scored.parts] == names
    metrics = {name for name in scored.metrics if name.startswith("reward/")}
    own = {f"reward/{name}/mean" for name in names if name != "model"}
    assert metrics == own | {"reward/informative_groups"}
    assert scored.metrics["score/mean"] == 2.0


@pytest.mark.parametrize("positions, max_tokens", [(50, 49), (None, 99), (200, 99)])
def test_a_reward_model_reads_any_text_and_leaves_room_for_the_score(
    monkeypatch, process_group, positions, max_tokens
):
    chat = SimpleNamespace(may_drop=False)
    monkeypatch.setattr(scoring, "load_chat", lambda config: chat)
    config = configure("reward.model.path=rm", "data.max_tokens_per_micro_batch=100")
    hf_config = SimpleNamespace(max_position_embeddings=positions)
    model = scoring.RewardModel(config, SimpleNamespace(config=config, hf_config=hf_config), [])
    assert model.max_tokens == max_tokens
    assert chat.may_drop, "the policy may write any character"
    scored = model.score(make_samples([], [], []), None)
    assert len(scored.parts["model"]) == 0
    assert math.isnan(scored.metrics["reward/model/mean"])


@pytest.mark.parametrize(
    "settings, has_weights, is_identified",
    [
        ([], True, False),
        ([REFERENCE], True, True),
        ([REFERENCE, "reference.path=other"], True, False),
        ([REFERENCE, LORA], True, False),
        ([REFERENCE, "dry_run=true"], False, False),
    ],
)
def test_the_weights_of_model_path_are_identified_if_they_are_the_reference(
    tmp_path, settings, has_weights, is_identified
):
    path = make_model(tmp_path, "qwen3", num_hidden_layers=1)
    if not has_weights:
        (path / "model.safetensors").unlink()
    config = configure(*settings, path=path)
    expected = fingerprint(path) if is_identified else None
    assert models.reference_fingerprint(config) == expected
    run = SimpleNamespace(
        config=config,
        train=SimpleNamespace(name="0123"),
        order=SimpleNamespace(identity={"data.sampler": "mine"}),
    )
    hf_config = SimpleNamespace(model_type="qwen3", num_hidden_layers=2, hidden_size=8)
    identity = train_ppo.identify_run(run, hf_config)
    assert identity.get(IDENTITY_OF_REFERENCE) == expected
    assert identity["data.sampler"] == "mine"
    assert identity["critic"] is False
    settings_of_run = {key: identity[key] for key in ("rollout.n", "algorithm.adv_estimator")}
    assert settings_of_run == {"rollout.n": 8, "algorithm.adv_estimator": "grpo"}
    assert identity["rollout.partial.enable"] is False


class Grader:
    """Grades as many responses as it gets, or fails."""

    def __init__(self, takes_groups: bool, fails: bool = False):
        self.takes_groups = takes_groups
        self.fails = fails
        self.calls: list = []

    def grade(self, items, groups):
        self.calls.append((items, groups))
        graded = failure(0) if self.fails else Reward(0.5, {"right": 1.0})
        return [graded] * len(items)


@pytest.mark.parametrize("takes_groups", [False, True])
def test_a_dry_run_grades_the_true_answer_to_the_first_prompt(capsys, takes_groups):
    prompts = [Prompt([], "1+2", {"answer": 3}), Prompt([], "other", {})]
    config = configure("rollout.n=2")
    grader = Grader(takes_groups)
    train_ppo.grade_one(config, grader, prompts)
    number = 2 if takes_groups else 1
    assert grader.calls == [([("1+2", "3", {"answer": 3})] * number, [0] * number)]
    expected = "reward: exact_match gives 0.5, right 1 for the response '3' to the first prompt\n"
    assert capsys.readouterr().out == expected
    with pytest.raises(InputError, match="reward.function=exact_match cannot grade the response"):
        train_ppo.grade_one(config, Grader(takes_groups, fails=True), prompts)


def test_only_the_policy_loss_is_left_out_where_the_divergence_is_the_whole_loss():
    """The entropy bonus, the reference and rejected tokens (here none) keep their parts."""
    settings = [TEACHER, REFERENCE, "algorithm.distill.only=true", "algorithm.distill.coef=0.4"]
    settings += ["algorithm.entropy_coeff=0.1", "algorithm.kl_loss_coef=2"]
    settings += ["algorithm.kl_loss_type=k2"]
    fields = {"divergence": [2.0, 8.0], "ref_log_probs": [-2.5, -1.0]}
    loss, amounts, _ = loss_of([-1.5, -0.5], *settings, **fields)
    # The weights in the loss are 0.5 and 0.25, and those in means 0.5 each.
    kl = 0.5 * 1.0**2 / 2 + 0.25 * 0.5**2 / 2
    entropy = 0.5 * 1.0 + 0.25 * 3.0
    divergence = 0.5 * 2.0 + 0.25 * 8.0
    assert amounts["kl_loss"] == pytest.approx(kl)
    assert amounts["entropy"] == pytest.approx(2.0)
    assert amounts["distill/divergence"] == pytest.approx(5.0)
    assert loss == pytest.approx(-0.1 * entropy + 2 * kl + 0.4 * divergence)
    assert not [name for name in amounts if name.startswith("pg_")]


@pytest.mark.parametrize(
    "setting",
    [
        "algorithm.adv_estimator=rloo",
        "algorithm.adv_kwargs={k: 2}",
        "algorithm.whiten_advantages=true",
        "algorithm.gamma=0.5",
        "algorithm.lam=0.5",
        "algorithm.loss_mode=gspo",
        "algorithm.loss_kwargs={a: 1}",
        "algorithm.clip_ratio_low=0.1",
        "algorithm.clip_ratio_high=0.1",
        "algorithm.clip_ratio_c=0",
        "algorithm.use_kl_in_reward=true",
        "algorithm.rollout_is=token",
        "algorithm.filter_groups.enable=true",
        "reward.overlong_buffer=4",
        "reward.step_rewards=true",
    ],
)
def test_nothing_of_the_policy_loss_is_set_where_it_is_left_out(setting):
    key = setting.partition("=")[0]
    config = configure(TEACHER, "algorithm.distill.only=true", setting)
    with pytest.raises(InputError, match=rf"^{key}=.* does nothing with algorithm.distill.only"):
        teacher.check_distillation(config)
    teacher.check_distillation(configure(TEACHER, setting))


@pytest.mark.parametrize(
    "setting",
    [
        "algorithm.entropy_coeff=0.1",
        "algorithm.use_kl_loss=true",
        "algorithm.rollout_rs=token",
        "algorithm.mask_truncated=true",
        "algorithm.loss_agg_mode=seq-mean-token-mean",
        "algorithm.ppo_epochs=2",
        "reward.function=none",
    ],
)
def test_what_does_not_belong_to_the_policy_loss_may_be_set_without_it(setting):
    check_settings(configure(TEACHER, "algorithm.distill.only=true", setting))


@pytest.mark.parametrize("has_own_prompts", [False, True])
def test_the_results_of_a_teacher_stand_at_the_tokens_of_the_policys_sequences(has_own_prompts):
    """A teacher with another prompt has other sequences, and as many sampled tokens."""
    samples = make_samples([2, 1], [1.0, 0.0], [0, 0])
    share = whole(samples)
    share.batch.fields[ROUTES] = torch.zeros(7, 2, 1)
    computed = []

    class Teachers:
        engine = SimpleNamespace(divide_share=lambda lengths: ("divided", lengths))

        def compute(self, parts):
            computed.extend(parts)
            num_tokens = sum(len(batch.input_ids) for batch, _ in parts)
            return {"teacher_hidden": torch.arange(1.0, num_tokens + 1)[:, None]}

    if has_own_prompts:
        mask = torch.tensor([0, 1.0, 1, 0, 0, 0, 1])
        share.teacher_batch = Batch(torch.arange(7), torch.tensor([0, 3, 7]), {"loss_mask": mask})
    teacher.compute(Teachers(), share)
    ((batch, micro_batches),) = computed
    hidden = share.batch.fields["teacher_hidden"][:, 0].tolist()
    if has_own_prompts:
        assert batch is share.teacher_batch
        assert micro_batches == ("divided", [3, 4])
        assert hidden == [0, 0, 2, 3, 0, 0, 7]
    else:
        assert ROUTES not in batch.fields
        assert micro_batches == share.plans[0].micro_batches
        assert hidden == [1, 2, 3, 4, 5, 6, 7]


def test_a_teacher_may_have_more_tokens_than_the_policy_but_a_critic_may_not(monkeypatch):
    """Those of padding, for example; check_teachers() knows which ones."""

    def check(config, world_size, head):
        sizes = {"wise": 9, "judge": 8, "scorer": 30}
        return SimpleNamespace(vocab_size=sizes.get(config.model.path, 8))

    checked = []
    monkeypatch.setattr(models, "engine_class", lambda name: SimpleNamespace(check=check))
    monkeypatch.setattr(models, "check_is_classifier", lambda config: None)
    monkeypatch.setattr(models, "check_teachers", lambda config, found: checked.append({**found}))
    settings = ["algorithm.adv_estimator=gae", "critic.path=judge", "reward.model.path=scorer"]
    assert models.check_models(configure(TEACHER, *settings), 1).vocab_size == 8
    (found,) = checked
    assert {role: x.vocab_size for role, x in found.items()} == {
        "actor": 8,
        "critic": 8,
        "teacher": 9,
        "reward model": 30,
    }
    with pytest.raises(InputError, match="critic.path=wise has a vocabulary of 9 tokens"):
        models.check_models(configure(TEACHER, *settings, "critic.path=wise"), 1)


@pytest.mark.parametrize(
    "name, problem", [(None, "names no teacher"), ("cod", "names the teacher 'cod'")]
)
def test_a_row_without_a_teacher_is_named_with_its_file_and_its_column(name, problem):
    """An empty cell is no name, even if a teacher is called None."""
    settings = ["algorithm.distill.teachers={code: x, None: y}", "data.train_files=[a, b]"]
    settings.append("algorithm.distill.teacher_key=judge")
    rows = [{"judge": "code", "teacher": "math"}, {"judge": name, "teacher": "math"}]
    message = (
        rf"^data.train_files=\['a', 'b'\]: row 2 of the selected rows {problem} in the column "
        "judge: it must be one of code, None, "
    )
    with pytest.raises(InputError, match=message):
        teacher.check_rows(configure(*settings), SimpleNamespace(rows=rows))
