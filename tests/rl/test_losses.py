"""The losses of actor and critic, against numbers worked out by hand."""

import math

import pytest
import torch

from rl.losses import ActorLoss, critic_loss
from tests.algorithms.test_algorithms import policy_loss_by_formula
from tests.support.samples import (
    DIVERGENCES,
    advantages,
    configure,
    make_samples,
    on_responses,
)


def loss_of(log_probs, *more, entropy=(1.0, 3.0), **fields):
    """Return the loss, amounts and gradient of two responses of one token each.

    Their weights are 0.5 and 0.25 in the loss, 0.5 each in means.
    """
    fields = {
        "loss_mask": [1.0, 1.0],
        "loss_weight": [0.5, 0.25],
        "token_weight": [0.5, 0.5],
        "advantages": [1.0, -1.0],
        "rollout_log_probs": [-1.0, -1.0],
        **fields,
    }
    tensors = {name: torch.tensor(values) for name, values in fields.items()} | {
        "sequence": torch.tensor([0, 1])
    }
    log_probs = torch.tensor(log_probs, requires_grad=True)
    loss, amounts = ActorLoss(configure(*more), 2)(log_probs, torch.tensor(entropy), tensors)
    loss.backward()
    return (
        loss.item(),
        {name: amount.item() for name, amount in amounts.items()},
        log_probs.grad.tolist(),
    )


def test_the_first_updates_loss_has_a_ratio_of_1():
    loss, amounts, gradient = loss_of([-1.5, -0.5])
    assert loss == amounts["pg_loss"] == -0.5 + 0.25
    assert gradient == [-0.5, 0.25]
    assert amounts["ppo_kl"] == 0
    assert amounts["pg_clipfrac"] == 0
    assert amounts["entropy"] == 2
    assert amounts["rollout_corr/log_prob_gap"] == 0.5
    assert amounts["rollout_corr/ratio"] == pytest.approx((math.exp(-0.5) + math.exp(0.5)) / 2)


def test_later_updates_are_clipped():
    """Ratios e^0.5 with A = 1 and e^-0.5 with A = -1: both clipped."""
    loss, amounts, gradient = loss_of(
        [-1.0, -1.5],
        "algorithm.clip_ratio_low=0.3",
        "algorithm.clip_ratio_high=0.1",
        old_log_probs=[-1.5, -1.0],
    )
    assert loss == pytest.approx(-1.1 * 0.5 + 0.7 * 0.25)
    assert gradient == [0, 0]
    assert amounts["pg_clipfrac"] == 1
    assert amounts["ppo_kl"] == pytest.approx(0.5 * -0.5 + 0.5 * 0.5)


def test_entropy_divergence_and_importance_weights_enter_the_loss():
    loss, amounts, gradient = loss_of(
        [-1.5, -0.5],
        "algorithm.entropy_coeff=0.1",
        "algorithm.use_kl_loss=true",
        "algorithm.kl_loss_type=k2",
        "algorithm.kl_loss_coef=2",
        "algorithm.rollout_is=token",
        "algorithm.rollout_is_threshold=1.2",
        ref_log_probs=[-1.5, -1.5],
    )
    weights = math.exp(-0.5), 1.2  # e^0.5 is cut
    policy = -0.5 * weights[0] + 0.25 * weights[1]
    assert amounts["pg_loss"] == pytest.approx(policy, abs=1e-6)
    assert amounts["kl_loss"] == pytest.approx(0.25 * 0.5)
    assert loss == pytest.approx(
        policy - 0.1 * (0.5 * 1 + 0.25 * 3) + 2 * amounts["kl_loss"], abs=1e-6
    )
    assert gradient == pytest.approx([-0.5 * weights[0], 0.25 * weights[1] + 2 * 0.25 * 1.0])


