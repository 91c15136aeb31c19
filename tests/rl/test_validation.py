"""Metrics of a validation."""

import pytest

from rl.validation import validation_metrics
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


def test_validation_shows_the_metrics_of_episodes():
    samples = make_samples([1, 1], [0, 1], [0, 0])
    samples.metrics = {"episodes/turns/mean": 2.5, "episodes/limited": 0.25}
    shown = validation_metrics(samples, "agent.py:solve", 1)
    assert shown["val/episodes/turns"] == 2.5
    assert shown["val/episodes/limited"] == 0.25
    assert "val/episodes/tool_calls" not in shown
