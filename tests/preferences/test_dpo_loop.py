"""The loop of train_dpo.py."""

import train_dpo
from tests.support.loops import check_metrics, run_loop


def test_metrics_of_a_step_are_those_of_the_whole_batch(
    own_signals, process_group, tmp_path, monkeypatch
):
    """The head computes the trained tokens: all but the first of each of the four answers."""
    progress = train_dpo.DpoProgress(identity={})
    lines = run_loop(train_dpo, "dpo.yaml", progress, tmp_path, monkeypatch)
    check_metrics(lines, num_predicted_of=lambda num_tokens: num_tokens - 4)
