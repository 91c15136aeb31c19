"""The loop of train_dpo.py."""

import pytest

import train_dpo
from tests.support.loops import (
    Loop,
    check_metrics,
    check_skipped_steps_end_the_run,
    check_stages,
    make_loop,
)


@pytest.fixture
def loop(own_signals, process_group, tmp_path, monkeypatch) -> Loop:
    progress = train_dpo.DpoProgress(identity={})
    return make_loop(train_dpo, "dpo.yaml", progress, tmp_path, monkeypatch)


def test_metrics_of_a_step_are_those_of_the_whole_batch(loop):
    """The head computes the trained tokens: all but the first of each of the four answers."""
    check_metrics(loop, num_predicted_of=lambda num_tokens: num_tokens - 4)


def test_stages_are_reported_with_their_step(loop):
    check_stages(loop, ["data"])


def test_skipped_steps_end_the_run(loop):
    check_skipped_steps_end_the_run(loop)
