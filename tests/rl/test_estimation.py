"""Advantages, rejection and weights, against numbers worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from config import InputError
from rl.estimation import (
    ResponseTokens,
    next_kl_coef,
    sample_metrics,
    set_advantages,
    value_metrics,
)
from rollout.samples import Samples
from tests.algorithms.test_algorithms import BY_FORMULA, PARTS, WEIGHTS, Estimate, K
from tests.support.ranks import on_ranks
from tests.support.samples import (
    DIVERGENCES,
    advantages,
    configure,
    failure,
    make_samples,
    on_responses,
    whole,
)

GAE = "algorithm.adv_estimator=gae"


def test_group_advantages_and_weights_of_two_mini_batches():
    samples = make_samples([1, 2, 3, 2], [1, 0, 2, 2], [0, 0, 1, 1], failures=[failure(0)])
    f, metrics = advantages(samples, minis=[0, 0, 1, 1])
    root = math.sqrt(0.5)
    assert f["sequence"].tolist() == [0] * 3 + [1] * 4 + [2] * 5 + [3] * 4
    assert f["sequence"].dtype == torch.int64
    assert on_responses(samples, f["advantages"]) == pytest.approx(
        [root, -root, -root, 0, 0, 0, 0, 0], abs=1e-5
    )
    third = 1 / 3
    fifth = 1 / 5
    for name in ("loss_weight", "token_weight"):
        assert on_responses(samples, f[name]) == pytest.approx([third] * 3 + [fifth] * 5)
    for name in ("advantages", "returns", "loss_weight", "token_weight"):
        assert (f[name][f["loss_mask"] == 0] == 0).all()
    expected = {
        "score/mean": 1.25,
        "critic/score/mean": 1.25,
        "score/max": 2,
        "critic/score/max": 2,
        "score/min": 0,
        "critic/score/min": 0,
        "critic/rewards/mean": 1.25,
        "response_length/mean": 2,
        "response_length/max": 3,
        "response_length/min": 1,
        "prompt_length/mean": 2,
        "response_length/clip_ratio": 0,
        "reward/informative_groups": 0.5,
        "reward/failure_rate": 0.2,
        "critic/advantages/max": root,
        "critic/advantages/min": -root,
    }
    assert {k: metrics[k] for k in expected} == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "mode, weights",
    [
        ("token-mean", [1 / 3] * 3 + [1 / 5] * 5),
        ("seq-mean-token-sum", [1 / 2] * 8),
        ("seq-mean-token-sum-norm", [1 / 2 / 50] * 8),
        ("seq-mean-token-mean", [1 / 2, 1 / 4, 1 / 4, 1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4]),
    ],
)
def test_loss_weights_are_of_one_mini_batch(mode, weights):
    samples = make_samples([1, 2, 3, 2], [1, 0, 2, 2], [0, 0, 1, 1])
    f, _ = advantages(
        samples, f"algorithm.loss_agg_mode={mode}", "rollout.max_tokens=50", minis=[0, 0, 1, 1]
    )
    assert on_responses(samples, f["loss_weight"]) == pytest.approx(weights)
    assert on_responses(samples, f["token_weight"]) == pytest.approx([1 / 3] * 3 + [1 / 5] * 5)


@pytest.mark.parametrize("name", BY_FORMULA)
def test_advantages_are_those_of_the_estimator_and_the_discounts_that_are_configured(name):
    """Discounts that an estimator does not read (check_settings rejects them) change nothing."""
    scores = [1, 3, 2 if name == "max_rl" else -2, 0.5]
    # max_at_k learns nothing from groups of fewer than K.
    group = [4, 4, 4, 4] if name == "max_at_k" else [0, 0, 4, 4]
    baseline = [0.25, 0.25, 4.0, 4.0]
    values = [[0.5, -1.0, 2.0], [1.5, 0.25], [-0.75], [2.0, 1.0, 0.0, -1.0]]
    samples = make_samples(list(map(len, values)), scores, group, baseline)
    parts = {f"part{i}": share * samples.scores for i, share in enumerate(PARTS)}
    own_settings = {
        "max_at_k": [f"algorithm.adv_kwargs.k={K}"],
        "gdpo": [f"reward.weights.part{i}={weight}" for i, weight in enumerate(WEIGHTS)],
    }
    samples = replace(samples, parts=parts)
    rewards = [[0] * (len(row) - 1) + [score] for row, score in zip(values, scores)]
    steps = {}
    if name == "grpo_steps":
        # As in BY_FORMULA: a step ends at every second token, from the first one on.
        is_end = [t % 2 == 0 for row in values for t in range(len(row))]
        of_steps = [float(end * reward) for end, reward in zip(is_end, sum(rewards, []))]
        steps = {"turn_rewards": of_steps, "step_ends": [float(end) for end in is_end]}
    f, _ = advantages(
        samples,
        *own_settings.get(name, []),
        f"algorithm.adv_estimator={name}",
        "algorithm.gamma=0.9",
        "algorithm.lam=0.7",
        values=sum(values, []),
        **steps,
    )
    estimate = Estimate(rewards, group, values, baseline, gamma=0.9, lam=0.7)
    expected_advantages, expected_returns = BY_FORMULA[name](estimate)
    expected_advantages = pytest.approx(sum(expected_advantages, []), abs=1e-5)
    expected_returns = pytest.approx(sum(expected_returns, []), abs=1e-5)
    assert on_responses(samples, f["advantages"]) == expected_advantages
    assert on_responses(samples, f["returns"]) == expected_returns


@pytest.mark.parametrize(
    "parts, more, message",
    [
        ({}, [], "the reward function returns a number: return a dictionary"),
        ({"a": 0.5, "b": 0.5}, ["reward.weights.a=1"], "the difference is 1.5"),
    ],
    ids=["no parts", "a score of something else"],
)
def test_gdpo_needs_a_score_that_is_made_of_parts(parts, more, message):
    samples = make_samples([2, 1], [1, 3], [0, 0])
    samples = replace(
        samples, parts={name: share * samples.scores for name, share in parts.items()}
    )
    with pytest.raises(InputError, match=message):
        advantages(samples, "algorithm.adv_estimator=gdpo", *more)


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus"])
def test_metrics_of_advantages_and_returns(name):
    """Over all tokens, also for an estimator that reads whole responses."""
    samples = make_samples([1, 2, 3, 2], [1, 0, 2, 5], [0, 0, 1, 1])
    f, metrics = advantages(samples, f"algorithm.adv_estimator={name}", "algorithm.gamma=0.5")
    for quantity in ("advantages", "returns"):
        values = on_responses(samples, f[quantity])
        reported = [metrics[f"critic/{quantity}/{kind}"] for kind in ("mean", "max", "min")]
        expected = [sum(values) / len(values), max(values), min(values)]
        assert reported == pytest.approx(expected, abs=1e-6), quantity


def test_a_step_reports_the_metrics_of_its_draws_and_of_its_plans():
    samples = replace(make_samples([1, 2], [1, 0], [0, 0]), metrics={"rollout/draws": 2.0})
    share = whole(samples)
    share.plans[0].metrics["perf/plan_efficiency"] = 0.5
    metrics = set_advantages(configure(), samples, share, 0.0)
    assert metrics["rollout/draws"] == 2.0
    assert metrics["perf/plan_efficiency"] == 0.5


@pytest.mark.parametrize("largest", [0.001, 1.0, 1000.0])
def test_scores_may_differ_from_the_sum_of_their_parts_by_rounding_errors(largest):
    """Up to a ten-thousandth of the largest score, or of 1 where all scores are small."""
    tolerance = 1e-4 * (1 + largest)
    for difference in (0.9 * tolerance, 1.1 * tolerance):
        samples = make_samples([2, 1], [largest, 0.0], [0, 0])
        samples = replace(samples, parts={"a": samples.scores.double() - difference})
        if difference < tolerance:
            advantages(samples, "algorithm.adv_estimator=gdpo")
        else:
            with pytest.raises(InputError, match=rf"the difference is {difference:.3g}\)"):
                advantages(samples, "algorithm.adv_estimator=gdpo")


@pytest.mark.parametrize("weights", [[], ["reward.weights={right: 2.0}"]])
def test_the_part_of_a_reward_model_has_a_weight_of_its_own(weights):
    """Without reward.weights, all other parts have the weight 1, otherwise those without one 0."""
    right = torch.tensor([1.0, 0.0, 0.0])
    neat = torch.tensor([0.0, 1.0, 1.0])
    model = torch.tensor([0.5, -2.0, 3.0])
    scores = (2 * right if weights else right + neat) + 0.25 * model
    samples = make_samples([1, 2, 1], scores.tolist(), [0, 0, 0])
    samples = replace(samples, parts={"right": right, "neat": neat, "model": model})
    reward_model = ["reward.model.path=unused", "reward.model.weight=0.25"]
    f, _ = advantages(samples, "algorithm.adv_estimator=gdpo", *reward_model, *weights)
    expected = scores.repeat_interleave(torch.tensor([1, 2, 1])).tolist()
    assert on_responses(samples, f["returns"]) == pytest.approx(expected, abs=1e-6)


def test_max_rl_refuses_negative_rewards():
    samples = make_samples([2, 1], [1, -0.5], [0, 0])
    with pytest.raises(InputError, match="needs rewards of 0 or more, but one is -0.5"):
        advantages(samples, "algorithm.adv_estimator=max_rl")


@pytest.mark.parametrize("name", ["dr_grpo", "remax"])
def test_advantages_are_whitened_over_all_tokens(name):
    """An estimator of responses, and one of tokens."""
    settings = [f"algorithm.adv_estimator={name}"]
    samples = make_samples([2, 1, 3], [1, 3, -2], [0, 0, 0], [0.5] * 3)
    plain, _ = advantages(samples, *settings)
    plain = torch.tensor(on_responses(samples, plain["advantages"]), dtype=torch.float64)
    samples = make_samples([2, 1, 3], [1, 3, -2], [0, 0, 0], [0.5] * 3)
    f, metrics = advantages(samples, *settings, "algorithm.whiten_advantages=true")
    expected = (plain - plain.mean()) / plain.std()
    assert on_responses(samples, f["advantages"]) == pytest.approx(expected.tolist(), abs=1e-5)
    assert metrics["critic/advantages/mean"] == pytest.approx(0, abs=1e-6)


def test_truncated_responses_are_left_out_of_the_loss_but_not_of_their_group():
    """Responses of more than three tokens are truncated."""
    settings = ["algorithm.adv_estimator=dr_grpo", "algorithm.loss_agg_mode=seq-mean-token-mean"]
    samples = make_samples([2, 4, 1], [1, 3, 2], [0, 0, 0])
    f, _ = advantages(samples, *settings, "algorithm.mask_truncated=true")
    assert on_responses(samples, f["advantages"]) == [-1, -1, 1, 1, 1, 1, 0]
    of_loss = [1 / 4, 1 / 4, 0, 0, 0, 0, 1 / 2]
    assert on_responses(samples, f["loss_weight"]) == pytest.approx(of_loss)
    assert on_responses(samples, f["token_weight"]) == pytest.approx(
        [1 / 3, 1 / 3, 0, 0, 0, 0, 1 / 3]
    )


def test_rejected_tokens_stay_out_where_truncated_responses_are_left_out_too():
    """The second token of the first response is rejected; the second response is truncated."""
    settings = [
        "algorithm.adv_estimator=dr_grpo",
        "algorithm.loss_agg_mode=token-mean",
        "algorithm.rollout_rs=token",
        "algorithm.mask_truncated=true",
    ]
    samples = make_samples([2, 4, 1], [1, 3, 2], [0, 0, 0])
    old_log_probs = [-1.0, -9.0, *[-1.0] * 5]
    f, _ = advantages(samples, *settings, old_log_probs=old_log_probs)
    assert on_responses(samples, f["loss_weight"]) == pytest.approx([1 / 2, 0, 0, 0, 0, 0, 1 / 2])


KL = ["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=k1"]


def test_divergence_comes_off_the_reward_of_each_token():
    """With values of 0, gamma and lambda of 1, the returns are rewards to go."""
    samples = make_samples([2, 1], [1, 3], [0, 1])
    f, metrics = advantages(
        samples,
        GAE,
        *KL,
        kl_coef=0.5,
        old_log_probs=[-1.0, -2.0, -3.0],
        ref_log_probs=[-2.0, -5.0, -2.0],
        values=[0.0, 0.0, 0.0],
    )
    assert on_responses(samples, f["returns"]) == pytest.approx(
        [1 - 0.5 * 4, 1 - 0.5 * 3, 3 + 0.5 * 1]
    )
    assert metrics["actor/reward_kl"] == pytest.approx((1 + 3 - 1) / 3)
    assert metrics["actor/kl_coef"] == 0.5
    assert metrics["critic/rewards/mean"] == 2, (
        "rewards of sequences are reported without the divergence"
    )


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_divergence_in_the_reward_is_the_one_that_is_configured(name):
    """Not discounted, REINFORCE++'s returns are rewards to go."""
    samples = make_samples([2, 1], [1, 3], [0, 1])
    f, metrics = advantages(
        samples,
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.use_kl_in_reward=true",
        f"algorithm.kl_penalty={name}",
        kl_coef=0.5,
        old_log_probs=[-1.0, -2.5, -2.0],
        ref_log_probs=[-2.0, -1.0, -1.5],
    )
    kl = [DIVERGENCES[name](d)[0] for d in (1.0, -1.5, -0.5)]
    to_go = [1 - 0.5 * (kl[0] + kl[1]), 1 - 0.5 * kl[1], 3 - 0.5 * kl[2]]
    assert on_responses(samples, f["returns"]) == pytest.approx(to_go, abs=1e-6)
    assert metrics["actor/reward_kl"] == pytest.approx(sum(kl) / 3)


