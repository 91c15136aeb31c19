"""Samples, advantages and updates by hand; a bandit."""

import json
import math
import os
import shutil
import statistics

import pytest
import torch

from config import InputError, load
from data.batching.packing import Batch, global_batch
from data.batching.plan import Plan
from data.prompts import Prompt
from engines.context_parallel import check_batch_size
from engines.fsdp.engine import FSDPEngine
from engines.parallel import device
from rl import updates
from rl.collecting import collect as collect_samples, penalized_scores
from rl.estimation import next_kl_coef, set_advantages
from rl.losses import ActorLoss, critic_loss
from rl.models import head_of, mini_batch_prompts, needs_old_log_probs, role_configs
from rl.settings import check_settings
from rl.validation import validation_metrics
from rollout.grading.grader import Failure
from rollout.records import append_failures, write_samples
from rollout.samples import Samples, concat
from rollout.sharing import Share, divide
from tests.algorithms.test_algorithms import BY_FORMULA, policy_loss_by_formula
from tests.support.models import make_model


def configure(*more, path="unused"):
    return load(
        "ppo.yaml",
        [f"model.path={path}", "data.train_files=unused", "engine.compute_dtype=float32", *more],
    )


def make_samples(lengths, scores, group, baseline=None, failures=()):
    """Prompts of two tokens and responses of these lengths; vLLM found every token as likely as exp(-1)."""
    masks = [torch.tensor([0.0, 0.0] + [1.0] * length) for length in lengths]
    mask = torch.cat([torch.empty(0), *masks])
    cu_seqlens = torch.tensor([0, *map(len, masks)]).cumsum(0)
    batch = Batch(
        torch.arange(len(mask)), cu_seqlens, {"loss_mask": mask, "rollout_log_probs": -mask}
    )
    return Samples(
        batch,
        [f"response {i}" for i in range(len(lengths))],
        [Prompt([1, 2], f"prompt {g}", {}) for g in group],
        **on_one_rank(batch),
        group=torch.tensor(group),
        scores=torch.tensor(scores, dtype=torch.float32),
        truncated=torch.tensor([length > 3 for length in lengths], dtype=torch.bool),
        failures=list(failures),
        num_drawn=len(lengths) + len(failures),
        baseline=None if baseline is None else torch.tensor(baseline),
    )


def on_one_rank(batch):
    """What Samples are told of a batch that this process alone has."""
    sums = torch.cat([torch.zeros(1), batch.fields["loss_mask"].cumsum(0)])[batch.cu_seqlens]
    return {
        "owner": torch.zeros(len(batch), dtype=torch.int64),
        "rank": 0,
        "lengths": batch.cu_seqlens.diff(),
        "response_lengths": sums.diff().long(),
    }


def whole(samples, minis=None):
    """The share of a process alone: all mini-batches, given as the one of each response, which must be in order."""
    minis, n = torch.tensor(minis or [0] * len(samples)), len(samples)
    plans = [
        Plan(list(range(k)), [(1, list(range(k)))], torch.zeros(k), torch.ones(k))
        for k in minis.bincount().tolist()
    ]
    return Share(samples.batch, torch.arange(n), minis, plans, torch.ones(n, dtype=torch.bool))


def failure(number):
    return Failure("raised", f"trace {number}", {"number": number}, "text")


# -- samples -----------------------------------------------------------------------------------------------------------


def test_select_takes_everything_along():
    samples = make_samples(
        [1, 4, 2], [1, 2, 3], [5, 5, 9], baseline=[7.0, 8.0, 9.0], failures=[failure(0)]
    )
    assert (len(samples), samples.response_lengths.tolist()) == (3, [1, 4, 2])
    kept = samples.select(torch.tensor([False, True, True]))
    assert kept.batch.input_ids.tolist() == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert kept.batch.cu_seqlens.tolist() == [0, 6, 10] and kept.response_lengths.tolist() == [4, 2]
    assert (
        kept.group.tolist() == [5, 9]
        and kept.scores.tolist() == [2, 3]
        and kept.truncated.tolist() == [True, False]
    )
    assert kept.texts == ["response 1", "response 2"] and [p.text for p in kept.prompts] == [
        "prompt 5",
        "prompt 9",
    ]
    assert kept.baseline.tolist() == [8, 9] and kept.failures == [failure(0)]
    nothing = samples.select(torch.zeros(3, dtype=torch.bool))
    assert (
        len(nothing) == 0
        and nothing.batch.cu_seqlens.tolist() == [0]
        and nothing.failures == [failure(0)]
    )


def test_concat_puts_draws_behind_each_other():
    first = make_samples([1, 2], [1, 2], [0, 0], failures=[failure(0)])
    second = make_samples([3], [3], [1], failures=[failure(1)])
    both = concat([first, second.select(torch.tensor([False])), second])
    assert (
        both.response_lengths.tolist() == [1, 2, 3]
        and both.group.tolist() == [0, 0, 1]
        and both.baseline is None
    )
    assert both.texts == ["response 0", "response 1", "response 0"] and len(both.prompts) == 3
    assert both.failures == [failure(0), failure(1), failure(1)]
    assert both.batch.fields["loss_mask"].tolist() == [0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 1, 1]


