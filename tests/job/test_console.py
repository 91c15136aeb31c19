"""The lines that a run prints about its steps, and the progress bar."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from config import load
from job import tracking
from rollout.grading.grader import Failure
from tests.job.test_tracking import make_samples


def start_tracker(out, *settings, script="ppo.yaml", step=0, total_steps=10) -> tracking.Tracker:
    """Return the tracker of a run that draws no picture, which would take a second."""
    needed = ["model.path=m", "data.train_files=t", f"output_dir={out}", "trainer.report=false"]
    config = load(script, [*needed, "trainer.logger=[console]", *settings])
    return tracking.Tracker(config, 0, step, total_steps)


def log_rewards(tracker: tracking.Tracker, rewards: dict[int, tuple[float, float]]) -> None:
    """Log steps with these smallest and largest rewards."""
    for step, (low, high) in rewards.items():
        tracker.log(step, {"critic/rewards/min": low, "critic/rewards/max": high})


# Each metric of a line on the console, and how the line shows it.
SHOWN = {
    "train/loss": (1.23456, "loss 1.2346"),
    "rewards/accuracies": (0.625, "accuracy 62.5%"),
    "rewards/margins": (0.12345, "margin 0.123"),
    "score/mean": (0.5, "score 0.500"),
    "reward/informative_groups": (0.25, "informative 25%"),
    "episodes/turns/mean": (2.34, "turns 2.3"),
    "episodes/tool_calls/mean": (1.75, "tool calls 1.8"),
    "response_length/mean": (17.04, "length 17.0"),
    "val/loss": (2.5, "val loss 2.5000"),
    "val/exact_match": (0.1234, "exact match 12.3%"),
    "val/rewards/accuracies": (0.75, "val accuracy 75.0%"),
    "val/rewards/margins": (-0.5, "val margin -0.500"),
    "actor/entropy": (0.75, "entropy 0.750"),
    "actor/ppo_kl": (0.00012, "ppo kl 1.2e-04"),
    "actor/kl_loss": (0.034, "reference kl 3.4e-02"),
    "train/grad_norm": (1.5, "grad norm 1.500"),
    "train/lr": (0.0000125, "lr 1.25e-05"),
    "perf/tokens_per_second": (12345.6, "12,346 tokens/s"),
    "perf/mfu": (0.4321, "MFU 43.2%"),
    "timing/step": (3.14159, "3.14 s"),
}


def test_the_line_of_a_step_has_its_metrics_in_a_fixed_order(tmp_path, capsys):
    tracker = start_tracker(tmp_path)
    in_reverse = {name: SHOWN[name][0] for name in reversed(SHOWN)}
    tracker.log(3, in_reverse | {"val/mine": 0.25, "train/epoch": 1.0})
    texts = [text for _, text in SHOWN.values()]
    line = "  ".join(["step      3", *texts, "val/mine 0.250"])
    assert capsys.readouterr().out == line + "\n"


@pytest.mark.parametrize(
    "first, second, text",
    [
        ("actor/kl_loss", "actor/reward_kl", "reference kl 1.0e-01  reference kl 2.0e-01"),
        ("train/grad_norm", "actor/grad_norm", "grad norm 0.100  grad norm 0.200"),
    ],
)
def test_metrics_of_both_kinds_of_runs_have_one_name(tmp_path, capsys, first, second, text):
    start_tracker(tmp_path).log(1, {first: 0.1, second: 0.2})
    assert capsys.readouterr().out == f"step      1  {text}\n"


def test_the_progress_bar_shows_the_step_and_its_first_metric(tmp_path):
    tracker = start_tracker(tmp_path, step=4)
    assert (tracker.bar.n, tracker.bar.total) == (4, 10)
    tracker.log(5, {"timing/step": 2.0, "score/mean": 0.5})
    assert tracker.bar.n == 5
    assert tracker.bar.postfix == "score 0.500"
    tracker.log(6, {"an unknown metric": 1.0})
    assert tracker.bar.postfix == ""


@pytest.mark.parametrize(
    "dtype, gap, numbers",
    [
        ("float32", 0.00098, None),
        ("float32", 0.00123, "by 0.0012 nats on average, where rounding explains at most 0.001:"),
        ("bfloat16", 0.098, None),
        ("bfloat16", 0.123, "by 0.12 nats on average, where rounding explains at most 0.1:"),
    ],
)
def test_a_gap_beyond_rounding_is_reported_once_beside_its_limit(
    tmp_path, capsys, dtype, gap, numbers
):
    tracker = start_tracker(tmp_path, f"engine.compute_dtype={dtype}")
    for step in (1, 2):
        tracker.log(step, {"rollout_corr/log_prob_gap": gap})
    lines = capsys.readouterr().out.splitlines()
    warnings = [line for line in lines if line.startswith("warning: ")]
    if numbers is None:
        assert warnings == []
        return
    (warning,) = warnings
    assert f"differ from the trainer's {numbers} vLLM computes this model differently" in warning
    assert lines[1] == warning, "it follows the line of the first step"


@pytest.mark.parametrize(
    "pairs, is_comparable",
    [
        (["rollout.min_p=0.1"], False),
        (["rollout.top_p=0.9"], False),
        (["rollout.min_p=0.1", "rollout.top_k=8"], True),
        (["rollout.top_p=0.9", "rollout.min_p=0.1", "rollout.top_k=8"], True),
        (["rollout.top_k=8", "rollout.quantization=fp8"], False),
    ],
)
def test_gaps_are_reported_where_vllm_and_the_trainer_have_the_same_tokens(
    tmp_path, capsys, pairs, is_comparable
):
    start_tracker(tmp_path, *pairs).log(1, {"rollout_corr/log_prob_gap": 5.0})
    assert ("by 5 nats on average" in capsys.readouterr().out) == is_comparable


def test_the_cost_of_old_tokens_is_reported_once_with_the_settings_that_lower_it(tmp_path, capsys):
    tracker = start_tracker(tmp_path)
    for step, (share, size) in enumerate([(1.0, 0.2), (0.5, 0.5), (0.5, 0.43), (0.5, 0.3)], 1):
        metrics = {"partial/age_0/tokens": share, "rollout_corr/effective_sample_size": size}
        tracker.log(step, metrics)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1", "2", "3", "because", "4"]
    assert lines[3] == (
        "warning: because some tokens were generated with older weights, the effective sample size "
        "is only 43% (rollout_corr/effective_sample_size): lower optim.lr, "
        "rollout.partial.max_staleness or rollout.partial.oversample"
    )


def test_the_warning_about_pass_at_k_has_the_range_of_the_scores(tmp_path, capsys):
    tracker = start_tracker(tmp_path)
    tracker.report_passing_scores([0.25, 0.75, -0.5], 1.0)
    assert capsys.readouterr().out == (
        "warning: pass@k counts a score of 1.0 or more as right, and all scores of this validation "
        "are from -0.5 to 0.75: if other scores are right, scale the reward\n"
    )


@pytest.mark.parametrize("low, is_reported", [(0.5, True), (0.25, False)])
def test_a_score_at_the_threshold_of_pass_at_k_passes(tmp_path, capsys, low, is_reported):
    tracker = start_tracker(tmp_path)
    tracker.report_passing_scores([low, 0.75], 0.5)
    assert bool(capsys.readouterr().out) == is_reported


def test_failures_are_counted_and_found_in_a_file_of_the_run(tmp_path, capsys):
    samples = make_samples([{}], [0, 0, 0], [""])
    samples.failures = [
        Failure("raised", "ValueError: the first", {}, "Q"),
        Failure("raised", "ValueError: the second", {}, "Q"),
    ]
    samples.num_drawn = 5
    start_tracker(tmp_path).report_failures(7, samples)
    (line,) = capsys.readouterr().out.splitlines()
    start = "warning: 2 of 5 responses of step 7 could not be graded and are left out; the first: "
    assert line.startswith(start)
    assert "the first" in line.removeprefix(start)
    assert "the second" not in line
    assert line.endswith(f"(all are in {tmp_path}/failures.jsonl)")


@pytest.mark.parametrize(
    "frequency, advice",
    [
        (3, "look at {out}/rollouts/step_3.jsonl"),
        (5, "look at {out}/rollouts/step_5.jsonl"),
        (8, "set trainer.rollout_freq=1 to see the responses"),
        (-1, "set trainer.rollout_freq=1 to see the responses"),
    ],
)
def test_equal_rewards_are_beside_the_latest_responses_that_were_written(
    tmp_path, capsys, frequency, advice
):
    """Before step 8, a run that writes every eighth step has written none."""
    tracker = start_tracker(tmp_path, f"trainer.rollout_freq={frequency}")
    log_rewards(tracker, {step: (0.25, 0.25) for step in range(1, 8)})
    lines = capsys.readouterr().out.splitlines()
    warnings = {i: line for i, line in enumerate(lines) if line.startswith("warning: ")}
    assert warnings == {
        5: "warning: all rewards of the last 5 steps are 0.25: nothing is learned from them; "
        + advice.format(out=tmp_path)
    }


def test_steps_with_another_reward_or_several_begin_a_new_count(tmp_path, capsys):
    """Of steps 1 to 14, only the last five have one reward."""
    tracker = start_tracker(tmp_path)
    rewards = [(0, 0)] * 4 + [(0, 1)] + [(0, 0)] * 4 + [(1, 1)] * 5
    log_rewards(tracker, dict(enumerate(rewards, 1)))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 15
    assert lines[-1].startswith("warning: all rewards of the last 5 steps are 1: nothing")


def test_a_run_without_rewards_has_no_equal_rewards(tmp_path, capsys):
    tracker = start_tracker(tmp_path, script="sft.yaml")
    for step in range(1, 8):
        tracker.log(step, {"train/loss": 0.0})
    assert "warning" not in capsys.readouterr().out


def test_warnings_do_not_need_the_console(tmp_path, capsys):
    tracker = start_tracker(tmp_path, "trainer.logger=[]", "trainer.rollout_freq=-1")
    log_rewards(tracker, {step: (1.0, 1.0) for step in range(1, 6)})
    tracker.log_samples(5, [{"response": "a response"}])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: all rewards of the last 5 steps are 1:")


@pytest.mark.parametrize("settings, is_shown", [(["rollout.n=1"], False), (["rollout.n=2"], True)])
def test_a_single_response_is_never_informative(tmp_path, capsys, settings, is_shown):
    tracker = start_tracker(tmp_path, *settings)
    tracker.log(1, {"reward/informative_groups": 0.5, "score/mean": 1.0})
    expected = "score 1.000  informative 50%" if is_shown else "score 1.000"
    assert capsys.readouterr().out == f"step      1  {expected}\n"


def test_a_line_that_cannot_be_read_is_reported_with_both_files(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nbroken\n{"no step": 1}\n{"step": 2}\n')
    tracking.supersede(path, 1)
    assert capsys.readouterr().out == (
        f"{path}: moved lines that could not be read (2) to metrics.broken.jsonl\n"
    )
    assert path.read_text() == '{"step": 1}\n'
    assert [file.name for file in sorted(tmp_path.iterdir())] == [
        "metrics.broken.jsonl",
        "metrics.jsonl",
        "metrics.superseded.jsonl",
    ]


def test_lines_that_stay_are_not_written_again(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    before = path.stat()
    tracking.supersede(path, 1)
    assert path.stat().st_ino == before.st_ino
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert capsys.readouterr().out == ""


def test_metrics_after_the_last_line_are_added_to_it_alone(tmp_path, capsys):
    tracker = start_tracker(tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, {"score/mean": 0.5})
    capsys.readouterr()
    tracker.log_rest(2, {"timing/save": 3.0})
    tracker.log_rest(4, {})
    assert capsys.readouterr().out == ""
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "score/mean": 0.5},
        {"step": 2, "score/mean": 0.5, "timing/save": 3.0},
        {"step": 3, "score/mean": 0.5},
    ]


def test_a_new_run_writes_step_0_again_and_a_resumed_one_keeps_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    text = '{"step": 0, "val/loss": 2.0}\n{"step": 1}\n{"step": 2}\n'
    path.write_text(text)
    start_tracker(tmp_path, step=1)
    assert path.read_text() == '{"step": 0, "val/loss": 2.0}\n{"step": 1}\n'
    start_tracker(tmp_path, step=0)
    assert path.read_text() == ""
    moved = (tmp_path / "metrics.superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in moved] == [2, 0, 1]


def test_a_validation_of_an_earlier_step_hides_no_later_one_in_tensorboard(tmp_path):
    settings = ["trainer.logger=[tensorboard]"]
    tracker = start_tracker(tmp_path, *settings)
    for step in (1, 2, 3):
        tracker.log(step, {"score/mean": float(step)})
    tracker.close()
    validation = ["trainer.val_only=true", "data.val_files=v"]
    tracker = start_tracker(tmp_path, *settings, *validation, step=1)
    tracker.log(1, {"val/mine": 0.5})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("score/mean")] == [1, 2, 3]
    assert [event.step for event in events.Scalars("val/mine")] == [1]


def test_the_table_of_samples_has_the_columns_of_all_rows(tmp_path):
    """The console shows the first rows only, and here the last one alone has an answer."""
    tracker = start_tracker(tmp_path, "trainer.logger=[tensorboard]")
    examples = [{"response": f"r{i}"} for i in range(9)]
    tracker.log_samples(2, [*examples, {"response": "r9", "answer": "42"}])
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (table,) = events.Tensors("val/samples/text_summary")
    lines = table.tensor_proto.string_val[0].decode().splitlines()
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == ["response", "answer"]
    assert "42" in lines[-1]
