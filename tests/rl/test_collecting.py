"""The samples of a step: how many batches are drawn, and what is kept of them."""

import statistics
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from algorithms.advantages import gdpo
from config import InputError
from data.batching.order import global_batch
from profiling import Profiler
from rl.collecting import (
    BatchSource,
    PartialSource,
    collect as collect_samples,
    collection_metrics,
    combined,
    informative_responses,
    penalized_scores,
    weights_of_parts,
    with_baselines,
)
from rollout.drawing import Request
from rollout.partial.drawing import StepCounts
from tests.support.samples import (
    configure,
    failure,
    make_samples,
)

FILTER = "algorithm.filter_groups.enable=true"

PROMPTS = 12
SIZE = 3


def collect(agreeing, *more, batch_index=1, failing=()):
    """Collect from 12 prompts, 3 in a batch, with 2 responses each.

    Responses score row + 1; the second one scores the negative unless its row is among `agreeing`.
    Those to failing rows cannot be graded. Returns the result, or the error, and the calls of
    respond().
    """
    calls = []

    def respond(request):
        assert len(request.dataset) == PROMPTS
        rows = request.rows
        sampling = request.sampling
        first_group = request.first_group
        seed = request.seed[1:]  # without that of the run
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

    rows_of_batch = partial(global_batch, PROMPTS, SIZE, 0)
    config = configure(f"data.train_batch_size={SIZE}", "rollout.n=2", *more)
    try:
        source = BatchSource(config, respond, range(PROMPTS), rows_of_batch, batch_index)
        return collect_samples(config, source), source.batch_index, calls
    except InputError as error:
        return str(error), calls


def batches(*indices):
    return [global_batch(PROMPTS, SIZE, 0, i).tolist() for i in indices]


def test_collect_draws_one_batch():
    samples, following, calls = collect(agreeing=range(PROMPTS))
    assert following == 2
    assert calls == [(batches(1)[0], 2, 1.0, (1,), 0)]
    assert samples.scores.tolist() == [row + 1 for row in batches(1)[0] for _ in range(2)]


def test_filter_groups_draws_until_there_are_enough_and_keeps_the_first():
    """The epoch ends after batch 3: batch 4 is the first of the next."""
    drawn = [row for batch in batches(3, 4) for row in batch]
    teaching = {drawn[0], drawn[2], drawn[4]}
    places = [i for i, row in enumerate(drawn) if row in teaching]
    assert [place < 3 for place in places].count(True) == 2
    assert len(places) == 5, "more than are needed"
    samples, following, calls = collect({*range(PROMPTS)} - teaching, FILTER, batch_index=3)
    assert following == 5
    assert calls == [(drawn[:3], 2, 1.0, (3,), 0), (drawn[3:], 2, 1.0, (4,), 3)]
    assert samples.group.tolist() == [place for place in places[:SIZE] for _ in range(2)]
    assert samples.scores.abs().tolist() == [
        drawn[place] + 1 for place in places[:SIZE] for _ in range(2)
    ]
    scores = [(row + 1) * sign for row in drawn for sign in (1, -1 if row in teaching else 1)]
    assert samples.metrics == pytest.approx(
        {
            "rollout/num_gen_batches": 2,
            "score/mean": statistics.mean(scores),
            "critic/score/mean": statistics.mean(scores),
            "score/max": max(scores),
            "critic/score/max": max(scores),
            "score/min": min(scores),
            "critic/score/min": min(scores),
            "reward/informative_groups": 5 / 6,
        }
    ), "of all that was drawn"


def test_metrics_of_several_draws_are_those_of_all_their_episodes():
    draws = []
    for num_drawn, turns, longest, errors in ((2, 1.5, 2, 1.0), (6, 4.5, 9, 2.0)):
        drawn = make_samples([1, 1], [0.0, 1.0], [0, 0])
        drawn.num_drawn = num_drawn
        drawn.metrics = {
            "episodes/turns/mean": turns,
            "episodes/turns/max": longest,
            "episodes/tool_errors": errors,
        }
        draws.append(drawn)
    metrics = collection_metrics(draws, draws[0], torch.ones(2, dtype=torch.bool))
    assert metrics["episodes/turns/mean"] == (2 * 1.5 + 6 * 4.5) / 8
    assert metrics["episodes/turns/max"] == 9
    assert metrics["episodes/tool_errors"] == 3