def test_a_baseline_belongs_to_its_prompt_and_groups_without_one_go():
    samples = make_samples([1, 1, 1, 1, 1], [1, 2, 3, 4, 5], [0, 0, 1, 2, 2])
    greedy = make_samples([1, 1], [20, 10], [2, 0])
    known = samples.with_baseline(greedy)
    assert known.group.tolist() == [0, 0, 2, 2] and known.scores.tolist() == [1, 2, 4, 5]
    assert known.baseline.tolist() == [10, 10, 20, 20]
    assert len(samples.with_baseline(greedy.select(torch.tensor([False, False])))) == 0


def test_mini_batches_hold_whole_groups_whatever_their_numbers_and_sizes():
    samples = make_samples([1] * 7, range(7), [3, 3, 4, 8, 8, 8, 11])
    assert samples.mini_batches(2).tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert samples.mini_batches(3).tolist() == [0, 0, 0, 1, 1, 1, 1], (
        "no last one of a single prompt, which would get a whole step"
    )
    config = configure("data.train_batch_size=4")
    assert samples.mini_batches(mini_batch_prompts(config)).tolist() == [0] * 7
    config = configure("data.train_batch_size=4", "algorithm.ppo_mini_batch_size=1")
    assert samples.mini_batches(mini_batch_prompts(config)).tolist() == [0, 0, 1, 2, 2, 2, 3]


def test_ranks_divide_responses():
    config = configure("data.train_batch_size=2", "rollout.n=2")
    check_batch_size(config, 4)
    with pytest.raises(
        InputError, match="train_batch_size=2 x rollout.n=2 is less than the 5 data-parallel ranks"
    ):
        check_batch_size(config, 5)


def test_samples_are_written_with_their_failures(tmp_path):
    samples = make_samples([4, 2], [0.5, 1], [0, 6], failures=[failure(3)])
    write_samples(samples, tmp_path / "new" / "step_1.jsonl")
    lines = [
        json.loads(line) for line in (tmp_path / "new" / "step_1.jsonl").read_text().splitlines()
    ]
    assert lines == [
        {
            "group": 0,
            "prompt": "prompt 0",
            "response": "response 0",
            "score": 0.5,
            "length": 4,
            "truncated": True,
            "row": {},
        },
        {
            "group": 6,
            "prompt": "prompt 6",
            "response": "response 1",
            "score": 1.0,
            "length": 2,
            "truncated": False,
            "row": {},
        },
        {"response": "text", "row": {"number": 3}, "failure": "raised", "trace": "trace 3"},
    ]


def test_a_full_disk_is_told_with_the_file_and_its_bytes(tmp_path):
    samples = make_samples([4, 2], [0.5, 1], [0, 6], failures=[failure(3)])
    write_samples(samples, tmp_path / "whole.jsonl")
    num_bytes = (tmp_path / "whole.jsonl").stat().st_size
    for write, needs in (
        (lambda path: write_samples(samples, path), f"{num_bytes} bytes"),
        (lambda path: append_failures(samples, path, 1), "more than 0 bytes"),
    ):
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "step_1.jsonl").symlink_to("/dev/full")
        with pytest.raises(
            InputError,
            match=rf"the disk is full: {tmp_path}/full/step_1.jsonl needs {needs}, .* are free",
        ):
            write(tmp_path / "full" / "step_1.jsonl")
        shutil.rmtree(tmp_path / "full")


@pytest.mark.parametrize(
    "num_minis, more, needed",
    [
        (1, [], False),
        (2, [], True),
        (1, ["algorithm.ppo_epochs=2"], True),
        (1, ["algorithm.use_kl_in_reward=true"], True),
        (1, ["algorithm.rollout_rs=token"], True),
        (1, ["algorithm.use_kl_loss=true", "algorithm.rollout_is=token"], False),
        (1, ["algorithm.adv_estimator=gae"], False),
        (1, ["algorithm.adv_estimator=gae", "critic.warmup_steps=2"], False),
        (1, ["algorithm.adv_estimator=gae", "critic.warmup_steps=3"], True),
    ],
)
def test_old_log_probs_are_asked_for_where_they_are_needed(num_minis, more, needed):
    assert needs_old_log_probs(configure(*more), num_minis, 2) == needed


# -- collecting --------------------------------------------------------------------------------------------------------

PROMPTS, SIZE = 12, 3


def collect(agreeing, *more, batch_index=1, failing=()):
    """collect() on 12 prompts, 3 a batch, 2 responses each, which score row + 1, the second of those that do not
    agree the negative; failing rows have none. Returns its result and the calls of draw()."""
    calls = []

    def draw(dataset, rows, sampling, *seed, first_group):
        assert len(dataset) == PROMPTS
        calls.append((rows.tolist(), sampling.n, sampling.temperature, seed, first_group))
        kept = [
            (first_group + place, row, k)
            for place, row in enumerate(rows.tolist())
            if row not in failing
            for k in range(sampling.n)
        ]
        scores = [row + 1 if k == 0 or row in agreeing else -row - 1 for _, row, k in kept]
        drawn = make_samples(
            [1 + row % 3 for _, row, _ in kept], scores, [group for group, *_ in kept]
        )
        drawn.failures = [failure(row) for row in rows.tolist() if row in failing]
        drawn.num_drawn = len(rows) * sampling.n
        return drawn

    config = configure(f"data.train_batch_size={SIZE}", "rollout.n=2", *more)
    try:
        return *collect_samples(config, draw, range(PROMPTS), batch_index), calls
    except InputError as error:
        return str(error), calls


