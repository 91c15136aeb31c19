"""The loop of train_dpo.py."""

from types import SimpleNamespace

import pytest
import torch

import train_dpo
from config import load
from preferences.trainer import PreferenceTrainer
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


def test_the_engine_learns_of_new_end_tokens(tmp_path, monkeypatch):
    """It writes them into the generation_config.json of checkpoints and exports."""
    engine = SimpleNamespace(dp_size=1)
    trainer = SimpleNamespace(engine=engine)
    pairs = ["model.path=m", "data.train_files=t", f"output_dir={tmp_path}"]
    run = SimpleNamespace(
        config=load("dpo.yaml", pairs),
        device=torch.device("cpu"),
        total_steps=3,
        datasets=dict,
        profiler=SimpleNamespace(stage="stage"),
        resume_from=None,
        train=[0],
        start=lambda line: None,
        end_loop=lambda: None,
        is_complete=False,
        close=lambda: None,
    )
    monkeypatch.setattr(train_dpo, "set_up", lambda config, loss: run)
    monkeypatch.setattr(train_dpo, "train", lambda run, trainer: None)
    monkeypatch.setattr("job.end_tokens.new_end_ids", lambda run: [5])
    monkeypatch.setattr(PreferenceTrainer, "build", lambda *values: trainer)
    monkeypatch.setattr("engines.parallel.device.shutdown", lambda: None)
    train_dpo.main(run.config)
    assert engine.new_end_ids == [5]
    assert trainer.stage == "stage"