@pytest.mark.parametrize(
    "reference, factor",
    [(-1.1, 1 + 0.2 * 5 / 40), (-1.0, 1 - 0.2 * 5 / 40), (-1.011, 1 + 0.1 * 5 / 40)],
)
def test_the_coefficient_adapts(reference, factor):
    """It moves by 0.2 at most, less near the target, times 5 responses / a horizon of 40.

    Neither groups nor mini-batches count.
    """
    samples = make_samples([2, 1, 1, 2, 3], [1, 3, 1, 2, 0], [0, 0, 0, 1, 1])
    settings = (
        *KL,
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.target_kl=0.01",
        "algorithm.kl_ctrl.horizon=40",
    )
    _, metrics = advantages(
        samples,
        *settings,
        kl_coef=0.5,
        old_log_probs=[-1.0] * 9,
        ref_log_probs=[reference] * 9,
        minis=[0, 0, 0, 1, 1],
    )
    assert metrics["actor/kl_coef"] == 0.5, "the one that this step's rewards have"
    assert next_kl_coef(configure(*settings), 0.5, metrics, 5) == pytest.approx(
        0.5 * factor, rel=1e-4
    )
    assert next_kl_coef(configure(*KL), 0.5, metrics, 5) == 0.5


@pytest.mark.parametrize(
    "level, kept",
    [("sequence", [0, 0, 1, 1, 1]), ("geometric", [1, 1, 1, 1, 1]), ("token", [0, 1, 1, 1, 1])],
)
def test_what_is_rejected_is_in_no_denominator(level, kept):
    """The first response's ratios are e^0.8 = 2.2 and 1, and their geometric mean e^0.4 = 1.5."""
    samples = make_samples([2, 3], [1, 0], [0, 0])
    f, metrics = advantages(
        samples,
        f"algorithm.rollout_rs={level}",
        "algorithm.loss_agg_mode=seq-mean-token-mean",
        old_log_probs=[-0.2, -1.0, -1.0, -0.9, -1.1],
    )
    assert on_responses(samples, f["token_weight"]) == pytest.approx([k / sum(kept) for k in kept])
    assert f["loss_weight"].sum() == pytest.approx(1)
    assert f["token_weight"].sum() == pytest.approx(1)
    assert (f["loss_weight"] > 0).tolist() == (f["token_weight"] > 0).tolist()
    assert metrics["rollout_corr/rejected"] == pytest.approx(1 - sum(kept) / 5)
    root = math.sqrt(0.5)
    assert on_responses(samples, f["advantages"]) == pytest.approx(
        [root, root, -root, -root, -root], abs=1e-5
    )