def test_filter_groups_goes_on_with_what_it_has_after_the_last_batch():
    only = batches(2)[0][2]
    samples, following, calls = collect(
        {*range(PROMPTS)} - {only}, FILTER, "algorithm.filter_groups.max_num_gen_batches=2"
    )
    assert following == 3
    assert len(calls) == 2
    assert len(samples.group.unique()) == 1
    assert samples.scores.tolist() == [only + 1, -only - 1]


def test_filter_groups_with_nothing_left_takes_what_was_drawn_last():
    """A step without an advantage, rather than the end of the run."""
    first = batches(1)[0][0]
    samples, following, calls = collect(
        range(PROMPTS), FILTER, "algorithm.filter_groups.max_num_gen_batches=2", failing=[first]
    )
    assert following == 3
    assert len(calls) == 2
    assert samples.failures == [failure(first)]
    assert samples.group.tolist() == [3, 3, 4, 4, 5, 5]
    assert samples.scores.tolist() == [row + 1 for row in batches(2)[0] for _ in range(2)]
    samples, *_ = collect(
        range(PROMPTS),
        FILTER,
        "algorithm.filter_groups.max_num_gen_batches=2",
        failing=batches(2)[0],
    )
    assert samples.group.tolist() == [0, 0, 1, 1, 2, 2], "that of which something was graded"


# Two groups of responses: scores, and two parts of them.
GROUPS_OF_PARTS = {
    "equal scores of different parts": ([3, 3, 3, 3], [[0, 1, 1, 0], [3, 2, 2, 3]], [0.5, 1.0]),
    "parts that cancel once they are normalized": (
        [0.5, 0.8, 0.5, 0.8],
        [[0, 0.5, 0, 0.5], [0.5, 0.3, 0.5, 0.3]],
        [1.0, 1.0],
    ),
}


@pytest.mark.parametrize("name", GROUPS_OF_PARTS)
def test_gdpo_judges_a_group_by_its_normalized_parts(name):
    """As the advantages tell: they are the same for every response of a group, or they are not."""
    scores, parts, weights = GROUPS_OF_PARTS[name]
    samples = make_samples([1] * 6, [*scores, 1, 1], [0, 0, 0, 0, 1, 1])
    samples.parts = {
        "a": torch.tensor([*parts[0], 0.5, 0.5]),
        "b": torch.tensor([*parts[1], 0.5, 0.5]),
    }
    weighing = [f"reward.weights.{part}={weight}" for part, weight in zip("ab", weights)]
    config = configure("algorithm.adv_estimator=gdpo", "rollout.n=4", *weighing)
    part_weights = weights_of_parts(config, samples)
    advantages, _ = gdpo(parts=samples.parts, part_weights=part_weights, group=samples.group)
    has_gradient = bool(advantages[:4].abs().max() > 1e-6)
    assert has_gradient == (name == "equal scores of different parts")
    expected = [has_gradient] * 4 + [False] * 2
    assert informative_responses(config, samples).tolist() == expected
    by_score = informative_responses(configure("rollout.n=4"), samples)
    assert by_score[0] != has_gradient, "the score tells the opposite"


def test_gdpo_counts_no_part_without_weight():
    samples = make_samples([1, 1], [2, 2], [0, 0])
    samples.parts = {"a": torch.tensor([2.0, 2.0]), "b": torch.tensor([0.0, 1.0])}
    config = configure("algorithm.adv_estimator=gdpo", "reward.weights.a=1.0")
    assert not informative_responses(config, samples).any()


def test_max_at_k_judges_a_group_by_its_advantages():
    """No response raises the maximum of two others if two of them have the best score."""
    samples = make_samples([1] * 6, [1, 1, 0, 1, 0, 0], [0, 0, 0, 1, 1, 1])
    config = configure("algorithm.adv_estimator=max_at_k", "algorithm.adv_kwargs.k=3")
    assert informative_responses(config, samples).tolist() == [False] * 3 + [True] * 3
    by_score = informative_responses(configure(), samples)
    assert by_score.all()


def test_nothing_graded_is_an_error():
    message, calls = collect(
        (), FILTER, "algorithm.filter_groups.max_num_gen_batches=2", failing=range(PROMPTS)
    )
    assert len(calls) == 2
    assert "no response to 2 batches of prompts could be graded" in message
    assert "raised: trace" in message