def learn(lengths, scores, log_probs, *more, **fields):
    """Return the loss, the metrics and the gradient of one group, from scores to the actor's loss.

    log_probs, fields: values of the response tokens, in order; log_probs are the policy's now,
    old_log_probs those before the update.
    """
    samples = make_samples(lengths, scores, [0] * len(lengths))
    f, metrics = advantages(samples, "algorithm.adv_estimator=dr_grpo", *more, **fields)
    log_probs = (
        torch.zeros_like(f["loss_mask"])
        .masked_scatter(f["loss_mask"] > 0, torch.tensor(log_probs))
        .requires_grad_()
    )
    loss, amounts = ActorLoss(configure(*more), len(samples))(
        log_probs, torch.zeros_like(log_probs), f
    )
    loss.backward()
    metrics |= {name: amount.item() for name, amount in amounts.items()}
    return loss.item(), metrics, on_responses(samples, log_probs.grad)


@pytest.mark.parametrize("dual_clip", [0, 3, 5])
@pytest.mark.parametrize("mode", ["ppo", "gspo", "cispo"])
def test_the_policy_loss_is_the_one_that_is_configured(mode, dual_clip):
    """Advantage -1: ratios of geometric mean 8, beyond either dual clip. Advantage 1: sqrt(2)."""
    new = [-1.0, -2.0, -1.5, -0.5, -0.25]
    ratios = [32, 32, 0.5, 0.5, 4]
    old = [p - math.log(r) for p, r in zip(new, ratios)]
    loss, metrics, gradient = learn(
        [3, 2],
        [1, 3],
        new,
        f"algorithm.loss_mode={mode}",
        "algorithm.clip_ratio_high=0.3",
        f"algorithm.clip_ratio_c={dual_clip}",
        old_log_probs=old,
    )
    leaf = torch.tensor(new, requires_grad=True)
    by_token = policy_loss_by_formula(
        mode,
        leaf,
        torch.tensor(old),
        torch.tensor([-1.0] * 3 + [1.0] * 2),
        [[0, 1, 2], [3, 4]],
        {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": dual_clip},
    )
    losses, is_clipped = zip(*by_token.values())
    expected_loss = sum(losses) / 5
    expected_loss.backward()
    assert loss == pytest.approx(expected_loss.item())
    assert metrics["pg_loss"] == loss
    assert metrics["pg_clipfrac"] == pytest.approx(sum(is_clipped) / 5)
    assert gradient == pytest.approx(leaf.grad.tolist())


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_divergence_in_the_loss_is_the_one_that_is_configured(name):
    """It is weighted as losses are. With equal scores there is no other loss."""
    new = [-1.0, -2.5, -2.0]
    old = [-1.1, -2.3, -1.8]
    reference = [-2.0, -1.0, -1.5]
    loss, metrics, gradient = learn(
        [2, 1],
        [1, 1],
        new,
        "algorithm.use_kl_loss=true",
        f"algorithm.kl_loss_type={name}",
        "algorithm.kl_loss_coef=0.5",
        "algorithm.loss_agg_mode=seq-mean-token-mean",
        old_log_probs=old,
        ref_log_probs=reference,
    )
    kl, slope = zip(*(DIVERGENCES[name](d) for d in (1.0, -1.5, -0.5)))
    assert metrics["kl_loss"] == pytest.approx(0.25 * kl[0] + 0.25 * kl[1] + 0.5 * kl[2])
    assert metrics["pg_loss"] == 0
    assert loss == pytest.approx(0.5 * metrics["kl_loss"])
    assert gradient == pytest.approx(
        [0.5 * 0.25 * slope[0], 0.5 * 0.25 * slope[1], 0.5 * 0.5 * slope[2]]
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rollouts_are_corrected_and_measured_by_the_policy_before_the_update(level):
    """vLLM's log-probabilities are -1. The update's own ratios are others, none of them clipped."""
    old = [-0.5, -1.2, -1.6, -0.9, -1.1]
    new = [-0.35, -1.4, -1.7, -1.05, -1.0]
    loss, metrics, gradient = learn(
        [2, 3],
        [1, 3],
        new,
        f"algorithm.rollout_is={level}",
        "algorithm.rollout_is_threshold=1.3",
        old_log_probs=old,
    )
    ratios = [math.exp(p + 1) for p in old]
    weights = (
        ratios if level == "token" else [math.prod(ratios[:2])] * 2 + [math.prod(ratios[2:])] * 3
    )
    losses = [
        -a * min(w, 1.3) * math.exp(p - q)
        for a, w, p, q in zip([-1, -1, 1, 1, 1], weights, new, old)
    ]
    assert loss == pytest.approx(sum(losses) / 5)
    assert gradient == pytest.approx([x / 5 for x in losses])
    measured = {
        "log_prob_gap": [abs(p + 1) for p in old],
        "kl": [r - 1 - math.log(r) for r in ratios],
        "ratio": ratios,
    }
    assert {name: metrics[f"rollout_corr/{name}"] for name in measured} == pytest.approx(
        {name: sum(x) / 5 for name, x in measured.items()}, rel=1e-4
    )


def test_importance_weights_of_sequences_are_of_rejected_tokens_too():
    """The weight is the likelihood ratio of the whole response that was drawn."""
    old = [-0.7, -0.35, -1.2, -1.5, -0.9, -1.1]
    rejection = [
        "algorithm.rollout_rs=token",
        "algorithm.rollout_rs_threshold=1.8",
        "algorithm.rollout_rs_threshold_lower=0.7",
    ]
    new = [-0.6, -0.5, -1.25, -1.3, -1.0, -1.15]
    _, _, plain = learn([3, 3], [1, 3], new, *rejection, old_log_probs=old)
    _, metrics, weighted = learn(
        [3, 3], [1, 3], new, *rejection, "algorithm.rollout_is=sequence", old_log_probs=old
    )
    assert metrics["rollout_corr/rejected"] == pytest.approx(2 / 6)
    assert plain[1] == plain[3] == 0
    for i in range(6):
        ratio = math.exp(sum(old[i // 3 * 3 :][:3]) + 3)  # vLLM's are -1
        assert weighted[i] == pytest.approx(min(ratio, 2.0) * plain[i])


@pytest.mark.parametrize("more", ["algorithm.loss_mode=gspo"])
def test_rejected_tokens_do_not_change_the_loss_of_the_others(more):
    """The second and the fourth token, of ratios e^0.65 and e^-0.5, are rejected."""
    old = [-0.7, -0.35, -1.2, -1.5, -0.9, -1.1]
    new = [-0.6, -0.5, -1.25, -1.3, -1.0, -1.15]
    loss, metrics, gradient = learn(
        [3, 3],
        [1, 3],
        new,
        more,
        "algorithm.rollout_rs=token",
        "algorithm.rollout_rs_threshold=1.8",
        "algorithm.rollout_rs_threshold_lower=0.7",
        old_log_probs=old,
    )
    kept = [0, 2, 4, 5]
    want, _, slope = learn(
        [2, 2], [1, 3], [new[i] for i in kept], more, old_log_probs=[old[i] for i in kept]
    )
    assert metrics["rollout_corr/rejected"] == pytest.approx(2 / 6)
    assert loss == pytest.approx(want)
    assert [gradient[i] for i in kept] == pytest.approx(slope)
    assert gradient[1] == gradient[3] == 0


@pytest.mark.parametrize(
    "clip, loss, share", [(0.5, (1.0 + 2.5**2) / 4, 0.5), (0.0, (1.0 + 1.0) / 4, 0)]
)
def test_values_move_no_further_than_their_clip(clip, loss, share):
    fields = {
        name: torch.tensor(values)
        for name, values in (
            ("values", [0.0, 0.0]),
            ("returns", [1.0, 3.0]),
            ("token_weight", [0.5, 0.5]),
        )
    }
    value, amounts = critic_loss(configure(f"critic.cliprange_value={clip}"))(
        torch.tensor([0.0, 2.0]), fields
    )
    assert value.item() == amounts["vf_loss"].item() == pytest.approx(loss)
    assert amounts["vf_clipfrac"].item() == share