def test_everything_rejected_leaves_nothing_and_no_nan():
    samples = make_samples([2, 3], [1, 0], [0, 0])
    f, metrics = advantages(samples, "algorithm.rollout_rs=token", old_log_probs=[-5.0] * 5)
    assert not f["loss_weight"].any()
    assert not f["token_weight"].any()
    assert metrics["rollout_corr/rejected"] == 1


def test_remax_takes_off_the_greedy_score():
    samples = make_samples([1, 2], [1, 3], [0, 1], baseline=[0.25, 4.0])
    f, _ = advantages(samples, "algorithm.adv_estimator=remax")
    assert on_responses(samples, f["advantages"]) == [0.75, -1, -1]


def test_overlong_responses_are_penalised_but_their_score_is_not():
    samples = make_samples([6, 8, 10], [1, 1, 1], [0, 0, 0])
    f, metrics = advantages(
        samples,
        "algorithm.adv_estimator=dr_grpo",
        "rollout.max_tokens=10",
        "reward.overlong_buffer=4",
        "reward.overlong_penalty=0.6",
    )
    outcome = [1, 1 - 0.3, 1 - 0.6]
    assert on_responses(samples, f["returns"]) == pytest.approx(
        [outcome[0]] * 6 + [outcome[1]] * 8 + [outcome[2]] * 10
    )
    assert metrics["critic/score/mean"] == 1
    assert metrics["critic/rewards/mean"] == pytest.approx(0.7)
    assert metrics["reward/informative_groups"] == 0, "groups are compared by score"