def test_remax_draws_a_greedy_response_more():
    row = batches(1)[0][1]
    samples, following, calls = collect(
        {*range(PROMPTS)}, "algorithm.adv_estimator=remax", failing=[row]
    )
    assert following == 2
    assert calls == [(batches(1)[0], 2, 1.0, (1,), 0), (batches(1)[0], 1, 0.0, (1,), 0)]
    assert samples.group.tolist() == [0, 0, 2, 2]
    assert samples.baseline.tolist() == samples.scores.tolist()
    assert samples.failures == [failure(row)] * 2, "of both draws"
    assert samples.num_drawn == SIZE * 3, "of both draws"


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
    assert (penalty < 0).all()
    assert (samples.baseline - samples.scores).tolist() == pytest.approx(penalty.tolist())


def test_remax_draws_a_greedy_response_to_each_prompt_of_each_draw():
    """Two draws for one step: greedy responses belong to the groups of their own draw."""
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
    assert samples.group.tolist() == [0, 0, 5, 5]
    assert samples.baseline.tolist() == [first + 1] * 2 + [last + 1] * 2


def test_greedy_responses_have_a_limit_of_failures_of_their_own():
    """With rollout.partial, that of the other responses depends on the draws of a step so far."""
    config = configure("algorithm.adv_estimator=remax", f"data.train_batch_size={SIZE}")
    requests = []

    def respond(request):
        requests.append(request)
        return make_samples([2], [0.5], [4])

    request = Request(range(PROMPTS), [7], config.rollout, (3, 1), first_group=4, max_failures=0)
    samples = with_baselines(config, respond, request, make_samples([1, 3], [1, 0], [4, 4]))
    assert samples.baseline.tolist() == [0.5, 0.5]
    (greedy,) = requests
    assert (greedy.sampling.n, greedy.sampling.temperature) == (1, 0.0)
    assert greedy.max_failures is None
    unchanged = {"sampling": request.sampling, "max_failures": 0}
    assert replace(greedy, **unchanged) == request


def test_failures_of_all_draws_are_kept():
    rows = [batches(1)[0][0], batches(2)[0][0]]
    samples, _, calls = collect((), FILTER, failing=rows)
    assert len(calls) == 2
    assert samples.failures == [failure(row) for row in rows]
    assert samples.num_drawn == 2 * SIZE * 2


def test_failures_are_reported_with_those_of_earlier_draws_of_the_step():
    """Each of two draws grades four responses, and fails with two of them."""
    samples = make_samples([1, 2], [0, 1], [0, 1], failures=[failure(0), failure(1)])
    sampler = SimpleNamespace(counts=StepCounts())

    def draw(num_groups, version, first_group, profiler):
        sampler.counts.graded += 4
        sampler.counts.failed += 2
        return None, samples

    sampler.draw = draw
    sampler.end_step = lambda version: {"partial/version": version}
    sampler.ledger = SimpleNamespace(next_group=7)
    reports = []
    config = configure("data.train_batch_size=3")
    source = PartialSource(
        config, sampler, None, lambda *report: reports.append(report[1:]), 5, Profiler()
    )
    for first_group in (0, 2):
        source.draw(2, first_group)
    assert reports == [(4, 0), (8, 2)]
    assert source.end_step() == {"partial/version": 5}
    assert source.batch_index == 2, "the batch of the seventh group begins again"


