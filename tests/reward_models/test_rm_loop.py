"""The loop of train_rm.py."""

import pytest

import train_rm
from tests.support import loops
from tests.support.loops import Loop, make_loop


@pytest.fixture
def loop(own_signals, process_group, tmp_path, monkeypatch) -> Loop:
    progress = train_rm.RewardProgress(identity={})
    return make_loop(train_rm, "rm.yaml", progress, tmp_path, monkeypatch)


def test_metrics_of_a_step_are_those_of_the_whole_batch(loop):
    """The head computes one score for each of the four conversations."""
    loops.check_metrics(loop, num_predicted_of=lambda num_tokens: 4)


def test_stages_are_reported_with_their_step(loop):
    loops.check_stages(loop, ["data", "train_batch"])


def test_each_stage_has_its_engine(loop):
    stages = {"data": False, "train_batch": True, "validate": True, "save": False}
    loops.check_each_stage_has_its_engine(loop, stages)


@pytest.mark.parametrize("check", loops.CHECKS, ids=lambda check: check.__name__)
def test_the_loop_does_what_all_loops_do(loop, check):
    check(loop)