def test_values_are_explained():
    samples = make_samples([1, 1, 1, 1], [0, 2, 0, 2], [0, 1, 2, 3])
    _, metrics = advantages(samples, GAE, values=[0.5, 1.5, 0.5, 1.5])
    assert metrics["critic/vf_explained_var"] == pytest.approx(0.75)
    assert metrics["critic/values/mean"] == 1


VALUES = [0.5, 1.5, 0.5, 1.5]
RETURNS = [0.0, 2.0, 3.0, 1.0]


def explained_on_rank() -> float:
    """Each of two ranks has two of four responses of one token."""
    samples = make_samples([1, 1], [0, 0], [0, 1])
    rank = dist.get_rank()
    fields = samples.batch.fields
    mask = fields["loss_mask"]
    for name, values in (("values", VALUES), ("returns", RETURNS)):
        part = torch.tensor(values[2 * rank : 2 * rank + 2])
        fields[name] = torch.zeros_like(mask).masked_scatter(mask > 0, part)
    share = replace(whole(samples), group=dist.group.WORLD)
    return value_metrics(samples, ResponseTokens(share))["critic/vf_explained_var"]


def test_values_are_explained_over_all_ranks(tmp_path):
    errors = torch.tensor(RETURNS) - torch.tensor(VALUES)
    variance_of_errors = errors.var(correction=0)
    expected = 1 - variance_of_errors / torch.tensor(RETURNS).var(correction=0)
    assert on_ranks(2, tmp_path, explained_on_rank) == pytest.approx([expected.item()] * 2)


