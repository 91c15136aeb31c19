"""The loop of train_rm.py."""

import train_rm
from tests.support.loops import check_metrics, run_loop


def test_metrics_of_a_step_are_those_of_the_whole_batch(
    own_signals, process_group, tmp_path, monkeypatch
):
    """The head computes one score for each of the four conversations."""
    progress = train_rm.RewardProgress(identity={})
    lines = run_loop(train_rm, "rm.yaml", progress, tmp_path, monkeypatch)
    check_metrics(lines, num_predicted_of=lambda num_tokens: 4)