def batches(*indices):
    return [global_batch(PROMPTS, SIZE, 0, i).tolist() for i in indices]


FILTER = "algorithm.filter_groups.enable=true"


def test_collect_draws_one_batch():
    samples, following, calls = collect(agreeing=range(PROMPTS))
    assert following == 2 and calls == [(batches(1)[0], 2, 1.0, (1,), 0)]
    assert samples.scores.tolist() == [row + 1 for row in batches(1)[0] for _ in range(2)]


def test_filter_groups_draws_until_there_are_enough_and_keeps_the_first():
    """The epoch ends behind batch 3: batch 4 is the first of the next."""
    drawn = [row for batch in batches(3, 4) for row in batch]
    teaching = {drawn[0], drawn[2], drawn[4]}
    places = [i for i, row in enumerate(drawn) if row in teaching]
    assert [place < 3 for place in places].count(True) == 2 and len(places) == 5, (
        "more than are needed"
    )
    samples, following, calls = collect({*range(PROMPTS)} - teaching, FILTER, batch_index=3)
    assert following == 5 and calls == [(drawn[:3], 2, 1.0, (3,), 0), (drawn[3:], 2, 1.0, (4,), 3)]
    assert samples.group.tolist() == [place for place in places[:SIZE] for _ in range(2)]
    assert samples.scores.abs().tolist() == [
        drawn[place] + 1 for place in places[:SIZE] for _ in range(2)
    ]
    scores = [(row + 1) * sign for row in drawn for sign in (1, -1 if row in teaching else 1)]
    assert samples.metrics == pytest.approx(
        {
            "rollout/num_gen_batches": 2,
            "critic/score/mean": statistics.mean(scores),
            "critic/score/max": max(scores),
            "critic/score/min": min(scores),
            "reward/informative_groups": 5 / 6,
        }
    ), "of all that was drawn"


def test_filter_groups_goes_on_with_what_it_has_after_the_last_batch():
    only = batches(2)[0][2]
    samples, following, calls = collect(
        {*range(PROMPTS)} - {only}, FILTER, "algorithm.filter_groups.max_num_gen_batches=2"
    )
    assert following == 3 and len(calls) == 2
    assert len(samples.group.unique()) == 1 and samples.scores.tolist() == [only + 1, -only - 1]


def test_filter_groups_with_nothing_left_takes_what_was_drawn_last():
    """A step without an advantage, rather than the end of the run."""
    first = batches(1)[0][0]
    samples, following, calls = collect(
        range(PROMPTS), FILTER, "algorithm.filter_groups.max_num_gen_batches=2", failing=[first]
    )
    assert following == 3 and len(calls) == 2 and samples.failures == [failure(first)]
    assert samples.group.tolist() == [3, 3, 4, 4, 5, 5]
    assert samples.scores.tolist() == [row + 1 for row in batches(2)[0] for _ in range(2)]
    samples, *_ = collect(
        range(PROMPTS),
        FILTER,
        "algorithm.filter_groups.max_num_gen_batches=2",
        failing=batches(2)[0],
    )
    assert samples.group.tolist() == [0, 0, 1, 1, 2, 2], "that of which something was graded"


def test_nothing_graded_is_an_error():
    message, calls = collect(
        (), FILTER, "algorithm.filter_groups.max_num_gen_batches=2", failing=range(PROMPTS)
    )
    assert (
        len(calls) == 2
        and "no response to 2 batches could be graded" in message
        and "raised: trace" in message
    )


def test_remax_draws_a_greedy_response_more():
    row = batches(1)[0][1]
    samples, following, calls = collect(
        {*range(PROMPTS)}, "algorithm.adv_estimator=remax", failing=[row]
    )
    assert following == 2
    assert calls == [(batches(1)[0], 2, 1.0, (1,), 0), (batches(1)[0], 1, 0.0, (1,), 0)]
    assert (
        samples.group.tolist() == [0, 0, 2, 2]
        and samples.baseline.tolist() == samples.scores.tolist()
    )
    assert samples.failures == [failure(row)] * 2 and samples.num_drawn == SIZE * 3, "of both draws"


def test_the_baseline_of_remax_has_the_penalty_for_long_responses_too():
    samples, *_ = collect(
        {*range(PROMPTS)},
        "algorithm.adv_estimator=remax",
        "reward.overlong_buffer=4",
        "rollout.max_tokens=4",
        "reward.overlong_penalty=0.5",
    )
    penalty = (
        penalized_scores(
            configure(
                "reward.overlong_buffer=4", "rollout.max_tokens=4", "reward.overlong_penalty=0.5"
            ),
            samples,
        )
        - samples.scores
    )
    assert (penalty < 0).all() and (samples.baseline - samples.scores).tolist() == pytest.approx(
        penalty.tolist()
    )


