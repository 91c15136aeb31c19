"""Samples of vLLM, graded and shared out among ranks, and what they teach.

Judges the launches of rollout_worker.py.
"""

import pytest

from examples.arithmetic import make_tokenizer
from tests.rollout.launches import (
    LAUNCHES,
    LOG_PROB_BOUND,
    PAIRS,
    make_prompts,
    split_written,
    written_responses,
)
from tests.rollout.sample_cases import FIRST_GROUP, LEARNED
from tests.support.cases import launch_params, needs

pytestmark = pytest.mark.slow


PAIR_PARAMS = [
    pytest.param(two_ranks, one_rank, marks=needs((2, two_ranks), (1, one_rank)))
    for two_ranks, one_rank in PAIRS
]


@pytest.fixture(params=launch_params(LAUNCHES))
def name(request):
    return request.param


@pytest.mark.parametrize("two_ranks, one_rank", PAIR_PARAMS)
def test_samples_do_not_depend_on_the_number_of_ranks(rollout_results, two_ranks, one_rank):
    two = rollout_results(two_ranks)["samples"]
    one = rollout_results(one_rank)["samples"]
    first, second = two["all"]
    assert first == second, "ranks disagree"
    keys = ["texts", "input_ids", "group", "scores", "truncated", "prompts", "failures"]
    for key in [*keys, "loss_mask", "sizes"]:
        # "one" has fewer prompts than there are replicas. In "bad first", grading would end early
        # if a rank compared its own failures with its own share of the responses.
        for case in ("two", "one", "bad first"):
            assert two[case][key] == one[case][key], (case, key)
        assert first[key] == one["all"][0][key], key
        assert two["by length"][key] == one["all"][0][key], key
        assert one["by length"][key] == one["all"][0][key], key
    expected_log_probs = pytest.approx(one["all"][0]["rollout_log_probs"], abs=LOG_PROB_BOUND)
    assert first["rollout_log_probs"] == expected_log_probs
    distinct = {tuple(response) for response in written_responses(one["all"][0])}
    assert len(distinct) > 15, "the same text over and over"


@needs((1, "moe"), (2, "moe_dp2"))
def test_replicas_get_prompts_of_equal_total_length(rollout_results):
    """As many prompts each while no length is known; then by the last lengths, on both ranks."""
    two = rollout_results("moe_dp2")["samples"]
    one = rollout_results("moe")["samples"]
    by_length = two["by length"]
    lengths_of_last = [
        len(response)
        for response, group in zip(written_responses(by_length), by_length["group"])
        if group == FIRST_GROUP + 4
    ]
    assert two["lengths"] == 2 * one["lengths"]
    assert two["lengths"][0][4] == sum(lengths_of_last) / 4
    assert two["lengths"][0][4] > 6
    assert sorted(two["num_local"]) == [[8, 16], [12, 4]]
    assert one["num_local"] == [[20, 20]]


@needs((1, "moe"), (2, "moe_dp2"))
def test_idle_time_is_the_wait_for_the_slowest_replica(rollout_results):
    metrics = rollout_results("moe_dp2")["samples"]["all"][0]["metrics"]
    assert 0 < metrics["perf/rollout_idle_max"] < 1
    assert metrics["perf/rollout_idle"] == pytest.approx(metrics["perf/rollout_idle_max"] / 2)
    metrics_of_one = rollout_results("moe")["samples"]["all"][0]["metrics"]
    assert set(metrics_of_one.values()) == {0.0}


@pytest.mark.parametrize("settings", LEARNED)
@pytest.mark.parametrize("two_ranks, one_rank", PAIR_PARAMS)
def test_learning_does_not_depend_on_the_number_of_ranks(
    rollout_results, two_ranks, one_rank, settings
):
    """To the last bit: ranks only add up numbers per response, in the order of the responses."""
    two = rollout_results(two_ranks)["samples"]["learned"][settings]
    one = rollout_results(one_rank)["samples"]["learned"][settings]
    assert two["fields"] == one["fields"]
    assert two["metrics"] == one["metrics"]
    assert sum(two["counts"]) < sum(one["counts"])
    assert len(set(one["fields"]["advantages"])) > 5
    assert sum(one["fields"]["token_weight"]) == pytest.approx(2)
    if settings == "rejecting":
        assert 0 < one["metrics"]["rollout_corr/rejected"] < 1


