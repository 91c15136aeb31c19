"""The loop of train_rm.py, and the progress that it begins with."""

import json
from types import SimpleNamespace

import pytest

import train_rm
from config import InputError, load
from job.resume import find_resume
from reward_models.settings import check_settings
from tests.job.test_run import make_run
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


def progress_of(out, *settings) -> train_rm.RewardProgress:
    """Return the progress of a run before its first step."""
    run = make_run(out, *settings, script="rm.yaml")
    run.train = SimpleNamespace(name="0123")
    run.order = SimpleNamespace(identity={"data.shuffle": run.config.data.shuffle})
    shape = SimpleNamespace(model_type="qwen3", num_hidden_layers=2, hidden_size=8)
    return train_rm.new_progress(run, shape, check_settings(run.config))


@pytest.mark.parametrize(
    "setting, message",
    [
        ("algorithm.loss=regression", "algorithm.loss=bradley_terry, now it is regression"),
        ("data.shuffle=false", "data.shuffle=True, now it is False"),
        ("trainer.seed=5", "trainer.seed=0, now it is 5"),
        ("trainer.total_steps=20", None),
    ],
)
def test_a_run_resumes_with_the_loss_and_the_rows_that_it_began_with(tmp_path, setting, message):
    """Otherwise a score would be the result of two losses."""
    saved = progress_of(tmp_path)
    (tmp_path / "trainer.json").write_text(json.dumps(saved.to_json()))
    needed = ["model.path=m", "data.train_files=t", f"trainer.resume={tmp_path}"]
    config = load("rm.yaml", needed)
    resumed = progress_of(tmp_path, setting)
    if message is None:
        assert find_resume(config, None, resumed, 20) == tmp_path
        return
    with pytest.raises(InputError, match=f"was written with {message}: set it back"):
        find_resume(config, None, resumed, 20)