def test_remax_draws_a_greedy_response_to_each_prompt_of_each_draw():
    """Two draws for one step: their greedy responses belong to the same groups as the others of their draw."""
    (first, _, _), (*_, last) = batches(1, 2)
    samples, following, calls = collect(
        {*range(PROMPTS)} - {first, last},
        FILTER,
        "algorithm.adv_estimator=remax",
        "algorithm.filter_groups.max_num_gen_batches=2",
    )
    assert following == 3
    assert calls == [
        (rows, n, temperature, (seed,), group)
        for seed, group, rows in zip((1, 2), (0, SIZE), batches(1, 2))
        for n, temperature in ((2, 1.0), (1, 0.0))
    ]
    assert (
        samples.group.tolist() == [0, 0, 5, 5]
        and samples.baseline.tolist() == [first + 1] * 2 + [last + 1] * 2
    )


def test_failures_of_all_draws_are_kept():
    rows = [batches(1)[0][0], batches(2)[0][0]]
    samples, _, calls = collect((), FILTER, failing=rows)
    assert (
        len(calls) == 2
        and samples.failures == [failure(row) for row in rows]
        and samples.num_drawn == 2 * SIZE * 2
    )


# -- advantages --------------------------------------------------------------------------------------------------------


def advantages(samples, *more, minis=None, kl_coef=0.001, **fields):
    """(fields, metrics) of set_advantages; fields are values of response tokens, in order."""
    for name, values in fields.items():
        mask = samples.batch.fields["loss_mask"]
        samples.batch.fields[name] = torch.zeros_like(mask).masked_scatter(
            mask > 0, torch.tensor(values)
        )
    config = configure(*more)
    metrics = set_advantages(config, samples, whole(samples, minis), kl_coef)
    return samples.batch.fields, metrics


def on_responses(samples, values):
    return values[samples.batch.fields["loss_mask"] > 0].tolist()


