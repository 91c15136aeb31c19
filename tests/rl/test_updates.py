"""Updates of a real engine: a bandit finds the best arms, and the first ratio is 1."""

import math
import os
from types import SimpleNamespace

import pytest
import torch

from data.batching.batch import Batch
from data.prompts import Prompt
from engines.fsdp.engine import FSDPEngine
from engines.parallel import device
from rl import updates
from rl.estimation import next_kl_coef, set_advantages
from rl.losses import ActorLoss, critic_loss
from rl.models import head_of, mini_batch_prompts, role_configs
from rollout.samples import Samples
from rollout.sharing import divide
from tests.rl.test_losses import loss_of
from tests.support.models import make_model
from tests.support.samples import (
    configure,
    make_samples,
    on_one_rank,
    whole,
)

GAE = "algorithm.adv_estimator=gae"

ARM_PROMPTS = [[5, 6], [7, 8, 9]]
ARMS = [[10, 11], [10, 12], [13, 11], [13, 12], [14, 15]]
ARM_SCORES = torch.tensor([[0.0, 0.2, 1.0, 0.4, 0.1], [0.3, 1.0, 0.0, 0.1, 0.2]])


@pytest.fixture(scope="module")
def this_device():
    """Open a process group of this process alone, and leave no trace in the environment."""
    environment = dict(os.environ)
    found = device.init()
    os.environ.clear()
    os.environ.update(environment)
    yield found
    device.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", num_hidden_layers=1)


