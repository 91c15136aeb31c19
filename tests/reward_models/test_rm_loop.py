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


def test_it_validates_before_training_and_as_often_as_it_should(loop):
    loops.check_validations(loop)


@pytest.mark.parametrize("begins_anew", [True, False])
def test_validation_before_training_is_for_new_runs_that_want_it(loop, begins_anew):
    loops.check_validation_before_training_is_for_new_runs(loop, begins_anew)


def test_a_step_is_logged_before_it_is_saved(loop):
    loops.check_a_step_is_logged_before_it_is_saved(loop)


def test_a_signal_ends_the_loop_with_a_checkpoint(loop):
    loops.check_a_signal_ends_the_loop_with_a_checkpoint(loop)


def test_skipped_steps_end_the_run(loop):
    loops.check_skipped_steps_end_the_run(loop)


def test_a_run_that_skips_all_steps_is_an_error(loop):
    loops.check_a_run_that_skips_all_steps_is_an_error(loop)