def test_group_advantages_and_weights_of_two_mini_batches():
    samples = make_samples([1, 2, 3, 2], [1, 0, 2, 2], [0, 0, 1, 1], failures=[failure(0)])
    f, metrics = advantages(samples, minis=[0, 0, 1, 1])
    root = math.sqrt(0.5)
    assert (
        f["sequence"].tolist() == [0] * 3 + [1] * 4 + [2] * 5 + [3] * 4
        and f["sequence"].dtype == torch.int64
    )
    assert on_responses(samples, f["advantages"]) == pytest.approx(
        [root, -root, -root, 0, 0, 0, 0, 0], abs=1e-5
    )
    third, fifth = 1 / 3, 1 / 5
    for name in ("loss_weight", "token_weight"):
        assert on_responses(samples, f[name]) == pytest.approx([third] * 3 + [fifth] * 5)
    for name in ("advantages", "returns", "loss_weight", "token_weight"):
        assert (f[name][f["loss_mask"] == 0] == 0).all()
    expected = {
        "critic/score/mean": 1.25,
        "critic/score/max": 2,
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
    """Those that an estimator has no use for (check_settings refuses them) change nothing."""
    scores, group, baseline = [1, 3, -2, 0.5], [0, 0, 4, 4], [0.25, 0.25, 4.0, 4.0]
    values = [[0.5, -1.0, 2.0], [1.5, 0.25], [-0.75], [2.0, 1.0, 0.0, -1.0]]
    samples = make_samples(list(map(len, values)), scores, group, baseline)
    f, _ = advantages(
        samples,
        f"algorithm.adv_estimator={name}",
        "algorithm.gamma=0.9",
        "algorithm.lam=0.7",
        values=sum(values, []),
    )
    rewards = [[0] * (len(row) - 1) + [score] for row, score in zip(values, scores)]
    for got, want in zip(
        (f["advantages"], f["returns"]),
        BY_FORMULA[name](rewards, group, values, baseline, 0.9, 0.7),
    ):
        assert on_responses(samples, got) == pytest.approx(sum(want, []), abs=1e-5)


GAE = "algorithm.adv_estimator=gae"
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
    assert (
        metrics["actor/reward_kl"] == pytest.approx((1 + 3 - 1) / 3)
        and metrics["actor/kl_coef"] == 0.5
    )
    assert metrics["critic/rewards/mean"] == 2, (
        "rewards of sequences are reported without the divergence"
    )


# name -> log-probability less that of the reference -> the estimate, and its slope
DIVERGENCES = {
    "k1": lambda d: (d, 1),
    "k2": lambda d: (d * d / 2, d),
    "abs": lambda d: (abs(d), math.copysign(1, d)),
    "k3": lambda d: (math.exp(-d) - 1 + d, 1 - math.exp(-d)),
}


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
    """0.2 at most a step, less near the target, in proportion to the share of 5 responses in a horizon of 40, however
    many groups and mini-batches they make."""
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
    """vLLM's log-probabilities are -1: the first response's ratios are e^0.8 = 2.2 and 1, their mean e^0.4 = 1.5."""
    samples = make_samples([2, 3], [1, 0], [0, 0])
    f, metrics = advantages(
        samples,
        f"algorithm.rollout_rs={level}",
        "algorithm.loss_agg_mode=seq-mean-token-mean",
        old_log_probs=[-0.2, -1.0, -1.0, -0.9, -1.1],
    )
    assert on_responses(samples, f["token_weight"]) == pytest.approx([k / sum(kept) for k in kept])
    assert f["loss_weight"].sum() == pytest.approx(1) and f["token_weight"].sum() == pytest.approx(
        1
    )
    assert (f["loss_weight"] > 0).tolist() == (f["token_weight"] > 0).tolist()
    assert metrics["rollout_corr/rejected"] == pytest.approx(1 - sum(kept) / 5)
    root = math.sqrt(0.5)
    assert on_responses(samples, f["advantages"]) == pytest.approx(
        [root, root, -root, -root, -root], abs=1e-5
    )


def test_everything_rejected_leaves_nothing_and_no_nan():
    samples = make_samples([2, 3], [1, 0], [0, 0])
    f, metrics = advantages(samples, "algorithm.rollout_rs=token", old_log_probs=[-5.0] * 5)
    assert (
        not f["loss_weight"].any()
        and not f["token_weight"].any()
        and metrics["rollout_corr/rejected"] == 1
    )


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
    assert metrics["critic/score/mean"] == 1 and metrics["critic/rewards/mean"] == pytest.approx(
        0.7
    )
    assert metrics["reward/informative_groups"] == 0, "groups are compared by score"


def test_values_are_explained():
    samples = make_samples([1, 1, 1, 1], [0, 2, 0, 2], [0, 1, 2, 3])
    _, metrics = advantages(samples, GAE, values=[0.5, 1.5, 0.5, 1.5])
    assert (
        metrics["critic/vf_explained_var"] == pytest.approx(0.75)
        and metrics["critic/values/mean"] == 1
    )


# -- losses ------------------------------------------------------------------------------------------------------------


def loss_of(log_probs, *more, entropy=(1.0, 3.0), **fields):
    """actor_loss on two responses of one token each, weighted 0.5 and 0.25 in the loss, 0.5 each in means."""
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
    assert loss == amounts["pg_loss"] == -0.5 + 0.25 and gradient == [-0.5, 0.25]
    assert amounts["ppo_kl"] == 0 and amounts["pg_clipfrac"] == 0 and amounts["entropy"] == 2
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
    assert loss == pytest.approx(-1.1 * 0.5 + 0.7 * 0.25) and gradient == [0, 0]
    assert amounts["pg_clipfrac"] == 1 and amounts["ppo_kl"] == pytest.approx(
        0.5 * -0.5 + 0.5 * 0.5
    )


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
    assert amounts["pg_loss"] == pytest.approx(policy, abs=1e-6) and amounts[
        "kl_loss"
    ] == pytest.approx(0.25 * 0.5)
    assert loss == pytest.approx(
        policy - 0.1 * (0.5 * 1 + 0.25 * 3) + 2 * amounts["kl_loss"], abs=1e-6
    )
    assert gradient == pytest.approx([-0.5 * weights[0], 0.25 * weights[1] + 2 * 0.25 * 1.0])


def learn(lengths, scores, log_probs, *more, **fields):
    """actor_loss on what set_advantages makes of one group: (loss, metrics of both, gradient). log_probs and fields are
    values of response tokens, in order; on this policy, old_log_probs are those before the update."""
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
    """Ratios of geometric mean 8, beyond either dual clip, where the advantage is -1, and sqrt(2) where it is 1."""
    new, ratios = [-1.0, -2.0, -1.5, -0.5, -0.25], [32, 32, 0.5, 0.5, 4]
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
    want, clipped = policy_loss_by_formula(
        mode,
        leaf,
        torch.tensor(old),
        torch.tensor([-1.0] * 3 + [1.0] * 2),
        [[0, 1, 2], [3, 4]],
        0.2,
        0.3,
        dual_clip,
    )
    (sum(want.values()) / 5).backward()
    assert loss == metrics["pg_loss"] == pytest.approx(sum(x.item() for x in want.values()) / 5)
    assert metrics["pg_clipfrac"] == pytest.approx(sum(clipped.values()) / 5)
    assert gradient == pytest.approx(leaf.grad.tolist())


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_divergence_in_the_loss_is_the_one_that_is_configured(name):
    """That of the policy being updated from the reference, weighted as losses are. Equal scores: there is no other loss."""
    new, old, reference = [-1.0, -2.5, -2.0], [-1.1, -2.3, -1.8], [-2.0, -1.0, -1.5]
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
    assert (
        metrics["kl_loss"] == pytest.approx(0.25 * kl[0] + 0.25 * kl[1] + 0.5 * kl[2])
        and metrics["pg_loss"] == 0
    )
    assert loss == pytest.approx(0.5 * metrics["kl_loss"])
    assert gradient == pytest.approx(
        [0.5 * 0.25 * slope[0], 0.5 * 0.25 * slope[1], 0.5 * 0.5 * slope[2]]
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rollouts_are_corrected_and_measured_by_the_policy_before_the_update(level):
    """vLLM's log-probabilities are -1. The update's own ratios are others, none of them clipped."""
    old, new = [-0.5, -1.2, -1.6, -0.9, -1.1], [-0.35, -1.4, -1.7, -1.05, -1.0]
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
    assert loss == pytest.approx(sum(losses) / 5) and gradient == pytest.approx(
        [x / 5 for x in losses]
    )
    measured = {
        "log_prob_gap": [abs(p + 1) for p in old],
        "kl": [r - 1 - math.log(r) for r in ratios],
        "ratio": ratios,
    }
    assert {name: metrics[f"rollout_corr/{name}"] for name in measured} == pytest.approx(
        {name: sum(x) / 5 for name, x in measured.items()}, rel=1e-4
    )


def test_importance_weights_of_sequences_are_of_rejected_tokens_too():
    """The weight is the likelihood ratio of the response that was drawn, whichever of its tokens are learned from."""
    old, rejection = (
        [-0.7, -0.35, -1.2, -1.5, -0.9, -1.1],
        [
            "algorithm.rollout_rs=token",
            "algorithm.rollout_rs_threshold=1.8",
            "algorithm.rollout_rs_threshold_lower=0.7",
        ],
    )
    new = [-0.6, -0.5, -1.25, -1.3, -1.0, -1.15]
    _, _, plain = learn([3, 3], [1, 3], new, *rejection, old_log_probs=old)
    _, metrics, weighted = learn(
        [3, 3], [1, 3], new, *rejection, "algorithm.rollout_is=sequence", old_log_probs=old
    )
    assert metrics["rollout_corr/rejected"] == pytest.approx(2 / 6) and plain[1] == plain[3] == 0
    for i in range(6):
        ratio = math.exp(sum(old[i // 3 * 3 :][:3]) + 3)  # vLLM's are -1
        assert weighted[i] == pytest.approx(min(ratio, 2.0) * plain[i])


@pytest.mark.parametrize("more", ["algorithm.loss_mode=gspo"])
def test_the_loss_is_that_of_responses_without_their_rejected_tokens(more):
    """Those are the second and the fourth, of ratios e^0.65 and e^-0.5: they are not in the sequence's ratio of the policy."""
    old, new = [-0.7, -0.35, -1.2, -1.5, -0.9, -1.1], [-0.6, -0.5, -1.25, -1.3, -1.0, -1.15]
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
    assert metrics["rollout_corr/rejected"] == pytest.approx(2 / 6) and loss == pytest.approx(want)
    assert [gradient[i] for i in kept] == pytest.approx(slope) and gradient[1] == gradient[3] == 0


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


# -- validation --------------------------------------------------------------------------------------------------------


def test_pass_at_k():
    """Groups with 0, 1 and 4 right of 4, and one of 3 that says nothing of pass@k."""
    scores = [0, 0.9, 0, 0] + [0, 1, 0, 0] + [1, 1, 2, 1] + [1, 1, 1]
    samples = make_samples(
        [4] + [1] * 14, scores, [0] * 4 + [1] * 4 + [5] * 4 + [7] * 3, failures=[failure(0)]
    )
    metrics = validation_metrics(samples, "some/file.py:score", 4)
    mean = sum(scores) / 15
    assert metrics == pytest.approx(
        {
            "val/score": mean,
            "val/score/mean@4": mean,
            "val/score/pass@2": (0 + 0.5 + 1) / 3,
            "val/score/pass@4": 2 / 3,
            "val/response_length": 18 / 15,
            "val/truncated": 1 / 15,
            "val/failures": 1,
        }
    )


def test_validation_with_one_response_and_with_an_odd_number():
    samples = make_samples([1, 1, 1], [0, 1, 0], [0, 0, 0])
    assert set(validation_metrics(samples, "exact_match", 1)) == {
        "val/exact_match",
        "val/response_length",
        "val/truncated",
        "val/failures",
    }
    metrics = validation_metrics(samples, "exact_match", 3)
    assert (
        metrics["val/exact_match/pass@2"] == pytest.approx(2 / 3)
        and metrics["val/exact_match/pass@3"] == 1
    )
    assert "val/exact_match/pass@4" not in metrics


# -- contradictions ----------------------------------------------------------------------------------------------------

CONTRADICTIONS = {
    "a mini-batch that does not divide": (
        ["data.train_batch_size=8", "algorithm.ppo_mini_batch_size=3"],
        "algorithm.ppo_mini_batch_size=3 does not divide data.train_batch_size=8",
    ),
    "a mini-batch larger than the batch": (
        ["data.train_batch_size=8", "algorithm.ppo_mini_batch_size=16"],
        "does not divide",
    ),
    "an estimator that is not there": (
        ["algorithm.adv_estimator=ppo"],
        "must be one of gae, grpo,",
    ),
    "a loss that is not there": (
        ["algorithm.loss_mode=grpo"],
        "algorithm.loss_mode=grpo must be one of ppo, gspo, cispo",
    ),
    "an aggregation that is not there": (
        ["algorithm.loss_agg_mode=mean"],
        "must be one of token-mean, seq-mean-token-sum",
    ),
    "a divergence that is not there": (
        ["algorithm.kl_penalty=k4"],
        "algorithm.kl_penalty=k4 must be one of k1, k2, k3, abs",
    ),
    "corrected sampling from an unknown number of words": (
        ["rollout.top_p=0.9", "algorithm.rollout_is=token"],
        "set rollout.top_k (e.g. 64)",
    ),
    "equal responses of a validation": (
        ["validation.n=4"],
        "validation.n=4 gives that many equal responses",
    ),
    **{
        f"{pair}, which nothing reads": ([pair], f"{pair} does nothing without {needs}")
        for pair, needs in {
            "critic.path=there": GAE,
            "critic.lr=1": GAE,
            "critic.cliprange_value=1": GAE,
            "critic.warmup_steps=3": GAE,
            "algorithm.lam=0.5": GAE,
            "algorithm.gamma=0.5": f"{GAE} or reinforce_plus_plus",
            "algorithm.kl_penalty=k2": "algorithm.use_kl_in_reward=true",
            "algorithm.kl_ctrl.kl_coef=1": "algorithm.use_kl_in_reward=true",
            "algorithm.kl_ctrl.type=adaptive": "algorithm.use_kl_in_reward=true",
            "algorithm.kl_ctrl.horizon=2": "algorithm.kl_ctrl.type=adaptive",
            "algorithm.kl_loss_coef=1": "algorithm.use_kl_loss=true",
            "algorithm.kl_loss_type=k1": "algorithm.use_kl_loss=true",
            "reference.path=there": "algorithm.use_kl_loss=true or",
            "offload.reference=False": "algorithm.use_kl_loss=true or",
            "algorithm.rollout_is_threshold=3.0": "algorithm.rollout_is",
            "algorithm.rollout_rs_threshold=3.0": "algorithm.rollout_rs",
            "reward.overlong_penalty=2.0": "reward.overlong_buffer",
            "validation.top_p=0.5": "validation.temperature above 0",
            "algorithm.filter_groups.max_num_gen_batches=2": FILTER,
        }.items()
    },
    "a bound that cispo has not": (
        ["algorithm.loss_mode=cispo", "algorithm.clip_ratio_c=2.0"],
        "does nothing without",
    ),
    "groups of one that are filtered": ([FILTER, "rollout.n=1"], "needs rollout.n of 2 or more"),
    "a buffer longer than a response": (
        ["rollout.max_tokens=10", "reward.overlong_buffer=11"],
        "is more than rollout.max_tokens=10",
    ),
    "responses longer than a micro-batch": (
        [
            "data.max_prompt_length=50",
            "rollout.max_tokens=51",
            "data.max_tokens_per_micro_batch=100",
        ],
        "rollout.max_tokens = 101 is more than",
    ),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_contradictions_are_input_errors(what):
    more, message = CONTRADICTIONS[what]
    with pytest.raises(InputError) as error:
        check_settings(configure(*more))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["data.train_batch_size=8", "algorithm.ppo_mini_batch_size=8"],
        [GAE, "critic.path=there", "critic.warmup_steps=3"],
        ["reference.path=there", "algorithm.use_kl_loss=true"],
        ["reference.path=there", "algorithm.use_kl_in_reward=true"],
        [FILTER, "rollout.n=2"],
        ["rollout.top_k=20", "rollout.top_p=0.9", "algorithm.rollout_is=token"],
        ["rollout.max_tokens=10", "reward.overlong_buffer=10"],
        [
            "data.max_prompt_length=50",
            "rollout.max_tokens=50",
            "data.max_tokens_per_micro_batch=100",
        ],
    ],
)
def test_what_contradicts_nothing_is_accepted(more):
    check_settings(configure(*more))


def test_a_policy_that_samples_from_fewer_words_is_warned_of_unless_the_trainer_knows_them(capsys):
    check_settings(configure("rollout.min_p=0.1"))
    assert (
        "warning: rollout.min_p=0.1: responses are drawn from fewer tokens"
        in capsys.readouterr().err
    )
    check_settings(configure("rollout.min_p=0.1", "rollout.top_k=50"))
    assert not capsys.readouterr().err


def test_critic_and_reference_begin_with_their_own_model_or_the_policys():
    both = ["algorithm.adv_estimator=gae", "algorithm.use_kl_loss=true"]
    config = configure(
        *both, "critic.path=c", "critic.lr=0.5", "reference.path=r", "model.freeze=[x]", path="p"
    )
    roles = role_configs(config)
    assert [list(role.model.freeze) for role in roles.values()] == [["x"], ["x"], []]
    assert [(name, role.model.path, role.optim.lr) for name, role in roles.items()] == [
        ("actor", "p", config.optim.lr),
        ("critic", "c", 0.5),
        ("reference", "r", config.optim.lr),
    ]
    assert [role.model.path for role in role_configs(configure(*both, path="p")).values()] == [
        "p",
        "p",
        "p",
    ]
    assert list(role_configs(configure(path="p"))) == ["actor"]


# -- with a real engine ------------------------------------------------------------------------------------------------

ARM_PROMPTS, ARMS = [[5, 6], [7, 8, 9]], [[10, 11], [10, 12], [13, 11], [13, 12], [14, 15]]
ARM_SCORES = torch.tensor([[0.0, 0.2, 1.0, 0.4, 0.1], [0.3, 1.0, 0.0, 0.1, 0.2]])


@pytest.fixture(scope="module")
def this_device():
    """A process group of this process alone, of which the environment of other processes says nothing."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    torch.set_num_threads(1)
    found = device.init()
    os.environ.clear()
    os.environ.update(environment)
    yield found
    device.shutdown()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", num_hidden_layers=1)


def bandit_samples(indices=None):
    """All arms of all prompts, or those at some indices, with their scores."""
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
    """[2, 5]: how likely the policy is to choose each arm, of these."""
    samples = bandit_samples()
    log_probs = updates.log_probs(engine, whole(samples))
    of_arm = torch.stack([x.sum() for x in log_probs.split(samples.lengths.tolist())]).view(2, 5)
    return of_arm.softmax(1)


def play(config, this_device, steps):
    """Train on arms that the policy chose; the policy's expected score before and after each step."""
    engines = {
        role: FSDPEngine(
            settings, this_device, steps, optimize=role != "reference", head=head_of(role)
        )
        for role, settings in role_configs(config).items()
    }
    actor, critic, reference = (engines.get(role) for role in ("actor", "critic", "reference"))
    generator, scores, kl_coef = (
        torch.Generator().manual_seed(0),
        [],
        config.algorithm.kl_ctrl.kl_coef,
    )
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


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_bandit_finds_the_best_arms(this_device, model, name):
    scores = play(configure(*BANDIT, *ALGORITHMS[name], path=model), this_device, 20)
    assert max(scores[0]) < 0.5 and min(scores[-1]) > 0.85


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
    """An actor, and the mini-batches of two groups of unequal scores with all that its first update needs."""
    actor, samples = FSDPEngine(config, this_device, 10), bandit_samples()
    share = divide(samples, samples.mini_batches(mini_batch_prompts(config)), actor)
    fields = share.batch.fields
    fields["old_log_probs"] = updates.log_probs(actor, share)
    fields["rollout_log_probs"] = fields["old_log_probs"] - 0.1 * fields["loss_mask"]
    set_advantages(config, samples, share, 0.0)
    return actor, share.parts


def test_the_first_mini_batch_of_an_update_has_a_ratio_of_exactly_1(this_device, model):
    """In several micro-batches; the second has another policy already."""
    config = configure(*BANDIT, "data.max_tokens_per_micro_batch=12", path=model)
    actor, parts = first_update(config, this_device)
    loss_fn = ActorLoss(config, 10)
    assert [len(part) for part, _ in parts] == [5, 5] and sum(parts[0][0].lengths) > 12
    first = updates.update(actor, parts[:1], loss_fn, 0, 1, "actor")
    assert (
        first["actor/ppo_kl"] == 0
        and first["actor/pg_clipfrac"] == 0
        and first["actor/grad_norm"] > 0
    )
    second = updates.update(actor, parts[1:], loss_fn, 0, 1, "actor")
    assert second["actor/ppo_kl"] != 0


def test_an_update_is_a_step_for_each_mini_batch_and_epoch(this_device, model):
    """Its metrics are means over the steps."""
    config = configure(*BANDIT, "algorithm.ppo_epochs=3", path=model)
    actor, parts = first_update(config, this_device)
    twin, loss_fn = FSDPEngine(config, this_device, 10), ActorLoss(config, 10)
    updated = updates.update(actor, parts, loss_fn, 4, 3, "actor")
    results = [twin.train_batch(part, loss_fn, 4) for _ in range(3) for part, _ in parts]
    for key in ("loss", "pg_loss", "pg_clipfrac", "entropy", "ppo_kl", "grad_norm", "lr"):
        assert updated[f"actor/{key}"] == pytest.approx(
            sum(r[key] for r in results) / 6, rel=1e-6
        ), key
    assert updated["actor/skipped"] == 0 and not any("rollout" in key for key in updated)
    weights = [dict(engine.export_weights()) for engine in (actor, twin)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    poisoned = updates.update(
        actor, parts, lambda log_probs, *_: (log_probs.sum() * math.nan, {}), 4, 3, "critic"
    )
    assert poisoned["critic/skipped"] == 6, "a count, not a mean"


def test_what_is_said_of_the_rollout_is_of_all_tokens_wherever_it_is_said(this_device, model):
    """Before the update, where all tokens are rejected, and by an update that has no log-probabilities of before."""

    def measure(*more):
        config = configure(*BANDIT, "algorithm.ppo_mini_batch_size=null", *more, path=model)
        actor, samples = FSDPEngine(config, this_device, 10), bandit_samples()
        share = divide(samples, samples.mini_batches(mini_batch_prompts(config)), actor)
        fields = share.batch.fields
        old, mask = updates.log_probs(actor, share), fields["loss_mask"]
        fields["rollout_log_probs"] = old - mask * torch.where(
            torch.arange(len(mask)) % 3 == 0, 0.1, 0.3
        )
        if more:
            fields["old_log_probs"] = old
        said = set_advantages(config, samples, share, 0.0)
        updated = updates.update(actor, share.parts, ActorLoss(config, len(samples)), 0, 1, "actor")
        assert any("gap" in key for key in updated) != any("gap" in key for key in said)
        return {
            key: x for key, x in (said | updated).items() if key.startswith("rollout_corr/")
        }, mask

    by_update, mask = measure()
    before, _ = measure("algorithm.rollout_rs=token", "algorithm.rollout_rs_threshold=1.01")
    assert before.pop("rollout_corr/rejected") == 1 and before == pytest.approx(by_update, rel=1e-5)
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
