"""Metrics of a validation."""

from dataclasses import replace

import pytest
import torch

from rl.validation import pass_rates, validation_metrics
from tests.support.samples import (
    failure,
    make_samples,
)


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
    assert metrics["val/exact_match/pass@2"] == pytest.approx(2 / 3)
    assert metrics["val/exact_match/pass@3"] == 1
    assert "val/exact_match/pass@4" not in metrics


def test_without_a_reward_function_there_is_no_score_of_0():
    samples = make_samples([1, 1], [0, 0], [0, 0])
    samples.parts["model"] = torch.tensor([9.0, 8.0])
    with_model = replace(samples, metrics={"reward/model/mean": 8.5})
    metrics = validation_metrics(with_model, "none", 2)
    assert metrics["val/reward_model"] == 8.5
    assert not [name for name in metrics if name.startswith("val/none")]


def test_validation_shows_the_metrics_of_episodes():
    samples = make_samples([1, 1], [0, 1], [0, 0])
    samples.metrics = {"episodes/turns/mean": 2.5, "episodes/limited": 0.25}
    shown = validation_metrics(samples, "agent.py:solve", 1)
    assert shown["val/episodes/turns"] == 2.5
    assert shown["val/episodes/limited"] == 0.25
    assert "val/episodes/tool_calls" not in shown


def test_a_validation_shows_parts_and_the_score_of_a_reward_model():
    samples = make_samples([1, 2, 4], [0, 1, 1], [0, 0, 0])
    parts = {"right": torch.tensor([0.0, 1.0, 0.5]), "model": torch.tensor([9.0, 9.0, 9.0])}
    samples.parts.update(parts)
    with_model = replace(samples, metrics={"reward/model/mean": 2.5})
    metrics = validation_metrics(with_model, "my.py:f", 4)
    assert metrics == pytest.approx(
        {
            "val/f": 2 / 3,
            "val/f/mean@4": 2 / 3,
            "val/f/right": 0.5,
            "val/reward_model": 2.5,
            "val/response_length": 7 / 3,
            "val/truncated": 1 / 3,
            "val/failures": 0,
        }
    ), "no prompt has four responses"
    of_function = validation_metrics(samples, "my.py:f", 1)
    assert of_function["val/f/model"] == 9, "a part of the function's own"
    assert "val/reward_model" not in of_function


@pytest.mark.parametrize("n, ks", [(2, [2]), (5, [2, 4, 5]), (6, [2, 4, 6]), (8, [2, 4, 8])])
def test_pass_at_k_is_that_of_powers_of_two_and_of_all_responses(n, ks):
    """One response of n is right: it is among k of them with the probability k / n."""
    samples = make_samples([1] * n, [1] + [0] * (n - 1), [3] * n)
    rates = pass_rates(samples, n)
    assert rates == pytest.approx({k: k / n for k in ks})
    assert list(rates) == ks


@pytest.mark.parametrize("score, passes", [(0.99, False), (1.0, True), (1.5, True)])
def test_a_response_passes_with_a_score_of_1_or_more(score, passes):
    samples = make_samples([1, 1], [score, 0], [0, 0])
    assert pass_rates(samples, 2) == {2: float(passes)}


def test_each_metric_of_episodes_in_a_validation_is_the_one_of_its_name():
    samples = make_samples([1, 1], [0, 1], [0, 0])
    samples.metrics = {
        "episodes/turns/mean": 1.0,
        "episodes/turns/max": 9.0,
        "episodes/tool_calls/mean": 2.0,
        "episodes/tool_errors": 3.0,
        "episodes/limited": 4.0,
        "episodes/left_out": 5.0,
    }
    metrics = validation_metrics(samples, "agent.py:solve", 1)
    of_episodes = {name: x for name, x in metrics.items() if name.startswith("val/episodes/")}
    assert of_episodes == {
        "val/episodes/turns": 1.0,
        "val/episodes/tool_calls": 2.0,
        "val/episodes/tool_errors": 3.0,
        "val/episodes/limited": 4.0,
        "val/episodes/left_out": 5.0,
    }
