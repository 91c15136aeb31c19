"""Functions of the user (docs/forking.md): what they read is built, and mistakes are one line."""

import re
from dataclasses import replace

import pytest
import torch

from common import imports, plugins
from config import InputError, load
from rl import models
from rl.collecting import BatchSource, collect
from rl.estimation import set_advantages
from rl.functions import find_function
from rl.settings import check_settings
from tests.support.samples import loss_of_two_tokens, make_samples, on_responses, whole

# my.py of every test.
FUNCTIONS = """
import torch

# Advantages.
def plain(rewards, mask, num_sequences, **_): return rewards, rewards
def reads_values(rewards, num_sequences, values, **_): return rewards, rewards
def reads_reference(num_sequences, rewards, ref_log_probs, old_log_probs, **_):
    return rewards, rewards
def reads_baseline(outcome, baseline, **_): return outcome, outcome
def discounted(rewards, num_sequences, gamma, **_): return rewards, rewards
def unrewarded(mask, num_sequences, **_): return mask, mask
def returns_of_sequences(rewards, num_sequences, **_): return rewards, torch.zeros(num_sequences)
def one_ranks_mean(rewards, mask, sequence, group, **_):
    return rewards - (rewards * mask).mean(), rewards
def scalar(outcome, **_): return outcome.mean(), outcome
def normalized(rewards, num_sequences, total, **_):
    return rewards / total(rewards) * num_sequences, rewards
def needs_alpha(rewards, num_sequences, alpha, **_): return rewards, rewards
def without_rest(rewards): return rewards, rewards
def without_returns(rewards, **_): return rewards
def three_results(rewards, **_): return rewards, rewards, rewards
def stacked_results(rewards, **_): return torch.stack([rewards, rewards])
def no_results(**_): pass

SEEN = {}
def sees_all(*, rewards, mask, sequence, group, values, baseline, old_log_probs, ref_log_probs,
             rollout_log_probs, outcome, lengths, parts, part_weights, num_sequences, total, gamma,
             lam, step_rewards, step_ends, sum_by_response):
    SEEN.update(locals())
    return rewards, rewards
def loss_sees_all(*, log_probs, entropy, old_log_probs, advantages, mask, sequence, num_sequences,
                  clip_low, clip_high, dual_clip, returns, values, ref_log_probs,
                  rollout_log_probs, group, scores):
    SEEN.update(locals())
    return log_probs, {}

# Policy losses.
def loss(log_probs, advantages, *, beta=1.0, **_): return -log_probs * advantages * beta, {}
def reads_scores(log_probs, group, scores, values, **_):
    return log_probs * group * scores, {"scores": scores}
def reads_scores_alone(log_probs, scores, **_): return log_probs * scores, {}
def reads_groups_alone(log_probs, group, **_): return log_probs * group, {}
def summed_loss(log_probs, **_): return log_probs.sum(), {}
def loss_without_metrics(log_probs, **_): return log_probs
def loss_with_number(log_probs, **_): return log_probs, {"largest": 0.5}

# Aggregations.
def total_length(lengths, **_): return lengths.sum()
def column(lengths, **_): return lengths[:, None]
def halves(lengths, **_): return torch.full_like(lengths, 0.5)
def reads_tokens(mask, **_): return mask / mask.sum()

# Divergences.
def mean_gap(log_probs, ref_log_probs, **_): return (log_probs - ref_log_probs).mean()
def square(log_probs, ref_log_probs, **_): return (log_probs - ref_log_probs) ** 2
"""


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """Return a function of settings, whose group is algorithm unless they say otherwise."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(FUNCTIONS)

    def load_settings(*settings: str):
        full = []
        for setting in settings:
            has_group = setting.startswith(("rollout.", "data.", "reward."))
            full.append(setting if has_group else f"algorithm.{setting}")
        return load("ppo.yaml", ["model.path=unused", "data.train_files=unused", *full])

    return load_settings


def tensors_of(seen: dict) -> dict[str, list[float]]:
    return {name: x.tolist() for name, x in seen.items() if isinstance(x, torch.Tensor)}


def test_an_estimator_is_called_with_the_values_of_its_inputs(configure, tmp_path):
    config = configure(
        "adv_estimator=my.py:sees_all", "gamma=0.75", "lam=0.5", "reward.step_rewards=true"
    )
    samples = make_samples([1, 2], [3.0, 5.0], [0, 4], baseline=[1.0, 2.0])
    samples = replace(samples, parts={"right": samples.scores})
    fields = samples.batch.fields
    num_tokens = len(fields["loss_mask"])
    for number, name in enumerate(("values", "old_log_probs", "ref_log_probs"), 1):
        fields[name] = torch.full((num_tokens,), float(number))
    fields["rollout_log_probs"] = torch.full((num_tokens,), 4.0)
    fields["turn_rewards"] = torch.tensor([0, 0, 0, 0, 0, 0.5, 0])
    fields["step_ends"] = torch.tensor([0, 0, 1.0, 0, 0, 1, 0])
    mask = fields["loss_mask"].tolist()
    set_advantages(config, samples, whole(samples), 0.0)
    seen = dict(imports.import_file(tmp_path / "my.py").SEEN)
    assert tensors_of(seen) == {
        "rewards": [0, 0, 3, 0, 0, 0.5, 4.5],
        "step_rewards": [0, 0, 0, 0, 0, 0.5, 0],
        "step_ends": [0, 0, 1, 0, 0, 1, 0],
        "mask": mask,
        "sequence": [0, 0, 0, 1, 1, 1, 1],
        "group": [0, 4],
        "values": [1] * 7,
        "old_log_probs": [2] * 7,
        "ref_log_probs": [3] * 7,
        "rollout_log_probs": [4] * 7,
        "baseline": [1, 2],
        "outcome": [3, 5],
        "lengths": [1, 2],
    }
    assert (seen["num_sequences"], seen["gamma"], seen["lam"]) == (2, 0.75, 0.5)
    assert seen["parts"]["right"].tolist() == [3, 5]
    assert seen["part_weights"] == {"right": 1.0}
    assert seen["total"](seen["rewards"]) == 8
    assert seen["sum_by_response"](seen["rewards"]).tolist() == [3, 5]


def test_a_policy_loss_is_called_with_the_values_of_its_inputs(configure, tmp_path):
    clips = ["clip_ratio_low=0.125", "clip_ratio_high=0.375", "clip_ratio_c=4"]
    config = configure("loss_mode=my.py:loss_sees_all", *clips)
    names = ("advantages", "old_log_probs", "returns", "values", "ref_log_probs", "group", "scores")
    fields = {name: [float(number), -1.0] for number, name in enumerate(names, 10)}
    weights = {"loss_weight": [0.5, 0.0], "token_weight": [0.5, 0.0]}
    loss_of_two_tokens(config, **fields, **weights)
    seen = dict(imports.import_file(tmp_path / "my.py").SEEN)
    assert tensors_of(seen) == fields | {
        "log_probs": [-1.5, -0.5],
        "rollout_log_probs": [-1.5, -0.5],
        "entropy": [1, 3],
        "sequence": [0, 1],
        "mask": [1, 0],
    }
    clip_ratios = (seen["clip_low"], seen["clip_high"], seen["dual_clip"])
    assert clip_ratios == (0.125, 0.375, 4)
    assert seen["num_sequences"] == 2


@pytest.mark.parametrize(
    "setting, roles",
    [
        ("adv_estimator=my.py:plain", {"actor"}),
        ("adv_estimator=my.py:reads_values", {"actor", "critic"}),
        ("adv_estimator=my.py:reads_reference", {"actor", "reference"}),
        ("loss_mode=my.py:loss", {"actor"}),
        ("loss_mode=my.py:reads_scores", {"actor", "critic"}),
    ],
)
def test_models_that_a_function_reads_are_built(configure, setting, roles):
    config = configure(setting)
    check_settings(config)
    assert set(models.role_configs(config)) == roles
    reads_old_log_probs = setting == "adv_estimator=my.py:reads_reference"
    assert models.needs_old_log_probs(config, 1, 0) == reads_old_log_probs


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            ["adv_estimator=my.py:plan"],
            "adv_estimator=my.py:plan: {my} has no function 'plan'; the nearest is my.py:plain",
        ),
        (["adv_estimator=your.py:plain"], "your.py: no such file"),
        (
            ["adv_estimator=my.py:needs_alpha"],
            "adv_estimator=my.py:needs_alpha: missing a required argument: 'alpha'; "
            "it is called with rewards,",
        ),
        (["adv_estimator=my.py:without_rest"], "got an unexpected keyword argument 'mask'"),
        (
            ["adv_kwargs.beta=1"],
            "algorithm.adv_kwargs.beta: grpo has no parameter beta of its own (it has none)",
        ),
        (
            ["adv_estimator=my.py:needs_alpha", "adv_kwargs.alpha=1", "adv_kwargs.alhpa=1"],
            "adv_kwargs.alhpa: my.py:needs_alpha has no parameter alhpa of its own",
        ),
        (
            ["loss_mode=my.py:loss", "loss_kwargs.bta=1"],
            "loss_kwargs.bta: my.py:loss has no parameter bta of its own (it has beta)",
        ),
        (
            ["loss_mode=my.py:loss", "loss_kwargs.log_probs=1"],
            "loss_kwargs.log_probs: my.py:loss has no parameter log_probs of its own",
        ),
        (
            ["loss_mode=my.py:loss", "clip_ratio_high=0.3"],
            "clip_ratio_high=0.3 does nothing without algorithm.loss_mode=ppo or gspo",
        ),
        (
            ["adv_estimator=my.py:plain", "gamma=0.5"],
            "does nothing without algorithm.adv_estimator=gae or reinforce_plus_plus",
        ),
        (
            ["adv_estimator=my.py:unrewarded", "use_kl_in_reward=true"],
            "does nothing without an adv_estimator that reads rewards",
        ),
        (
            ["adv_estimator=my.py:one_ranks_mean"],
            "names mask, which covers one rank's tokens: name outcome instead",
        ),
        (
            ["loss_agg_mode=my.py:reads_tokens"],
            "missing a required argument: 'mask'; it is called with lengths, max_tokens by name",
        ),
        (
            ["kl_loss_type=my.py:plain", "use_kl_loss=true"],
            "kl_loss_type=my.py:plain: missing a required argument: 'rewards'",
        ),
    ],
)
def test_a_function_that_cannot_be_called_is_rejected(configure, tmp_path, settings, message):
    with pytest.raises(InputError) as error:
        check_settings(configure(*settings))
    assert message.replace("{my}", str(tmp_path / "my.py")) in str(error.value)


def test_a_function_may_read_gamma(configure):
    check_settings(configure("adv_estimator=my.py:discounted", "gamma=0.5"))


def test_kwargs_fill_required_parameters(configure):
    check_settings(configure("adv_estimator=my.py:needs_alpha", "adv_kwargs.alpha=1"))


def test_kwargs_reach_a_loss_and_a_divergence(configure):
    config = configure(
        "loss_mode=my.py:loss",
        "loss_kwargs.beta=3",
        "use_kl_loss=true",
        "kl_loss_type=my.py:square",
        "kl_loss_coef=0.5",
    )
    parameters = plugins.parameters(find_function(config, "loss_mode"))
    assert parameters == {"log_probs", "advantages", "beta"}
    result = loss_of_two_tokens(config, advantages=[1.0, -2.0], ref_log_probs=[-1.0, -1.0])
    assert result.loss == pytest.approx(3 * (1.5 - 2 * 0.5) / 2 + 0.5 * 0.25)
    assert result.metrics["kl_loss"] == 0.25


def test_a_loss_gets_groups_scores_and_weights_of_its_tokens(configure):
    config = configure("loss_mode=my.py:reads_scores", "loss_agg_mode=my.py:halves")
    samples = make_samples([1, 2, 3], [1, 5, 2], [4, 4, 6])
    set_advantages(config, samples, whole(samples), 0.0)
    fields = samples.batch.fields
    assert on_responses(samples, fields["group"]) == [4, 4, 4, 6, 6, 6]
    assert on_responses(samples, fields["scores"]) == [1, 5, 5, 2, 2, 2]
    assert on_responses(samples, fields["loss_weight"]) == [0.5] * 6


@pytest.mark.parametrize(
    "function, expected",
    [
        ("reads_scores_alone", {"scores": [1, 5, 5]}),
        ("reads_groups_alone", {"group": [4, 6, 6]}),
    ],
)
def test_a_loss_gets_only_what_it_reads(configure, function, expected):
    config = configure(f"loss_mode=my.py:{function}")
    samples = make_samples([1, 2], [1, 5], [4, 6])
    set_advantages(config, samples, whole(samples), 0.0)
    fields = samples.batch.fields
    names = {"scores", "group"} & fields.keys()
    assert {name: on_responses(samples, fields[name]) for name in names} == expected


def test_total_adds_up_the_response_tokens(configure):
    config = configure("adv_estimator=my.py:normalized")
    samples = make_samples([1, 2, 3], [1, 5, 2], [4, 4, 6])
    set_advantages(config, samples, whole(samples), 0.0)
    advantages = on_responses(samples, samples.batch.fields["advantages"])
    assert advantages == pytest.approx([3 / 8, 0, 15 / 8, 0, 0, 3 / 4])


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            ["adv_estimator=my.py:returns_of_sequences"],
            r"returns_of_sequences must return one number per token, .*9\], not \[2\]",
        ),
        (
            ["adv_estimator=my.py:scalar"],
            r"scalar must return one number per response, .*2\], not \[\]",
        ),
        (
            ["adv_estimator=my.py:without_returns"],
            "without_returns must return a pair: advantages and returns",
        ),
        (
            ["adv_estimator=my.py:three_results"],
            "three_results must return a pair: advantages and returns",
        ),
        (
            ["adv_estimator=my.py:stacked_results"],
            "stacked_results must return a pair: advantages and returns",
        ),
        (
            ["adv_estimator=my.py:no_results"],
            "no_results must return a pair: advantages and returns",
        ),
        (
            ["loss_agg_mode=my.py:total_length"],
            r"total_length must return one number per response, shape \[2\], not \[\]",
        ),
        (
            ["loss_agg_mode=my.py:column"],
            r"column must return one number per response, shape \[2\], not \[2, 1\]",
        ),
        (
            ["use_kl_in_reward=true", "kl_penalty=my.py:mean_gap"],
            "mean_gap must return one number per token",
        ),
    ],
)
def test_wrong_shapes_are_rejected_before_the_update(configure, settings, message):
    """Broadcasting would hide them."""
    samples = make_samples([2, 3], [1, 5], [0, 0])
    for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs"):
        samples.batch.fields[name] = torch.zeros(9)
    key = settings[-1].partition("=")[0]
    with pytest.raises(InputError, match=f"algorithm.{key}=my.py:{message}"):
        set_advantages(configure(*settings), samples, whole(samples), 0.0)


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            ["loss_mode=my.py:summed_loss"],
            "summed_loss must return one number per token, shape [2], not []",
        ),
        (
            ["loss_mode=my.py:loss_without_metrics"],
            "loss_without_metrics must return a pair: losses and a dictionary of metrics",
        ),
        (
            ["loss_mode=my.py:loss_with_number"],
            "loss_with_number must return one number per token, shape [2], not 0.5",
        ),
        (
            ["use_kl_loss=true", "kl_loss_type=my.py:mean_gap"],
            "mean_gap must return one number per token",
        ),
    ],
)
def test_wrong_shapes_are_rejected_in_the_loss(configure, settings, message):
    key = settings[-1].partition("=")[0]
    expected = re.escape(f"algorithm.{key}=my.py:{message}")
    fields = {"advantages": [1.0, -2.0], "ref_log_probs": [-1.0, -1.0]}
    with pytest.raises(InputError, match=expected):
        loss_of_two_tokens(configure(*settings), **fields)


@pytest.mark.parametrize(
    "name, generated",
    [
        ("plain", [(2, 1.0)]),
        ("reads_baseline", [(2, 1.0), (1, 0.0)]),
    ],
)
def test_a_greedy_response_is_drawn_if_an_advantage_reads_baseline(configure, name, generated):
    """`generated` holds (responses per prompt, temperature) of every draw."""
    draws = []

    def respond(request):
        sampling = request.sampling
        draws.append((sampling.n, sampling.temperature))
        num_samples = 2 * sampling.n
        groups = [sample // sampling.n for sample in range(num_samples)]
        return make_samples([1] * num_samples, range(num_samples), groups)

    config = configure(f"adv_estimator=my.py:{name}", "rollout.n=2", "data.train_batch_size=2")
    samples = collect(config, BatchSource(config, respond, range(4), lambda batch_index: [0, 1], 0))
    assert draws == generated
    assert (samples.baseline is not None) == (name == "reads_baseline")
