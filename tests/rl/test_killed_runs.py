"""A run with a teacher and with replayed experts that is killed loses nothing.

`make soak` kills such runs, one after the other, in more places.
"""

import sys

import pytest

from tests.soak.runs import differences, make_assets, replay, results_of
from tests.support.launch import kill_all, metrics, run, start, wait_for

NUM_STEPS = 4


@pytest.mark.slow
def test_a_killed_run_with_a_teacher_and_replayed_experts_resumes_to_the_last_bit(tmp_path):
    make_assets(tmp_path)

    def command(name: str) -> list:
        arguments = replay(tmp_path, tmp_path / name / "out")
        (tmp_path / name).mkdir()
        teacher = f"algorithm.distill.teacher={tmp_path}/teacher"
        limits = [f"trainer.total_steps={NUM_STEPS}", "trainer.test_freq=-1", teacher]
        return [sys.executable, *arguments, *limits]

    run(command("undisturbed"))
    lines = metrics(tmp_path / "undisturbed" / "out")
    updates = [line for line in lines if "actor/loss" in line]
    assert len(updates) == NUM_STEPS - 1, "the critic alone learns in the first one"
    for line in updates:
        assert line["distill/divergence"] > 0
        assert "rollout_corr/routing_mismatch" in line

    killed = command("killed")
    out = tmp_path / "killed" / "out"
    process = start(killed, tmp_path / "killed" / "log")
    checkpoint = out / "checkpoints" / "step_00000002"
    wait_for(checkpoint.exists, process)
    kill_all(process)
    assert "resuming" in run(killed).stdout
    assert differences(out, results_of(tmp_path / "undisturbed" / "out"), set()) == []
