"""The loop of train_dpo.py."""

import pytest

import train_dpo
from tests.support import loops
from tests.support.loops import Loop, make_loop


@pytest.fixture
def loop(own_signals, process_group, tmp_path, monkeypatch) -> Loop:
    progress = train_dpo.DpoProgress(identity={})
    return make_loop(train_dpo, "dpo.yaml", progress, tmp_path, monkeypatch)


def test_metrics_of_a_step_are_those_of_the_whole_batch(loop):
    """The head computes the trained tokens: all but the first of each of the four answers."""
    loops.check_metrics(loop, num_predicted_of=lambda num_tokens: num_tokens - 4)


def test_stages_are_reported_with_their_step(loop):
    loops.check_stages(loop, ["data"])


def test_each_stage_has_its_engine(loop):
    """The trainer reports the stages in which it trains."""
    loops.check_each_stage_has_its_engine(loop, {"data": False, "validate": True, "save": False})


@pytest.mark.parametrize("check", loops.CHECKS, ids=lambda check: check.__name__)
def test_the_loop_does_what_all_loops_do(loop, check):
    check(loop)
