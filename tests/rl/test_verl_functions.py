"""Advantages, losses, their gradients and KL penalties equal those of verl on the same batch."""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
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
from rl.estimation import next_kl_coef
from rl.losses import ActorLoss, critic_loss
from rl.settings import check_settings
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

# Where `make .venv` installs verl on a CPU. Ray and the others are for nothing else here.
DIRECTORY = ROOT / ".venv" / "verl"
MAX_TOKENS = 9
WEIGHTS = {"correct": 1.0, "short": 0.5}
# Tokens (x: sampled), and the parts of the reward.
BATCH = (
    ("xxxxx", 1.0, 0.3),
    ("xx", 0.0, 0.9),
    ("xxx..xxxx", 0.0, -0.4),
    ("xxxx", 1.0, 0.2),
    ("xxxxxx", 0.0, 0.1),
    ("xxx", 1.0, 0.8),
    ("x..x.xxx", 0.5, 0.6),
    ("xxxxxxxxx", 0.0, -0.7),
)
TEXTS = [text for text, _, _ in BATCH]
PARTS = {
    "correct": [correct for _, correct, _ in BATCH],
    "short": [short for _, _, short in BATCH],
}
SCORES = [correct + WEIGHTS["short"] * short for _, correct, short in BATCH]
# The prompt of each response.
UNEQUAL = [0, 0, 0, 1, 1, 1, 1, 1]
EQUAL = [0, 0, 0, 0, 1, 1, 1, 1]
ONE_ALONE = [0, 0, 0, 0, 0, 0, 0, 1]
# The score of the greedy response to each prompt.
BASELINES = {0: 0.45, 1: -0.2}


@dataclass
class EstimatorCase:
    """The settings with which verl and we estimate the same.

    theirs           the name of verl's estimator
    ours             settings below `algorithm`
    options          verl's settings below `algorithm`
    group            the prompt of each response
    kl               verl's name and the coefficient of the KL penalty in the rewards
    factor           our advantages divided by verl's
    reads            the fields that our estimator reads
    compares_returns whether the returns mean the same. verl's of whole responses are advantages
    """

    theirs: str
    ours: dict
    options: dict = field(default_factory=dict)
    group: list[int] = field(default_factory=lambda: UNEQUAL)
    kl: tuple[str, float] | None = None
    factor: float = 1.0
    reads: tuple[str, ...] = ()
    compares_returns: bool = False


ESTIMATORS = {
    "GRPO": EstimatorCase("grpo", dict(adv_estimator="grpo")),
    "GRPO, vectorized": EstimatorCase("grpo_vectorized", dict(adv_estimator="grpo")),
    "Dr. GRPO": EstimatorCase(
        "grpo", dict(adv_estimator="dr_grpo"), dict(norm_adv_by_std_in_grpo=False)
    ),
    "RLOO": EstimatorCase("rloo", dict(adv_estimator="rloo")),
    "RLOO, vectorized": EstimatorCase("rloo_vectorized", dict(adv_estimator="rloo")),
    "OPO": EstimatorCase("opo", dict(adv_estimator="opo")),
    # verl whitens over all tokens, and gdpo over responses, as in the paper. Whitening a second
    # time, over tokens, makes up for it.
    "GDPO": EstimatorCase(
        "gdpo",
        dict(adv_estimator="gdpo", whiten_advantages="true"),
        dict(gdpo_reward_keys=list(WEIGHTS), gdpo_reward_weights=list(WEIGHTS.values())),
    ),
    # With groups of k, a response raises the maximum only if it is the best one. verl leaves out
    # the factor k.
    "pass@k": EstimatorCase(
        "grpo_passk",
        {"adv_estimator": "max_at_k", "adv_kwargs.k": 4},
        dict(norm_adv_by_std_in_grpo=False),
        group=EQUAL,
        factor=4.0,
    ),
    "REINFORCE++": EstimatorCase(
        "reinforce_plus_plus",
        dict(adv_estimator="reinforce_plus_plus", gamma=0.9),
        dict(gamma=0.9),
        compares_returns=True,
    ),
    "REINFORCE++-baseline": EstimatorCase(
        "reinforce_plus_plus_baseline", dict(adv_estimator="reinforce_plus_plus_baseline")
    ),
    "ReMax": EstimatorCase("remax", dict(adv_estimator="remax"), compares_returns=True),
    "GAE": EstimatorCase(
        "gae",
        dict(adv_estimator="gae", gamma=0.9, lam=0.8),
        dict(gamma=0.9, lam=0.8),
        reads=("values",),
        compares_returns=True,
    ),
    "GAE with a penalty": EstimatorCase(
        "gae",
        dict(adv_estimator="gae", lam=0.8, use_kl_in_reward="true", kl_penalty="k2"),
        dict(lam=0.8),
        kl=("mse", 0.1),
        reads=("values", "old_log_probs", "ref_log_probs"),
        compares_returns=True,
    ),
    "RLOO with a penalty": EstimatorCase(
        "rloo",
        dict(adv_estimator="rloo", use_kl_in_reward="true", kl_penalty="k1"),
        kl=("kl", 0.1),
        reads=("old_log_probs", "ref_log_probs"),
    ),
}
# verl's estimators for which a response without others is its own advantage. Here it is 0.
WITHOUT_OTHERS = {"grpo": "grpo", "rloo": "rloo", "opo": "opo"}