# Name -> settings of estimators that sum over the tokens of all ranks.
DIVIDED = {
    "gae": [GAE, "algorithm.gamma=0.9", "algorithm.lam=0.8"],
    "reinforce_plus_plus": ["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9"],
    "remax, whitened": ["algorithm.adv_estimator=remax", "algorithm.whiten_advantages=true"],
    "grpo, whitened": ["algorithm.adv_estimator=grpo", "algorithm.whiten_advantages=true"],
    "grpo_steps": ["algorithm.adv_estimator=grpo_steps"],
}
OF_LOSSES = ("advantages", "returns", "loss_weight", "token_weight")


def samples_with_numbers() -> Samples:
    """Return five responses to two prompts, with random numbers for each of their tokens."""
    samples = make_samples([2, 3, 1, 3, 2], [1, 3, 0.5, 2, 0], [0, 0, 1, 1, 1], [0.5, 0.5, 1, 1, 1])
    fields = samples.batch.fields
    mask = fields["loss_mask"]
    generator = torch.Generator().manual_seed(0)
    for name in ("old_log_probs", "ref_log_probs", "values", "turn_rewards"):
        fields[name] = torch.randn(len(mask), generator=generator) * mask
    fields["step_ends"] = mask.clone()
    return samples


def numbers_of_all_responses() -> dict[str, tuple[list[dict], dict]]:
    """Return, by name, the numbers of each response for the losses, and the metrics.

    Each rank has every second response. There are two mini-batches.
    """
    group = dist.group.WORLD
    numbers = {}
    for name, settings in DIVIDED.items():
        samples = samples_with_numbers()
        indices = torch.arange(len(samples))[dist.get_rank() :: dist.get_world_size()]
        share = replace(
            whole(samples, [0, 0, 0, 1, 1]),
            batch=samples.batch.select(indices),
            indices=indices,
            is_reporter=torch.ones(len(indices), dtype=torch.bool),
            group=group,
        )
        config = configure(*settings, *KL, "algorithm.rollout_rs=token")
        metrics = set_advantages(config, samples, share, kl_coef=0.1)
        of_responses = [{}] * len(samples)
        for i, index in enumerate(indices.tolist()):
            fields = share.batch.select([i]).fields
            of_responses[index] = {field: fields[field].tolist() for field in OF_LOSSES}
        numbers[name] = (of_responses, metrics)
    return numbers


