"""Advantages, losses, their gradients and KL penalties equal those of verl on the same batch."""

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from algorithms.advantages import ADVANTAGES
from algorithms.aggregation import AGGREGATIONS
from algorithms.kl import KL_ESTIMATORS
from algorithms.policy_losses import POLICY_LOSSES
from engines.divergence import (
    Divergence,
    TeacherHead,
    full_divergence,
    top_k_divergence,
    top_k_log_probs,
)
from engines.logprobs import LogitTransform, LogProbSettings
from examples.arithmetic import make_tokenizer
from rl.collecting import penalized_scores
from rl.estimation import next_kl_coef
from rl.losses import ActorLoss, critic_loss
from rl.settings import check_settings
from tests.rl.verl_cases import (
    BASELINES,
    BATCH,
    ESTIMATORS,
    KL_CONTROLS,
    KL_NAMES,
    KL_OF_STEPS,
    LOSSES,
    MAX_TOKENS,
    NOT_SUPPORTED,
    OMITTED,
    ONE_ALONE,
    OURS_ALONE,
    OVERLONG,
    PARTS,
    SCORES,
    TEXTS,
    TOKENS,
    TOP_K,
    UNEQUAL,
    WEIGHTS,
    WITHOUT_OTHERS,
    EstimatorCase,
    make_logits,
)
from tests.support.launch import ROOT, run
from tests.support.samples import (
    Episode,
    advantages,
    assert_same_gradient,
    configure,
    make_episodes,
    on_tokens,
)

pytestmark = pytest.mark.slow

# Where `make .venv` installs verl on a CPU. Only verl_worker.py sees the packages there.
DIRECTORY = Path(sys.prefix) / "verl"


def cases_for_verl(tokenizer: str) -> dict[str, dict]:
    """Return the cases of verl_worker.py. tokenizer: the directory of one."""
    estimators = {f"advantages: {name}": case for name, case in ESTIMATORS.items()}
    for theirs, ours in WITHOUT_OTHERS.items():
        case = EstimatorCase(theirs, dict(adv_estimator=ours), group=ONE_ALONE)
        estimators[f"one alone: {theirs}"] = case
    cases = {name: estimator_case(case) for name, case in estimators.items()}
    for name, case in LOSSES.items():
        cases[f"loss: {name}"] = {
            "kind": "policy loss",
            "group": UNEQUAL,
            "actor": case.theirs,
            "policy_loss": {"loss_mode": case.loss_mode},
            "correction": case.correction,
        }
    cases["value loss"] = {"kind": "value loss", "critic": {"cliprange_value": 0.2}}
    for name in KL_NAMES:
        cases[f"KL: {name}"] = {"kind": "KL", "name": name}
    for name, control in KL_CONTROLS.items():
        cases[f"KL control: {name}"] = {
            "kind": "KL coefficients",
            "control": control,
            "divergences": KL_OF_STEPS,
            "num_responses": len(BATCH),
        }
    cases["overlong scores"] = {
        "kind": "overlong scores",
        "tokenizer": tokenizer,
        "buffer": {
            "enable": True,
            "len": OVERLONG["buffer"],
            "penalty_factor": OVERLONG["penalty"],
            "log": False,
        },
    }
    for name, top_k in TOP_K.items():
        cases[f"distillation: {name}"] = {
            "kind": "distillation",
            "student": make_logits(1).tolist(),
            "teacher": make_logits(2).tolist(),
            "top_k": top_k,
            "adds_rest": top_k < TOP_K["all tokens"],
        }
    return cases


def estimator_case(case: EstimatorCase) -> dict:
    defaults = {"gamma": 1.0, "lam": 1.0, "norm_adv_by_std_in_grpo": True}
    return {
        "kind": "advantages",
        "estimator": case.theirs,
        "group": case.group,
        "options": {**defaults, **case.options},
        "kl": case.kl,
        "turns": case.turns,
    }


