"""Advantages, policy losses and their gradients equal those of TRL's trainers on the same batch."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from examples.arithmetic import make_tokenizer
from rl.losses import ActorLoss
from rl.settings import check_settings
from tests.support.launch import run
from tests.support.models import make_model
from tests.support.samples import (
    Episode,
    advantages,
    assert_same_gradient,
    configure,
    make_episodes,
    on_tokens,
)

pytestmark = pytest.mark.slow

GROUP_SIZE = 4
MAX_TOKENS = 9
WEIGHTS = {"correct": 1.0, "short": 0.5}
# Tokens (x: sampled), whether the response was truncated, and the parts of its reward.
BATCH = (
    ("xxxxx", False, 1.0, 0.3),
    ("xx", False, 0.0, 0.9),
    ("xxx..xxxx", True, 0.0, -0.4),
    ("xxxx", False, 1.0, 0.2),
    ("xxxxxx", False, 0.0, 0.1),
    ("xxx", False, 1.0, 0.8),
    ("x..x.xxx", False, 0.5, 0.6),
    ("xxxxxxxxx", True, 0.0, -0.7),
)
GROUP = torch.arange(len(BATCH)) // GROUP_SIZE


def no_factor(case: "Case", results: SimpleNamespace) -> float:
    return 1.0


def loss_factor_of_truncated(case: "Case", results: SimpleNamespace) -> float:
    """TRL's means are over all responses, ours over those that are not left out."""
    num_kept = sum(not is_truncated for _, is_truncated, _, _ in BATCH)
    assert num_kept < len(BATCH)
    return len(BATCH) / num_kept


def loss_factor_of_rejected(case: "Case", results: SimpleNamespace) -> float:
    """As above, for responses whose ratio of probabilities is out of bounds."""
    low = case.theirs["vllm_importance_sampling_clip_min"]
    high = case.theirs["vllm_importance_sampling_clip_max"]
    old = split(results.old_log_probs)
    drawn = split(results.rollout_log_probs)
    ratios = [(old[i].sum() - drawn[i].sum()).exp().item() for i in range(len(BATCH))]
    num_kept = sum(low <= ratio <= high for ratio in ratios)
    assert 0 < num_kept < len(BATCH)
    return len(BATCH) / num_kept


def advantage_factor_of_group(case: "Case", results: SimpleNamespace) -> torch.Tensor:
    """TRL adds 1e-4 to the standard deviation, and we add 1e-6."""
    deviations = scores().view(-1, GROUP_SIZE).std(dim=1)
    return other_epsilon(deviations)[GROUP]


def advantage_factor_of_batch(case: "Case", results: SimpleNamespace) -> torch.Tensor:
    """As above."""
    return other_epsilon(scores().std())


def other_epsilon(deviation: torch.Tensor) -> torch.Tensor:
    return (deviation + 1e-4) / (deviation + 1e-6)


def advantage_factor_of_parts(case: "Case", results: SimpleNamespace) -> torch.Tensor:
    """TRL divides the sum of parts by (standard deviation + 1e-4), and we by sqrt(variance + 1e-8).

    The same epsilons in the parts matter less than 1e-6, because the case scales the rewards up.
    """
    total = torch.zeros(len(BATCH), dtype=torch.float64)
    for name, weight in WEIGHTS.items():
        grouped = parts()[name].view(-1, GROUP_SIZE)
        normalized = (grouped - grouped.mean(1, keepdim=True)) / grouped.std(1, keepdim=True)
        total += weight * normalized.flatten()
    deviation = total.std()
    return (deviation + 1e-4) / (deviation.square() + 1e-8).sqrt()


@dataclass
class Case:
    """The settings with which TRL and we compute the same.

    theirs        options of TRL's configuration
    ours          settings below `algorithm`
    trainer       grpo, gmpo or rloo: TRL's trainer
    factor        our loss (for estimators, our advantages) divided by TRL's, where the definitions
                  differ
    reward_scale  multiplies the rewards
    corrects_sampling   whether TRL corrects for the policy that drew the responses
    """

    theirs: dict
    ours: dict
    trainer: str = "grpo"
    factor: Callable = no_factor
    reward_scale: float = 1.0
    corrects_sampling: bool = False