@pytest.fixture(scope="module")
def on_one_and_two_ranks(tmp_path_factory) -> tuple[dict, list[dict]]:
    folder = tmp_path_factory.mktemp("ranks")
    (alone,) = on_ranks(1, folder, numbers_of_all_responses)
    return alone, on_ranks(2, folder, numbers_of_all_responses)


@pytest.mark.parametrize("name", DIVIDED)
def test_ranks_that_divide_a_step_compute_what_one_rank_does(on_one_and_two_ranks, name):
    """To the bit. Otherwise, more ranks would train a different policy."""
    alone, two_ranks = on_one_and_two_ranks
    of_responses, metrics = alone[name]
    together = []
    for rank, numbers in enumerate(two_ranks):
        of_responses_of_rank, metrics_of_rank = numbers[name]
        assert metrics_of_rank == metrics
        together.append(of_responses_of_rank[rank::2])
    assert together == [of_responses[0::2], of_responses[1::2]]
    assert 0 < metrics["rollout_corr/rejected"] < 1


def test_a_step_shows_the_scores_of_all_its_draws_rather_than_of_what_it_trains_on():
    """With filter_groups, the groups that were left out count in the metrics of the draws."""
    of_draws = {"reward/informative_groups": 0.25, "score/mean": 0.125}
    samples = replace(make_samples([1, 2], [1, 0], [0, 0]), metrics=of_draws)
    _, metrics = advantages(samples)
    assert {name: metrics[name] for name in of_draws} == of_draws
    assert metrics["critic/rewards/mean"] == 0.5