@pytest.fixture(scope="module")
def verl(tmp_path_factory) -> SimpleNamespace:
    """names and results, as verl_worker.py prints them."""
    batch = {
        "texts": TEXTS,
        "scores": SCORES,
        "baselines": [BASELINES[prompt] for prompt in UNEQUAL],
        "parts": PARTS,
        "tokens": TOKENS,
    }
    directory = tmp_path_factory.mktemp("verl")
    make_tokenizer().save_pretrained(directory)
    path = directory / "settings.json"
    path.write_text(json.dumps({"batch": batch, "cases": cases_for_verl(str(directory))}))
    command = [sys.executable, "tests/rl/verl_worker.py", path]
    done = run(command, fresh=True, PYTHONPATH=str(DIRECTORY))
    return SimpleNamespace(**json.loads(done.stdout.splitlines()[-1]))


def our_batch(group: list[int], turns: Iterable[tuple[int, int, float]] = ()):
    """Return the samples of the batch."""
    prompt_text = ".."
    episodes = []
    for text, score, prompt in zip(TEXTS, SCORES, group):
        episodes.append(Episode(prompt, score, [prompt_text + text]))
    for response, position, reward in turns:
        branch = 0
        place = (branch, len(prompt_text) + position)
        episodes[response].turn_rewards[place] = reward
    parts = {name: torch.tensor(numbers) for name, numbers in PARTS.items()}
    return replace(make_episodes(episodes, BASELINES), parts=parts)


def settings_of(ours: dict) -> list[str]:
    return [
        f"rollout.max_tokens={MAX_TOKENS}",
        *(f"reward.weights.{name}={weight}" for name, weight in WEIGHTS.items()),
        *(f"algorithm.{name}={value}" for name, value in ours.items()),
    ]