# dual_clip of ours is delta of TRL, which is off by default.
LOSSES = {
    "GRPO": Case(
        dict(loss_type="grpo", epsilon=0.2, epsilon_high=0.28),
        dict(
            loss_agg_mode="seq-mean-token-mean",
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
            clip_ratio_c=0,
        ),
    ),
    "two-sided clipping": Case(
        dict(loss_type="grpo", epsilon=0.1, delta=1.2),
        dict(
            loss_agg_mode="seq-mean-token-mean",
            clip_ratio_low=0.1,
            clip_ratio_high=0.1,
            clip_ratio_c=1.2,
        ),
    ),
    "Dr. GRPO": Case(
        dict(loss_type="dr_grpo", epsilon=0.2),
        dict(loss_agg_mode="seq-mean-token-sum-norm", clip_ratio_c=0),
    ),
    "DAPO": Case(
        dict(loss_type="dapo", epsilon=0.2, epsilon_high=0.28),
        dict(loss_agg_mode="token-mean", clip_ratio_high=0.28, clip_ratio_c=0),
    ),
    "BNPO": Case(
        dict(loss_type="bnpo", epsilon=0.15),
        dict(loss_agg_mode="token-mean", clip_ratio_low=0.15, clip_ratio_high=0.15, clip_ratio_c=0),
    ),
    "GSPO": Case(
        dict(
            loss_type="grpo",
            importance_sampling_level="sequence",
            epsilon=0.03,
            epsilon_high=0.04,
        ),
        dict(
            loss_mode="gspo",
            loss_agg_mode="seq-mean-token-mean",
            clip_ratio_low=0.03,
            clip_ratio_high=0.04,
            clip_ratio_c=0,
        ),
    ),
    "LUSPO": Case(
        dict(
            loss_type="luspo",
            importance_sampling_level="sequence",
            epsilon=0.03,
            epsilon_high=0.04,
        ),
        dict(
            loss_mode="gspo",
            loss_agg_mode="seq-mean-token-sum",
            clip_ratio_low=0.03,
            clip_ratio_high=0.04,
            clip_ratio_c=0,
        ),
    ),
    # TRL's epsilon_high is the bound itself, and there is no lower one.
    "CISPO": Case(
        dict(loss_type="cispo", epsilon_high=1.1),
        dict(
            loss_mode="cispo", loss_agg_mode="token-mean", clip_ratio_low=1.0, clip_ratio_high=0.1
        ),
    ),
    "GMPO": Case(
        dict(epsilon=0.1, epsilon_high=0.15),
        dict(
            loss_mode="gmpo",
            loss_agg_mode="seq-mean-token-mean",
            clip_ratio_low=0.1,
            clip_ratio_high=0.15,
        ),
        trainer="gmpo",
    ),
    "SAPO": Case(
        dict(loss_type="sapo", sapo_temperature_pos=0.8, sapo_temperature_neg=1.3),
        dict(
            loss_mode="sapo",
            loss_agg_mode="seq-mean-token-mean",
            loss_kwargs="{tau_positive: 0.8, tau_negative: 1.3}",
        ),
    ),
    # By default, TRL multiplies k3 by the ratio (docs/from_trl.md). GMPO's trainer does not.
    "KL": Case(
        dict(loss_type="dapo", beta=0.3, use_bias_correction_kl=False),
        dict(clip_ratio_c=0, use_kl_loss="true", kl_loss_type="k3", kl_loss_coef=0.3),
    ),
    "GMPO with KL": Case(
        dict(epsilon=0.4, beta=0.3),
        dict(
            loss_mode="gmpo",
            loss_agg_mode="seq-mean-token-mean",
            clip_ratio_low=0.4,
            clip_ratio_high=0.4,
            use_kl_loss="true",
            kl_loss_coef=0.3,
        ),
        trainer="gmpo",
    ),
    # TRL's bonus is a mean over tokens with every loss type, and ours is aggregated as the loss.
    "entropy bonus": Case(
        dict(loss_type="dapo", entropy_coef=0.2),
        dict(clip_ratio_c=0, entropy_coeff=0.2),
    ),
    "overlong filtering, token mean": Case(
        dict(loss_type="dapo", mask_truncated_completions=True),
        dict(clip_ratio_c=0, mask_truncated="true"),
    ),
    "overlong filtering, GRPO": Case(
        dict(loss_type="grpo", mask_truncated_completions=True),
        dict(loss_agg_mode="seq-mean-token-mean", clip_ratio_c=0, mask_truncated="true"),
        factor=loss_factor_of_truncated,
    ),
    "overlong filtering, Dr. GRPO": Case(
        dict(loss_type="dr_grpo", mask_truncated_completions=True),
        dict(loss_agg_mode="seq-mean-token-sum-norm", clip_ratio_c=0, mask_truncated="true"),
        factor=loss_factor_of_truncated,
    ),
    "importance sampling of tokens": Case(
        dict(
            loss_type="dapo",
            vllm_importance_sampling_mode="token_truncate",
            vllm_importance_sampling_clip_max=1.2,
        ),
        dict(clip_ratio_c=0, rollout_is="token", rollout_is_threshold=1.2),
        corrects_sampling=True,
    ),
    "importance sampling of sequences": Case(
        dict(
            loss_type="dapo",
            vllm_importance_sampling_mode="sequence_truncate",
            vllm_importance_sampling_clip_max=1.2,
        ),
        dict(clip_ratio_c=0, rollout_is="sequence", rollout_is_threshold=1.2),
        corrects_sampling=True,
    ),
    "IcePop": Case(
        dict(
            loss_type="dapo",
            vllm_importance_sampling_mode="token_mask",
            vllm_importance_sampling_clip_min=0.8,
            vllm_importance_sampling_clip_max=1.2,
        ),
        dict(
            clip_ratio_c=0,
            rollout_is="icepop",
            rollout_is_threshold_lower=0.8,
            rollout_is_threshold=1.2,
        ),
        corrects_sampling=True,
    ),
    "rejection of sequences": Case(
        dict(
            loss_type="grpo",
            vllm_importance_sampling_mode="sequence_mask",
            vllm_importance_sampling_clip_min=0.7,
            vllm_importance_sampling_clip_max=1.5,
        ),
        dict(
            loss_agg_mode="seq-mean-token-mean",
            clip_ratio_c=0,
            rollout_is="sequence",
            rollout_is_threshold=1.5,
            rollout_rs="sequence",
            rollout_rs_threshold_lower=0.7,
            rollout_rs_threshold=1.5,
        ),
        factor=loss_factor_of_rejected,
        corrects_sampling=True,
    ),
}
# The losses above take these advantages, for which there is no factor.
CENTRED = {"scale_rewards": "none"}
ESTIMATORS = {
    "GRPO": Case(
        dict(scale_rewards="group"),
        dict(adv_estimator="grpo"),
        factor=advantage_factor_of_group,
    ),
    "Dr. GRPO": Case(CENTRED, dict(adv_estimator="dr_grpo")),
    "Lite PPO": Case(
        dict(scale_rewards="batch"),
        dict(adv_estimator="lite_ppo"),
        factor=advantage_factor_of_batch,
    ),
    "GDPO": Case(
        dict(multi_objective_aggregation="normalize_then_sum"),
        dict(adv_estimator="gdpo"),
        factor=advantage_factor_of_parts,
        reward_scale=1000.0,
    ),
    # TRL would subtract the KL divergence from the rewards.
    "RLOO": Case(dict(beta=0.0), dict(adv_estimator="rloo"), trainer="rloo"),
}