def bandit_samples(indices=None):
    """Return all arms of all prompts, or those at some indices, with their scores."""
    pairs = [(p, a) for p in range(2) for a in range(5)]
    ids = [torch.tensor(ARM_PROMPTS[p] + ARMS[a]) for p, a in pairs]
    masks = [torch.tensor([0.0] * len(ARM_PROMPTS[p]) + [1.0] * len(ARMS[a])) for p, a in pairs]
    batch = Batch(
        torch.cat(ids), torch.tensor([0, *map(len, ids)]).cumsum(0), {"loss_mask": torch.cat(masks)}
    )
    indices = list(range(10)) if indices is None else indices
    group = torch.tensor([i // 5 for i in indices])
    batch = batch.select(indices)
    return Samples(
        batch,
        ["" for _ in indices],
        [Prompt([], "", {}) for _ in indices],
        **on_one_rank(batch),
        group=group,
        scores=ARM_SCORES.flatten()[indices],
        truncated=torch.zeros(len(indices), dtype=torch.bool),
        failures=[],
        num_drawn=len(indices),
    )


def choices(engine):
    """Return how likely the policy is to choose each arm of each prompt: [2, 5]."""
    samples = bandit_samples()
    log_probs = updates.log_probs(engine, whole(samples))
    of_arm = torch.stack([x.sum() for x in log_probs.split(samples.lengths.tolist())]).view(2, 5)
    return of_arm.softmax(1)


def play(config, this_device, steps):
    """Train on arms that the policy chooses; return its expected scores around each step."""
    engines = {
        role: FSDPEngine(
            settings, this_device, steps, optimize=role != "reference", head=head_of(role)
        )
        for role, settings in role_configs(config).items()
    }
    actor, critic, reference = (engines.get(role) for role in ("actor", "critic", "reference"))
    generator = torch.Generator().manual_seed(0)
    scores = []
    kl_coef = config.algorithm.kl_ctrl.kl_coef
    for step in range(steps):
        likely = choices(actor)
        scores.append((likely * ARM_SCORES).sum(1).tolist())
        drawn = torch.multinomial(likely, 16, replacement=True, generator=generator)
        samples = bandit_samples((drawn + torch.tensor([[0], [5]])).flatten().tolist())
        samples.baseline = ARM_SCORES.gather(1, likely.argmax(1)[:, None])[samples.group, 0]
        share = divide(samples, samples.mini_batches(mini_batch_prompts(config)), actor)
        fields = share.batch.fields
        fields["old_log_probs"] = fields["rollout_log_probs"] = updates.log_probs(actor, share)
        if reference:
            fields["ref_log_probs"] = updates.log_probs(reference, share)
        if critic:
            fields["values"] = updates.compute(critic.values, share)
        kl_coef = next_kl_coef(
            config, kl_coef, set_advantages(config, samples, share, kl_coef), len(samples)
        )
        if critic:
            updates.update(
                critic,
                share.parts,
                critic_loss(config),
                step,
                config.algorithm.ppo_epochs,
                "critic",
            )
        loss_fn = ActorLoss(config, len(samples))
        metrics = updates.update(
            actor, share.parts, loss_fn, step, config.algorithm.ppo_epochs, "actor"
        )
        assert metrics["actor/skipped"] == 0
    return [*scores, (choices(actor) * ARM_SCORES).sum(1).tolist()]


BANDIT = [
    "data.train_batch_size=2",
    "algorithm.ppo_mini_batch_size=1",
    "algorithm.ppo_epochs=2",
    "optim.lr=2e-3",
    "optim.weight_decay=0",
    "critic.lr=1e-2",
    "data.max_tokens_per_micro_batch=2000",
]
ALGORITHMS = {
    "grpo": [],
    "gae": [GAE],
    "rloo gspo": ["algorithm.adv_estimator=rloo", "algorithm.loss_mode=gspo"],
    "remax cispo": ["algorithm.adv_estimator=remax", "algorithm.loss_mode=cispo"],
    "reinforce++": [
        "algorithm.adv_estimator=reinforce_plus_plus_baseline",
        "algorithm.loss_agg_mode=seq-mean-token-sum",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_bandit_finds_the_best_arms(this_device, model, name):
    scores = play(configure(*BANDIT, *ALGORITHMS[name], path=model), this_device, 20)
    assert max(scores[0]) < 0.5
    assert min(scores[-1]) > 0.85


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=10"],
        [
            "algorithm.use_kl_in_reward=true",
            "algorithm.kl_ctrl.kl_coef=10",
            "algorithm.adv_estimator=dr_grpo",
        ],
    ],
)
def test_divergence_from_the_reference_holds_the_policy_back(this_device, model, more):
    scores = play(configure(*BANDIT, *more, path=model), this_device, 20)
    assert max(abs(a - b) for a, b in zip(scores[0], scores[-1])) < 0.2


def first_update(config, this_device):
    """Return an actor, and the mini-batches of two groups of unequal scores to update it with."""
    actor = FSDPEngine(config, this_device, 10)
    samples = bandit_samples()
    share = divide(samples, samples.mini_batches(mini_batch_prompts(config)), actor)
    fields = share.batch.fields
    fields["old_log_probs"] = updates.log_probs(actor, share)
    fields["rollout_log_probs"] = fields["old_log_probs"] - 0.1 * fields["loss_mask"]
    set_advantages(config, samples, share, 0.0)
    return actor, share.parts


def test_the_first_mini_batch_of_an_update_has_a_ratio_of_exactly_1(this_device, model):
    """In several micro-batches; the second mini-batch meets a changed policy."""
    config = configure(*BANDIT, "data.max_tokens_per_micro_batch=12", path=model)
    actor, parts = first_update(config, this_device)
    loss_fn = ActorLoss(config, 10)
    assert [len(part) for part, _ in parts] == [5, 5]
    assert sum(parts[0][0].lengths) > 12
    first = updates.update(actor, parts[:1], loss_fn, 0, 1, "actor")
    assert first["actor/ppo_kl"] == 0
    assert first["actor/pg_clipfrac"] == 0
    assert first["actor/grad_norm"] > 0
    second = updates.update(actor, parts[1:], loss_fn, 0, 1, "actor")
    assert second["actor/ppo_kl"] != 0


def test_an_update_is_a_step_for_each_mini_batch_and_epoch(this_device, model):
    """Its metrics are means over the steps."""
    config = configure(*BANDIT, "algorithm.ppo_epochs=3", path=model)
    actor, parts = first_update(config, this_device)
    twin = FSDPEngine(config, this_device, 10)
    loss_fn = ActorLoss(config, 10)
    updated = updates.update(actor, parts, loss_fn, 4, 3, "actor")
    results = [twin.train_batch(part, loss_fn, 4) for _ in range(3) for part, _ in parts]
    for key in ("loss", "pg_loss", "pg_clipfrac", "entropy", "ppo_kl", "grad_norm", "lr"):
        assert updated[f"actor/{key}"] == pytest.approx(
            sum(r[key] for r in results) / 6, rel=1e-6
        ), key
    assert updated["actor/skipped"] == 0
    assert not any("rollout" in key for key in updated)
    weights = [dict(engine.export_weights()) for engine in (actor, twin)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    poisoned = updates.update(
        actor, parts, lambda log_probs, *_: (log_probs.sum() * math.nan, {}), 4, 3, "critic"
    )
    assert poisoned["critic/skipped"] == 6, "a count, not a mean"


def test_the_gap_to_the_rollout_is_measured_on_all_tokens_before_or_in_the_update(
    this_device, model
):
    """Before the update all tokens are rejected; the other update has no old log-probabilities."""

    def measure(*more):
        config = configure(*BANDIT, "algorithm.ppo_mini_batch_size=null", *more, path=model)
        actor = FSDPEngine(config, this_device, 10)
        samples = bandit_samples()
        share = divide(samples, samples.mini_batches(mini_batch_prompts(config)), actor)
        fields = share.batch.fields
        old = updates.log_probs(actor, share)
        mask = fields["loss_mask"]
        fields["rollout_log_probs"] = old - mask * torch.where(
            torch.arange(len(mask)) % 3 == 0, 0.1, 0.3
        )
        if more:
            fields["old_log_probs"] = old
        estimated = set_advantages(config, samples, share, 0.0)
        updated = updates.update(actor, share.parts, ActorLoss(config, len(samples)), 0, 1, "actor")
        assert {"actor/loss", "actor/skipped"} < updated.keys()
        assert any("gap" in key for key in updated) != any("gap" in key for key in estimated)
        return {
            key: x for key, x in (estimated | updated).items() if key.startswith("rollout_corr/")
        }, mask

    by_update, mask = measure()
    before, _ = measure("algorithm.rollout_rs=token", "algorithm.rollout_rs_threshold=1.01")
    assert before.pop("rollout_corr/rejected") == 1
    assert before == pytest.approx(by_update, rel=1e-5)
    gaps = [0.1 if i % 3 == 0 else 0.3 for i, inside in enumerate(mask.tolist()) if inside]
    ratios = [math.exp(gap) for gap in gaps]
    assert before == pytest.approx(
        {
            "rollout_corr/log_prob_gap": sum(gaps) / len(gaps),
            "rollout_corr/ratio": sum(ratios) / len(gaps),
            "rollout_corr/kl": sum(r - 1 - gap for r, gap in zip(ratios, gaps)) / len(gaps),
            "rollout_corr/effective_sample_size": sum(ratios) ** 2
            / len(gaps)
            / sum(r * r for r in ratios),
        },
        rel=1e-4,
    )


def test_the_gap_to_vllm_is_that_of_tokens_of_the_current_weights():
    """Tokens of older weights say nothing about it. Without any others, there is no gap."""
    means = {"ratio": 1.0, "ratio_squared": 1.25, "kl": 0.1, "log_prob_gap": 0.3}
    assert updates.off_policy_metrics(means)["rollout_corr/log_prob_gap"] == 0.3
    old = {"age_1_share": 1.0, "age_1_ratio": 1.0, "age_1_ratio_squared": 1.25}
    no_new = {"age_0_share": 0.0, "age_0_log_prob_gap": 0.0}
    metrics = updates.off_policy_metrics(means | no_new | old)
    assert "rollout_corr/log_prob_gap" not in metrics
    assert metrics["partial/age_1/effective_sample_size"] == 0.8
    half = {"age_0_share": 0.5, "age_0_log_prob_gap": 0.01}
    new = {"age_0_ratio": 0.5, "age_0_ratio_squared": 0.5}
    metrics = updates.off_policy_metrics(means | half | new)
    assert metrics["rollout_corr/log_prob_gap"] == 0.02


def test_the_sample_size_of_all_tokens_is_beside_those_of_each_age():
    """Half of the tokens are new, none is one step old, and half are two steps old."""
    means = {"ratio": 1.0, "ratio_squared": 1.25, "kl": 0.1, "log_prob_gap": 0.3}
    means |= {"age_0_share": 0.5, "age_0_ratio": 0.5, "age_0_ratio_squared": 0.5}
    means |= {"age_0_log_prob_gap": 0.01, "age_1_share": 0.0}
    means |= {"age_2_share": 0.5, "age_2_ratio": 0.5, "age_2_ratio_squared": 1.0}
    assert updates.off_policy_metrics(means) == {
        "rollout_corr/log_prob_gap": 0.02,
        "rollout_corr/kl": 0.1,
        "rollout_corr/ratio": 1.0,
        "rollout_corr/effective_sample_size": 0.8,
        "partial/age_0/tokens": 0.5,
        "partial/age_0/effective_sample_size": 1.0,
        "partial/age_1/tokens": 0.0,
        "partial/age_2/tokens": 0.5,
        "partial/age_2/effective_sample_size": 0.5,
    }


class CountingEngine:
    """Reports the number of each of its steps."""

    def __init__(self):
        self.steps = []

    def train_batch(self, batch, loss_fn, step, micro_batches):
        self.steps.append((batch, loss_fn, step, micro_batches))
        number = float(len(self.steps))
        gaps = {"ratio": 1.0, "ratio_squared": 1.25, "kl": 0.5, "log_prob_gap": 0.25}
        off_policy = {f"rollout_corr/{name}": number * x for name, x in gaps.items()}
        return {"loss": number, "skipped": number % 2, **off_policy}


def test_an_update_goes_through_all_mini_batches_before_the_next_pass():
    plans = [SimpleNamespace(micro_batches=number) for number in (10, 20)]
    engine = CountingEngine()
    metrics = updates.update(engine, [("a", plans[0]), ("b", plans[1])], "loss", 4, 2, "critic")
    passes = [("a", "loss", 4, 10), ("b", "loss", 4, 20)]
    assert engine.steps == passes + passes
    assert metrics["critic/loss"] == 2.5
    assert metrics["critic/skipped"] == 2
    assert metrics["rollout_corr/kl"] == 0.5, "before the first step has changed the policy"
    assert metrics["rollout_corr/effective_sample_size"] == 0.8


def test_results_of_an_engine_are_in_the_order_of_the_shares_mini_batches():
    samples = make_samples([1, 2, 1, 3], [1.0] * 4, range(4))
    share = whole(samples, minis=[0, 0, 1, 1])
    seen = []

    def values(batch, micro_batches):
        seen.append((len(batch), micro_batches))
        return batch.input_ids.float() + 100 * len(seen)

    expected = [100.0 + i for i in range(7)] + [200.0 + i for i in range(7, 15)]
    assert updates.compute(values, share).tolist() == expected
    assert seen == [(2, plan.micro_batches) for plan in share.plans]


def test_a_loss_with_the_only_update_measures_the_tokens_of_each_age():
    """Half of the tokens are new. Rejected ones, whose weight is 0, do not count."""
    fields = {
        "age": [1.0, 0.0],
        "rollout_log_probs": [-2.0, -0.25],
        "advantages": [0.0, 0.0],
    }
    partial = ["rollout.partial.enable=true", "rollout.partial.max_staleness=2"]
    _, amounts, _ = loss_of([-1.5, -0.5], *partial, **fields)
    names = {name for name in amounts if name.startswith("rollout_corr/age_")}
    assert {name.split("/")[1][:6] for name in names} == {"age_0_", "age_1_", "age_2_"}
    assert amounts["rollout_corr/age_0_share"] == 0.5
    assert amounts["rollout_corr/age_1_share"] == 0.5
    assert amounts["rollout_corr/age_2_share"] == 0
    assert amounts["rollout_corr/age_0_log_prob_gap"] == pytest.approx(0.5 * 0.25)
    assert amounts["rollout_corr/age_1_ratio"] == pytest.approx(0.5 * math.exp(0.5))
    assert amounts["rollout_corr/log_prob_gap"] == pytest.approx(0.5 * 0.25 + 0.5 * 0.5)