def estimate(case: EstimatorCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Return our advantages and returns of the sampled tokens."""
    samples = our_batch(case.group, case.turns)
    tokens = {name: TOKENS[name] for name in case.reads}
    kl_coef = 0.0 if case.kl is None else case.kl[1]
    fields, _ = advantages(samples, *settings_of(case.ours), kl_coef=kl_coef, **tokens)
    is_sampled = samples.batch.fields["loss_mask"] > 0
    return fields["advantages"][is_sampled], fields["returns"][is_sampled]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_are_those_of_verl(verl, name):
    case = ESTIMATORS[name]
    results = verl.results[f"advantages: {name}"]
    our_advantages, our_returns = estimate(case)
    expected = case.factor * torch.tensor(results["advantages"])
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(our_advantages, expected, rtol=1e-5, atol=1e-5)
    if case.compares_returns:
        expected = torch.tensor(results["returns"])
        torch.testing.assert_close(our_returns, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", WITHOUT_OTHERS)
def test_a_response_without_others_teaches_nothing_here(verl, name):
    last_token = -1
    theirs = verl.results[f"one alone: {name}"]["advantages"][last_token]
    assert theirs == pytest.approx(SCORES[-1], rel=1e-5)
    case = EstimatorCase(name, dict(adv_estimator=WITHOUT_OTHERS[name]), group=ONE_ALONE)
    ours, _ = estimate(case)
    assert ours[last_token] == 0


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradients_are_those_of_verl(verl, name):
    case = LOSSES[name]
    results = SimpleNamespace(**verl.results[f"loss: {name}"])
    settings = ["algorithm.adv_estimator=dr_grpo", *settings_of(case.ours)]
    config = configure(*settings)
    check_settings(config)
    samples = our_batch(UNEQUAL)
    is_sampled = samples.batch.fields["loss_mask"] > 0
    names = ["rollout_log_probs"]
    names += ["old_log_probs"] if case.has_old_log_probs else []
    names += ["ref_log_probs"] if config.algorithm.use_kl_loss else []
    fields, _ = advantages(samples, *settings, **{name: TOKENS[name] for name in names})

    log_probs = on_tokens(is_sampled, TOKENS["log_probs"])
    entropy = on_tokens(is_sampled, TOKENS["entropy"])
    loss, amounts = ActorLoss(config, len(BATCH))(log_probs, entropy, fields)
    loss.backward()

    mask = torch.tensor(results.mask)
    assert (fields["token_weight"][is_sampled] > 0).tolist() == results.mask
    factor = len(BATCH) / num_kept(mask) if case.counts_rejected else 1.0
    gradient = torch.tensor(results.log_probs_gradient) * factor
    assert_same_gradient(log_probs.grad[is_sampled], gradient)
    if config.algorithm.entropy_coeff:
        gradient = torch.tensor(results.entropy_gradient) * factor
        assert_same_gradient(entropy.grad[is_sampled], gradient)
    if not case.has_old_log_probs:
        return
    assert loss.item() == pytest.approx(factor * results.loss, rel=1e-5, abs=1e-7)
    if "pg_clipfrac" in amounts:
        assert 0 < amounts["pg_clipfrac"] < 0.9, "otherwise clipping is not compared"


def num_kept(mask: torch.Tensor) -> int:
    """Return the number of responses with a token that is not rejected."""
    tokens = mask.split([text.count("x") for text in TEXTS])
    number = sum(int(kept.any()) for kept in tokens)
    assert number < len(BATCH), "otherwise nothing is rejected"
    return number


@pytest.mark.parametrize("name", [name for name, case in LOSSES.items() if case.correction])
def test_bounds_of_corrections_are_reached_by_some_tokens(verl, name):
    """Otherwise they would not be compared."""
    results = verl.results[f"loss: {name}"]
    correction = LOSSES[name].correction
    if "rollout_is" in correction:
        assert 0 < results["rollout_is_ratio_fraction_high"] < 1
    if "rollout_rs" in correction:
        assert 0 < results[f"rollout_rs_{correction['rollout_rs']}_fraction_high"] < 1
        assert 0 < results[f"rollout_rs_{correction['rollout_rs']}_fraction_low"] < 1


def test_metrics_of_the_correction_are_those_of_verl(verl):
    results = verl.results["loss: PPO"]
    samples = our_batch(UNEQUAL)
    names = ("rollout_log_probs", "old_log_probs")
    _, metrics = advantages(samples, **{name: TOKENS[name] for name in names})
    assert metrics["rollout_corr/kl"] == pytest.approx(results["k3_kl"], rel=1e-5)
    # mean(r)^2 / mean(r^2), where verl reports mean(r^2) - 1
    ratio = metrics["rollout_corr/ratio"]
    sample_size = metrics["rollout_corr/effective_sample_size"]
    assert ratio**2 / sample_size - 1 == pytest.approx(results["chi2_token"], rel=1e-5)


def test_the_value_loss_is_that_of_verl(verl):
    results = SimpleNamespace(**verl.results["value loss"])
    samples = our_batch(UNEQUAL)
    is_sampled = samples.batch.fields["loss_mask"] > 0
    settings = ["algorithm.adv_estimator=gae", "critic.cliprange_value=0.2"]
    fields, _ = advantages(samples, *settings, values=TOKENS["values"])
    fields["returns"] = on_tokens(is_sampled, TOKENS["returns"]).detach()
    values = on_tokens(is_sampled, TOKENS["new_values"])
    loss, amounts = critic_loss(configure(*settings))(values, fields)
    loss.backward()
    assert loss.item() == pytest.approx(results.loss, rel=1e-5)
    assert_same_gradient(values.grad[is_sampled], torch.tensor(results.gradient))
    assert amounts["vf_clipfrac"].item() == pytest.approx(results.clipped, rel=1e-5)
    assert 0 < results.clipped < 1


@pytest.mark.parametrize("name", KL_NAMES)
def test_kl_estimates_are_those_of_verl(verl, name):
    results = verl.results[f"KL: {name}"]
    log_probs = torch.tensor(TOKENS["log_probs"], requires_grad=True)
    ref_log_probs = torch.tensor(TOKENS["ref_log_probs"])
    divergence = KL_ESTIMATORS[KL_NAMES[name]](log_probs=log_probs, ref_log_probs=ref_log_probs)
    (gradient,) = torch.autograd.grad(divergence.sum(), log_probs)
    torch.testing.assert_close(
        divergence, torch.tensor(results["divergence"]), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(gradient, torch.tensor(results["gradient"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", KL_CONTROLS)
def test_the_coefficient_of_the_penalty_is_that_of_verl(verl, name):
    control = KL_CONTROLS[name]
    settings = [f"algorithm.kl_ctrl.{key}={value}" for key, value in control.items()]
    config = configure("algorithm.use_kl_in_reward=true", *settings)
    kl_coef = control["kl_coef"]
    coefficients = []
    for divergence in KL_OF_STEPS:
        kl_coef = next_kl_coef(config, kl_coef, {"actor/reward_kl": divergence}, len(BATCH))
        coefficients.append(kl_coef)
    assert coefficients == pytest.approx(verl.results[f"KL control: {name}"]["coefficients"])


def test_the_penalty_of_long_responses_is_that_of_verl(verl):
    settings = [f"reward.overlong_{key}={value}" for key, value in OVERLONG.items()]
    config = configure(f"rollout.max_tokens={MAX_TOKENS}", *settings)
    ours = penalized_scores(config, our_batch(UNEQUAL)).tolist()
    theirs = verl.results["overlong scores"]["scores"]
    for text, our_score, their_score in zip(TEXTS, ours, theirs):
        # verl's length includes tokens that were not sampled, such as results of tools.
        if "." not in text:
            assert our_score == pytest.approx(their_score, abs=1e-6)
    assert ours != pytest.approx(SCORES, abs=0.1)


@pytest.mark.parametrize("name", TOP_K)
def test_forward_kl_is_that_of_verl(verl, name):
    """The student's output matrix is the unit matrix, so that its hidden states are its logits."""
    results = verl.results[f"distillation: {name}"]
    num_tokens = TOP_K["all tokens"]
    unit = torch.eye(num_tokens)
    logits = make_logits(1).requires_grad_()
    teacher_logits = make_logits(2)
    divergence = Divergence("forward_kl")
    settings = LogProbSettings()
    top_k = TOP_K[name]
    if top_k == num_tokens:
        teacher = TeacherHead(unit, LogitTransform())
        result = full_divergence(logits, unit, teacher_logits, teacher, divergence, settings)
    else:
        candidates = top_k_log_probs(teacher_logits, unit, top_k, settings)
        result = top_k_divergence(logits, unit, *candidates, divergence, settings)
    result.sum().backward()
    torch.testing.assert_close(result, torch.tensor(results["divergence"]), rtol=1e-5, atol=1e-6)
    assert_same_gradient(logits.grad.flatten(), torch.tensor(results["gradient"]))


def names_compared() -> dict[str, set[str]]:
    """Return verl's names of what the tests above compare."""
    corrections = [case.correction for case in LOSSES.values()]
    modes = {case.theirs.get("loss_agg_mode", "token-mean") for case in LOSSES.values()}
    return {
        "policy losses": {case.loss_mode for case in LOSSES.values()},
        "estimators": {case.theirs for case in ESTIMATORS.values()},
        "aggregations": modes,
        "KL estimates": set(KL_NAMES),
        "KL controls": set(KL_CONTROLS),
        "rejections": {case["rollout_rs"] for case in corrections if "rollout_rs" in case},
        "distillation": {"forward_kl_topk"},
    }


def our_names_compared() -> dict[str, tuple[Iterable[str], set[str]]]:
    """Return our names, and those of them that the tests above compare."""
    losses = [case.ours for case in LOSSES.values()]
    estimators = [case.ours for case in ESTIMATORS.values()]
    return {
        "policy losses": (POLICY_LOSSES, {case["loss_mode"] for case in losses}),
        "estimators": (ADVANTAGES, {case["adv_estimator"] for case in estimators}),
        "aggregations": (
            AGGREGATIONS,
            {case.get("loss_agg_mode", "token-mean") for case in losses},
        ),
        "KL estimates": (KL_ESTIMATORS, set(KL_NAMES.values())),
    }


@pytest.mark.parametrize("kind", OMITTED)
def test_all_that_verl_offers_is_compared_or_listed(verl, kind):
    offered = verl.names[kind]
    compared = names_compared()[kind]
    assert sorted([*compared, *OMITTED[kind]]) == sorted(offered)


def test_no_kind_of_function_is_left_out(verl):
    assert verl.names.keys() == OMITTED.keys() == names_compared().keys()


@pytest.mark.parametrize("kind", OURS_ALONE)
def test_all_of_ours_is_compared_or_listed(kind):
    ours, compared = our_names_compared()[kind]
    assert sorted([*compared, *OURS_ALONE[kind]]) == sorted(ours)


def test_the_page_about_verl_names_what_is_not_supported():
    _, _, text = (ROOT / "docs" / "from_verl.md").read_text().partition("## Not supported")
    for omitted in OMITTED.values():
        for name, reason in omitted.items():
            assert reason != NOT_SUPPORTED or name in text