@dataclass
class LossCase:
    """The settings with which verl's losses and ours are the same.

    loss_mode      the name of verl's loss
    theirs         settings below `actor_rollout_ref.actor`
    ours           settings below `algorithm`
    correction     verl's settings below `algorithm.rollout_correction`
    counts_rejected  whether verl's mean over responses includes those that are rejected. Ours
                   does not
    has_old_log_probs   False if the policy is compared with vLLM's probabilities alone
    """

    loss_mode: str
    theirs: dict
    ours: dict
    correction: dict = field(default_factory=dict)
    counts_rejected: bool = False
    has_old_log_probs: bool = True


def with_bounds(low: float, high: float, **theirs) -> dict:
    return dict(clip_ratio_low=low, clip_ratio_high=high, **theirs)


def of_mode(loss_mode: str, low: float, high: float, **ours) -> dict:
    return dict(loss_mode=loss_mode, clip_ratio_low=low, clip_ratio_high=high, **ours)


# verl's bounds of rejections apply to the inverse ratio, vLLM's probability by the trainer's.
BOUNDS = "0.8_1.6"
INVERSE_BOUNDS = dict(rollout_rs_threshold_lower=1 / 1.6, rollout_rs_threshold=1 / 0.8)
BY_SEQUENCE = dict(loss_agg_mode="seq-mean-token-mean")
LOSSES = {
    "PPO": LossCase("vanilla", with_bounds(0.2, 0.28), of_mode("ppo", 0.2, 0.28)),
    "PPO with dual clip": LossCase(
        "vanilla", dict(clip_ratio_c=1.3), dict(loss_mode="ppo", clip_ratio_c=1.3)
    ),
    "GRPO": LossCase("vanilla", BY_SEQUENCE, dict(loss_mode="ppo", **BY_SEQUENCE)),
    "a mean of sums": LossCase(
        "vanilla",
        dict(loss_agg_mode="seq-mean-token-sum"),
        dict(loss_mode="ppo", loss_agg_mode="seq-mean-token-sum"),
    ),
    "Dr. GRPO": LossCase(
        "vanilla",
        dict(loss_agg_mode="seq-mean-token-sum-norm"),
        dict(loss_mode="ppo", loss_agg_mode="seq-mean-token-sum-norm"),
    ),
    # verl has no dual clip here.
    "GSPO": LossCase(
        "gspo",
        with_bounds(0.03, 0.04, **BY_SEQUENCE),
        of_mode("gspo", 0.03, 0.04, clip_ratio_c=0, **BY_SEQUENCE),
    ),
    "CISPO": LossCase("cispo", with_bounds(0.2, 0.1), of_mode("cispo", 0.2, 0.1)),
    # verl always takes the mean over responses.
    "GMPO": LossCase("geo_mean", with_bounds(0.1, 0.15), of_mode("gmpo", 0.1, 0.15, **BY_SEQUENCE)),
    # As above.
    "SAPO": LossCase(
        "sapo",
        dict(tau_pos=0.8, tau_neg=1.3),
        dict(loss_mode="sapo", loss_kwargs="{tau_positive: 0.8, tau_negative: 1.3}", **BY_SEQUENCE),
    ),
    # verl's bound on the ratio is clip_ratio_c.
    "DPPO, total variation": LossCase(
        "dppo_tv",
        with_bounds(0.1, 0.05, clip_ratio_c=1.2),
        of_mode("dppo_tv", 0.1, 0.05, loss_kwargs="{max_ratio: 1.2}"),
    ),
    "DPPO, KL": LossCase(
        "dppo_kl",
        with_bounds(0.02, 0.01, clip_ratio_c=1.2),
        of_mode("dppo_kl", 0.02, 0.01, loss_kwargs="{max_ratio: 1.2}"),
    ),
    "KL loss": LossCase(
        "vanilla",
        dict(use_kl_loss=True, kl_loss_type="low_var_kl", kl_loss_coef=0.3, **BY_SEQUENCE),
        dict(loss_mode="ppo", use_kl_loss="true", kl_loss_coef=0.3, **BY_SEQUENCE),
    ),
    "entropy bonus": LossCase(
        "vanilla",
        dict(entropy_coeff=0.2, **BY_SEQUENCE),
        dict(loss_mode="ppo", entropy_coeff=0.2, **BY_SEQUENCE),
    ),
    "importance sampling of tokens": LossCase(
        "vanilla",
        {},
        dict(loss_mode="ppo", rollout_is="token", rollout_is_threshold=1.2),
        dict(rollout_is="token", rollout_is_threshold=1.2),
    ),
    "importance sampling of sequences": LossCase(
        "vanilla",
        {},
        dict(loss_mode="ppo", rollout_is="sequence", rollout_is_threshold=1.2),
        dict(rollout_is="sequence", rollout_is_threshold=1.2),
    ),
    "IcePop": LossCase(
        "vanilla",
        {},
        dict(
            loss_mode="ppo",
            rollout_is="icepop",
            rollout_is_threshold_lower=0.8,
            rollout_is_threshold=1.2,
        ),
        dict(rollout_is="token", rollout_is_threshold="0.8_1.2"),
    ),
    # verl takes the geometric mean of the tokens' weights, so they are equal if a sequence has one.
    "GMPO with importance sampling": LossCase(
        "geo_mean",
        with_bounds(0.1, 0.15),
        of_mode("gmpo", 0.1, 0.15, rollout_is="sequence", rollout_is_threshold=1.2, **BY_SEQUENCE),
        dict(rollout_is="sequence", rollout_is_threshold=1.2),
    ),
    "rejected tokens": LossCase(
        "vanilla",
        {},
        dict(loss_mode="ppo", rollout_rs="token", **INVERSE_BOUNDS),
        dict(rollout_rs="token_k1", rollout_rs_threshold=BOUNDS),
    ),
    "rejected sequences": LossCase(
        "vanilla",
        BY_SEQUENCE,
        dict(loss_mode="ppo", rollout_rs="sequence", **INVERSE_BOUNDS, **BY_SEQUENCE),
        dict(rollout_rs="seq_sum_k1", rollout_rs_threshold=BOUNDS),
        counts_rejected=True,
    ),
    "rejected by the geometric mean": LossCase(
        "vanilla",
        dict(loss_agg_mode="seq-mean-token-sum-norm"),
        dict(
            loss_mode="ppo",
            loss_agg_mode="seq-mean-token-sum-norm",
            rollout_rs="geometric",
            rollout_rs_threshold_lower=0.9,
            rollout_rs_threshold=1 / 0.92,
        ),
        dict(rollout_rs="seq_mean_k1", rollout_rs_threshold=f"0.92_{1 / 0.9}"),
        counts_rejected=True,
    ),
    # The ratio of a sequence is that of the remaining tokens.
    "GSPO with rejected tokens": LossCase(
        "gspo",
        with_bounds(0.03, 0.04),
        of_mode("gspo", 0.03, 0.04, clip_ratio_c=0, rollout_rs="token", **INVERSE_BOUNDS),
        dict(rollout_rs="token_k1", rollout_rs_threshold=BOUNDS),
    ),
    # The weight of a sequence is that of all its tokens.
    "rejection and importance sampling": LossCase(
        "vanilla",
        {},
        dict(
            loss_mode="ppo",
            rollout_is="sequence",
            rollout_is_threshold=1.2,
            rollout_rs="token",
            **INVERSE_BOUNDS,
        ),
        dict(
            rollout_is="sequence",
            rollout_is_threshold=1.2,
            rollout_rs="token_k1",
            rollout_rs_threshold=BOUNDS,
        ),
    ),
    # A single update per rollout. verl's loss has another value, log_probs times the weights.
    "bypass mode": LossCase(
        "bypass_mode",
        {},
        dict(loss_mode="ppo", rollout_is="token", rollout_is_threshold=1.2),
        dict(loss_type="reinforce", rollout_is="token", rollout_is_threshold=1.2),
        has_old_log_probs=False,
    ),
}
# verl's name -> ours.
KL_NAMES = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}
KL_CONTROLS = {
    "fixed": dict(type="fixed", kl_coef=0.2),
    "adaptive": dict(type="adaptive", kl_coef=0.2, target_kl=0.1, horizon=50),
}
KL_OF_STEPS = [0.3, 0.11, 0.095, 0.02, 0.0]
TOP_K = {"all tokens": 11, "four tokens and the rest": 4}
# What verl offers and we do not, or not in this form. docs/from_verl.md has what is not supported.
NOT_SUPPORTED = "not supported"
OMITTED = {
    "policy losses": dict.fromkeys(("gpg", "clip_cov", "kl_cov", "dro"), NOT_SUPPORTED),
    "estimators": dict.fromkeys(
        ("gpg", "optimal_token_baseline", "tir_optimal_token_baseline"), NOT_SUPPORTED
    ),
    "aggregations": {"token-sum": NOT_SUPPORTED},
    "KL estimates": {"full": "verl raises NotImplementedError"},
    "KL controls": {},
    "rejections": dict.fromkeys(
        (
            *("token_k2", "token_k3", "seq_sum_k2", "seq_sum_k3"),
            *("seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
        ),
        NOT_SUPPORTED,
    ),
    "distillation": dict.fromkeys(
        KL_NAMES, "estimates from the sampled tokens: here, of a reference and not of a teacher"
    ),
}
# What verl does not have.
OURS_ALONE = {
    "policy losses": set(),
    "estimators": {"grpo_steps", "max_rl", "lite_ppo"},
    "aggregations": set(),
    "KL estimates": set(),
}


def make_tokens() -> dict[str, list[float]]:
    """Return random numbers of the sampled tokens."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = "".join(TEXTS).count("x")

    def normal() -> torch.Tensor:
        return torch.randn(num_tokens, generator=generator)

    def near(log_probs: torch.Tensor, distance: float) -> torch.Tensor:
        return (log_probs + distance * normal()).clamp(max=-0.02)

    rollout_log_probs = -0.05 - 2.5 * torch.rand(num_tokens, generator=generator)
    old_log_probs = near(rollout_log_probs, 0.2)
    log_probs = near(old_log_probs, 0.3)
    # A ratio beyond the bound of dual clip, in a response that is worse than the others.
    old_log_probs[8] = -2.5
    log_probs[8] = -0.7
    ref_log_probs = near(log_probs, 0.5)
    # Both bounds of k3.
    log_probs[20] = -4.5
    ref_log_probs[20] = -0.5
    ref_log_probs[30] = -14.0
    values = normal()
    tokens = {
        "rollout_log_probs": rollout_log_probs,
        "old_log_probs": old_log_probs,
        "log_probs": log_probs,
        "ref_log_probs": ref_log_probs,
        "entropy": normal().abs(),
        "values": values,
        "new_values": values + 0.3 * normal(),
        "returns": normal(),
    }
    return {name: numbers.tolist() for name, numbers in tokens.items()}


TOKENS = make_tokens()


def make_logits(seed: int) -> torch.Tensor:
    return 2 * torch.randn(6, TOP_K["all tokens"], generator=torch.Generator().manual_seed(seed))


def cases_for_verl() -> dict[str, dict]:
    """Return the cases of verl_worker.py."""
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
    path = tmp_path_factory.mktemp("verl") / "settings.json"
    path.write_text(json.dumps({"batch": batch, "cases": cases_for_verl()}))
    command = [sys.executable, "tests/rl/verl_worker.py", path]
    done = run(command, fresh=True, PYTHONPATH=str(DIRECTORY))
    return SimpleNamespace(**json.loads(done.stdout.splitlines()[-1]))


def our_batch(group: list[int]):
    """Return the samples of the batch."""
    episodes = []
    for text, score, prompt in zip(TEXTS, SCORES, group):
        episodes.append(Episode(prompt, score, [f"..{text}"]))
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
    samples = our_batch(case.group)
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
def test_corrections_change_something(verl, name):
    """Otherwise they would not be compared."""
    results = verl.results[f"loss: {name}"]
    plain = verl.results["loss: PPO"]
    assert results["log_probs_gradient"] != plain["log_probs_gradient"]
    if "rollout_rs" in LOSSES[name].correction:
        assert 0 < sum(results["mask"]) < len(results["mask"])


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
    torch.testing.assert_close(
        result, torch.tensor(results["divergence"]), rtol=1e-5, atol=1e-6
    )
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