def test_penalties_for_length_and_divergence_come_off_the_same_outcome():
    """A truncated response is left out of the loss alone.

    Responses of 2 and 4 tokens with a score of 1: the second has the penalty of 0.6 at the limit,
    and the divergence of each token is 1.
    """
    samples = make_samples([2, 4], [1, 1], [0, 0])
    old = [-1.0] * 6
    f, metrics = advantages(
        samples,
        *KL,
        "algorithm.adv_estimator=dr_grpo",
        "algorithm.mask_truncated=true",
        "rollout.max_tokens=4",
        "reward.overlong_buffer=2",
        "reward.overlong_penalty=0.6",
        kl_coef=0.5,
        old_log_probs=old,
        ref_log_probs=[-2.0] * 6,
    )
    outcomes = [1 - 0.5 * 2, 1 - 0.6 - 0.5 * 4]
    mean = sum(outcomes) / 2
    assert on_responses(samples, f["returns"]) == pytest.approx([outcomes[0]] * 2 + [-1.6] * 4)
    expected = [outcomes[0] - mean] * 2 + [outcomes[1] - mean] * 4
    assert on_responses(samples, f["advantages"]) == pytest.approx(expected)
    assert on_responses(samples, f["loss_weight"]) == pytest.approx([0.5] * 2 + [0] * 4)
    assert metrics["critic/rewards/min"] == pytest.approx(0.4), "without the divergence"
    assert metrics["score/min"] == 1
    assert metrics["actor/reward_kl"] == 1, "also that of the response that is left out"


def test_tokens_of_each_age_are_measured_before_the_update_with_those_that_are_rejected():
    """vLLM's log-probabilities are -1. Of five tokens, two are one step old and none is two."""
    samples = make_samples([2, 3], [1, 0], [0, 0])
    _, metrics = advantages(
        samples,
        "rollout.partial.enable=true",
        "rollout.partial.max_staleness=2",
        "algorithm.rollout_rs=token",
        "algorithm.rollout_rs_threshold=1.5",
        old_log_probs=[-1.0, -0.5, -1.0, -1.25, 1.0],
        age=[1.0, 0.0, 0.0, 0.0, 1.0],
    )
    assert metrics["rollout_corr/rejected"] == pytest.approx(2 / 5)
    shares = [metrics[f"partial/age_{age}/tokens"] for age in range(3)]
    assert shares == pytest.approx([3 / 5, 2 / 5, 0])
    assert metrics["rollout_corr/log_prob_gap"] == pytest.approx((0.5 + 0 + 0.25) / 3)
    first = 1.0
    second = math.exp(2)
    size = (first + second) ** 2 / 2 / (first**2 + second**2)
    assert metrics["partial/age_1/effective_sample_size"] == pytest.approx(size, rel=1e-4)
    assert "partial/age_2/effective_sample_size" not in metrics


@pytest.mark.parametrize("name", ["dr_grpo", "remax"])
def test_a_response_without_tokens_has_no_part_in_the_metrics_of_advantages(name):
    """It still counts in its group, of which it has the best score."""
    samples = make_samples([2, 0, 1], [1, 9, 2], [0, 0, 0], [4.0] * 3)
    f, metrics = advantages(samples, f"algorithm.adv_estimator={name}")
    values = {"dr_grpo": [-3, -3, -2], "remax": [-3, -3, -2]}[name]
    assert on_responses(samples, f["advantages"]) == values
    of_advantages = [metrics[f"critic/advantages/{kind}"] for kind in ("mean", "max", "min")]
    assert of_advantages == pytest.approx([-8 / 3, -2, -3])
    assert metrics["score/max"] == 9


def test_lengths_are_those_of_responses_and_of_prompts():
    samples = make_samples([1, 4, 2], [1, 0, 2], [0, 0, 1], failures=[failure(0)])
    samples = replace(samples, lengths=torch.tensor([4, 9, 9]), num_drawn=10)
    config = configure()
    metrics = sample_metrics(config, samples, whole(samples))
    expected = {
        "response_length/mean": 7 / 3,
        "response_length/max": 4,
        "response_length/min": 1,
        "prompt_length/mean": (3 + 5 + 7) / 3,
        "prompt_length/max": 7,
        "prompt_length/min": 3,
        "response_length/clip_ratio": 1 / 3,
        "reward/informative_groups": 2 / 3,
        "reward/failure_rate": 1 / 10,
    }
    assert metrics == pytest.approx(expected)