def parts() -> dict[str, torch.Tensor]:
    columns = zip(*BATCH)
    _, _, correct, short = map(list, columns)
    return {
        "correct": torch.tensor(correct, dtype=torch.float64),
        "short": torch.tensor(short, dtype=torch.float64),
    }


def scores() -> torch.Tensor:
    return sum(weight * parts()[name] for name, weight in WEIGHTS.items())


def split(numbers: list[float]) -> tuple[torch.Tensor, ...]:
    """Divide the numbers of the sampled tokens by response."""
    return torch.tensor(numbers).split([tokens.count("x") for tokens, _, _, _ in BATCH])


@pytest.fixture(scope="module")
def results_of_trl(tmp_path_factory) -> dict[str, SimpleNamespace]:
    """The name of a case -> Computed of trl_worker.py."""
    directory = tmp_path_factory.mktemp("trl")
    tokenizer = make_tokenizer()
    make_model(directory / "model", "qwen3", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(directory / "model")
    cases = {f"loss: {name}": for_trl(case, **CENTRED) for name, case in LOSSES.items()}
    cases |= {f"advantages: {name}": for_trl(case) for name, case in ESTIMATORS.items()}
    batch = []
    for tokens, is_truncated, correct, short in BATCH:
        rewards = {"correct": correct, "short": short}
        batch.append({"tokens": tokens, "is_truncated": is_truncated, "parts": rewards})
    settings = {
        "model": str(directory / "model"),
        "max_tokens": MAX_TOKENS,
        "group_size": GROUP_SIZE,
        "batch": batch,
        "cases": cases,
    }
    path = directory / "settings.json"
    path.write_text(json.dumps(settings))
    done = run([sys.executable, "tests/rl/trl_worker.py", path], fresh=True)
    results = json.loads(done.stdout.splitlines()[-1])
    return {name: SimpleNamespace(**result) for name, result in results.items()}


def for_trl(case: Case, **options) -> dict:
    return {
        "trainer": case.trainer,
        "reward_scale": case.reward_scale,
        "corrects_sampling": case.corrects_sampling,
        "options": {"reward_weights": list(WEIGHTS.values()), **options, **case.theirs},
    }


def our_batch(scale: float):
    """Return the samples of the batch."""
    episodes = []
    for (tokens, is_truncated, _, _), score, group in zip(BATCH, scores(), GROUP):
        branches = [f"..{tokens}"]
        episode = Episode(group.item(), scale * score.item(), branches, is_truncated=is_truncated)
        episodes.append(episode)
    scaled = {name: (scale * part).float() for name, part in parts().items()}
    return replace(make_episodes(episodes), parts=scaled)


def settings_of(case: Case) -> list[str]:
    return [
        f"rollout.max_tokens={MAX_TOKENS}",
        *(f"reward.weights.{name}={weight}" for name, weight in WEIGHTS.items()),
        *(f"algorithm.{name}={value}" for name, value in case.ours.items()),
    ]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_are_those_of_trl(results_of_trl, name):
    case = ESTIMATORS[name]
    results = results_of_trl[f"advantages: {name}"]
    samples = our_batch(case.reward_scale)
    fields, _ = advantages(samples, *settings_of(case))
    last_tokens = samples.batch.cu_seqlens[1:] - 1
    expected = torch.tensor(results.advantages) * case.factor(case, results)
    assert expected.abs().min() > 0.01
    torch.testing.assert_close(
        fields["advantages"][last_tokens], expected.float(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradients_are_those_of_trl(results_of_trl, name):
    case = LOSSES[name]
    results = results_of_trl[f"loss: {name}"]
    settings = ["algorithm.adv_estimator=dr_grpo", *settings_of(case)]
    config = configure(*settings)
    check_settings(config)
    samples = our_batch(case.reward_scale)
    is_sampled = samples.batch.fields["loss_mask"] > 0
    policies = {
        "old_log_probs": results.old_log_probs,
        "rollout_log_probs": results.rollout_log_probs,
    }
    if results.ref_log_probs is not None:
        policies["ref_log_probs"] = results.ref_log_probs
    fields, _ = advantages(samples, *settings, **policies)

    log_probs = on_tokens(is_sampled, results.log_probs)
    entropy = on_tokens(is_sampled, results.entropy)
    loss, amounts = ActorLoss(config, len(BATCH))(log_probs, entropy, fields)
    loss.backward()

    factor = case.factor(case, results)
    assert loss.item() == pytest.approx(factor * results.loss, rel=1e-5, abs=1e-7)
    gradient = torch.tensor(results.log_probs_gradient) * factor
    assert_same_gradient(log_probs.grad[is_sampled], gradient)
    if results.entropy_gradient is not None:
        gradient = torch.tensor(results.entropy_gradient) * factor
        assert_same_gradient(entropy.grad[is_sampled], gradient)
    if "pg_clipfrac" in amounts:
        assert 0 < amounts["pg_clipfrac"] < 0.9, "otherwise clipping is not compared"