class RecordedSource:
    """Draws groups of two responses, of which those in `teaching` have different scores.

    asked: the arguments of each draw
    """

    def __init__(self, teaching, num_given=None):
        self.teaching = teaching
        self.num_given = num_given
        self.asked = []

    def draw(self, num_groups, first_group):
        self.asked.append((num_groups, first_group))
        num_drawn = self.num_given or num_groups
        groups = [first_group + i // 2 for i in range(2 * num_drawn)]
        scores = [float(i % 2 and group in self.teaching) for i, group in enumerate(groups)]
        return replace(make_samples([1] * len(groups), scores, groups), metrics={"of draws": 1.0})

    def end_step(self):
        return {"partial/of_step": float(len(self.asked)), "of draws": 7.0}


def test_a_further_draw_asks_for_the_groups_that_are_missing_and_numbers_go_on():
    """Of groups 0 to 3, 1 and 3 teach something; of 4 and 5, 5 does; and then 6."""
    source = RecordedSource({1, 3, 5, 6})
    samples = collect_samples(configure(FILTER, "data.train_batch_size=4"), source)
    assert source.asked == [(4, 0), (2, 4), (1, 6)]
    assert samples.group.tolist() == [1, 1, 3, 3, 5, 5, 6, 6]


def test_the_metrics_of_a_step_include_those_that_its_source_has_after_the_last_draw():
    source = RecordedSource({0, 2})
    samples = collect_samples(configure(FILTER, "data.train_batch_size=2"), source)
    assert samples.metrics["partial/of_step"] == 2.0, "of both draws"
    assert samples.metrics["of draws"] == 7.0, "those of the step replace those of its draws"
    assert samples.metrics["rollout/num_gen_batches"] == 2


def test_a_step_without_a_filter_keeps_groups_that_teach_nothing_but_no_more_than_a_batch():
    """More groups may be complete than a step trains on. The first ones count."""
    source = RecordedSource({1}, num_given=5)
    samples = collect_samples(configure("data.train_batch_size=3"), source)
    assert source.asked == [(3, 0)]
    assert samples.group.tolist() == [0, 0, 1, 1, 2, 2]
    assert samples.metrics["reward/informative_groups"] == pytest.approx(1 / 5), "of all five"
    source = RecordedSource({1}, num_given=1)
    samples = collect_samples(configure("data.train_batch_size=3"), source)
    assert source.asked == [(3, 0)], "one draw, even if no more groups are left"
    assert samples.group.tolist() == [0, 0]


def test_a_draw_of_open_groups_has_the_step_and_its_greedy_responses():
    """They are drawn for the request that the sampler returns."""
    profiler = Profiler()
    config = configure("algorithm.adv_estimator=remax", "data.train_batch_size=3")
    request = Request(range(PROMPTS), [7], config.rollout, (), first_group=4, max_failures=2)
    asked = []
    responded = []

    def draw(*arguments):
        asked.append(arguments)
        return request, make_samples([1, 3], [1, 0], [4, 4])

    def respond(greedy):
        responded.append(greedy)
        return make_samples([2], [0.5], [4])

    sampler = SimpleNamespace(draw=draw, counts=StepCounts(graded=2))
    source = PartialSource(config, sampler, respond, lambda *report: None, 5, profiler)
    samples = source.draw(3, 4)
    assert asked == [(3, 5, 4, profiler)]
    (greedy,) = responded
    assert (greedy.rows, greedy.first_group, greedy.sampling.n) == ([7], 4, 1)
    assert samples.baseline.tolist() == [0.5, 0.5]


def test_only_the_failures_of_earlier_draws_count_as_earlier():
    """The sampler has counted those of this draw already."""
    samples = make_samples([1], [0], [0], failures=[failure(0), failure(1)])
    counts = StepCounts(graded=9, failed=5)
    sampler = SimpleNamespace(draw=lambda *arguments: (None, samples), counts=counts)
    reports = []
    source = PartialSource(
        configure(), sampler, None, lambda *report: reports.append(report), 0, Profiler()
    )
    source.draw(1, 0)
    assert reports == [(samples, 9, 3)]


def test_counts_of_draws_are_summed_and_maxima_are_not_weighted():
    """The names decide. A mean counts each draw by the number of its responses."""
    values = [1.0, 5.0, 2.0]
    sizes = [8, 1, 1]
    assert combined("episodes/tool_errors", values, sizes) == 8.0
    assert combined("episodes/turns/max", values, sizes) == 5.0
    assert combined("perf/rollout_idle_max", values, sizes) == 5.0
    assert combined("episodes/tool_calls/mean", values, sizes) == (8 + 5 + 2) / 10


@pytest.mark.parametrize("weight", [0.5, 0.0])
def test_parts_without_a_weight_count_0_only_beside_parts_that_have_one(weight):
    """A reward model's weight is neither a default nor in reward.weights."""
    samples = make_samples([1], [0], [0])
    samples.parts = {name: torch.zeros(1) for name in ("a", "b", "model")}
    model = ["reward.model.path=judge", f"reward.model.weight={weight}"]
    assert weights_of_parts(configure(*model), samples) == {"a": 1.0, "b": 1.0, "model": weight}
    with_weight = configure(*model, "reward.weights.b=3.0", "reward.weights.absent=2.0")
    assert weights_of_parts(with_weight, samples) == {"a": 0.0, "b": 3.0, "model": weight}
    own = configure("reward.weights.b=3.0")
    assert weights_of_parts(own, samples) == {"a": 0.0, "b": 3.0, "model": 0.0}