def test_drawing_exchanges_a_few_numbers_per_response(result, name):
    samples = result["samples"]
    num_ranks = LAUNCHES[name].ranks
    held = samples["all"][0]["held"]
    assert sum(held) == len(samples["all"][0]["group"])
    for num_held in held:
        assert 0 < num_held <= 12 * (3 - num_ranks)
    for num_bytes in samples["bytes"]:
        assert num_bytes["all_reduce"] == 20 * 5 * 8 + 4 * num_ranks
        if num_ranks == 1:
            assert num_bytes.keys() == {"all_reduce"}
        else:
            assert num_bytes.keys() == {"all_reduce", "all_gather_object"}
            assert num_bytes["all_gather_object"] < 4000, "failures, with their tracebacks"


def test_each_token_moves_to_one_rank_once(result, name):
    """Id, mask and log-probability of each token; all else are a few float64 per response."""
    num_ranks = LAUNCHES[name].ranks
    samples = result["samples"]
    num_responses = len(samples["all"][0]["group"])
    num_tokens = len(samples["all"][0]["input_ids"])
    for settings, learned in samples["learned"].items():
        moved, reduced, tokens = zip(*learned["bytes"])
        assert sum(tokens) == num_tokens
        moved_bytes = sum(num_bytes["all_to_all_single"] for num_bytes in moved)
        assert moved_bytes == num_tokens * (8 + 4 + 4)
        for num_bytes in moved:
            # The sizes of ranks' shares, and the micro-batches of each mini-batch.
            assert num_bytes["all_reduce"] == 8 * num_ranks + 8 * 2
        for num_bytes in reduced:
            assert num_bytes.keys() == {"all_reduce"}
        assert reduced[0]["all_reduce"] <= 8 * num_responses * 30, settings


def test_samples_are_scored_in_order_and_failures_are_left_out(result):
    samples = result["samples"]["all"][0]
    assert samples["scores"] == [len(text) for text in samples["texts"]]
    assert samples["prompts"] == [f"prompt {group - FIRST_GROUP}" for group in samples["group"]]
    decoded = make_tokenizer().batch_decode(written_responses(samples), skip_special_tokens=True)
    assert samples["texts"] == decoded
    prompts = make_prompts(5)
    for (ids, mask, _, _), group in zip(split_written(samples), samples["group"], strict=True):
        assert ids[mask == 0].tolist() == prompts[group - FIRST_GROUP]
    *num_others, num_bad, num_last = [
        samples["group"].count(FIRST_GROUP + number) for number in range(5)
    ]
    assert num_others == [4, 4, 4]
    assert num_last == 4
    assert 0 < num_bad < 4
    assert len(samples["failures"]) == 4 - num_bad
    for kind, row, response in samples["failures"]:
        assert kind == "raised"
        assert row == {"bad": True}
        assert len(response) % 2 == 1


def test_too_many_failures_are_the_same_error_on_all_ranks(result, name):
    errors = result["samples"]["too many failures"]
    assert len(errors) == LAUNCHES[name].ranks
    assert all(error == errors[0] for error in errors)
    kind, message = errors[0]
    assert kind == "InputError"
    assert "of 20 samples" in message
    assert "an odd length" in message


def test_a_group_is_graded_in_one_call_whatever_the_layout(result):
    groups, *of_other_ranks = result["samples"]["groups"]
    assert all(other == groups for other in of_other_ranks)
    assert groups["parts"]["size"] == [4.0] * 12
    ranks = []
    for start in (0, 4, 8):
        texts = groups["texts"][start : start + 4]
        ranks += [sorted(texts).index(text) / 4 for text in texts]
    assert groups["parts"]["rank"] == ranks
    assert groups["scores"] == [rank + 4 for rank in ranks]


def test_a_reward_that_is_a_number_has_no_parts(result):
    assert result["samples"]["all"][0]["parts"] == {}


def test_a_response_to_a_row_is_the_same_in_another_batch(result):
    samples = result["samples"]
    texts = samples["all"][0]["texts"]
    assert samples["two"]["texts"] == texts[-4:] + texts[8:12]
    assert samples["one"]["texts"] == texts[4:5]
