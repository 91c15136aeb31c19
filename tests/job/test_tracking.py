"""What a run shows of itself while it goes on: console, tensorboard, wandb."""

import json
import math
import os
import re
import sys
from dataclasses import replace
from html import unescape

import pytest
import torch
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from config import InputError, load
from data.batching.batch import Batch
from data.prompts import Prompt
from job import tables, tracking
from rollout.grading.grader import Failure
from rollout.records import MAX_WRITTEN, cut, examples, write_samples
from rollout.samples import Samples

ROWS = [
    {"question": "What is 7+8?", "response": "15", "answer": "15", "score": 1.0},
    {
        "question": "多位数乘法 " * 30,
        "response": "a|b\n<think> *x* " + 200 * "y" + " the end",
        "score": -0.25,
    },
    {"question": "?", "response": "\ud800\x1b[31m", "answer": "a long answer " * 20, "score": 0.0},
]


def configure(out, *more):
    return load("ppo.yaml", ["model.path=x", "data.train_files=x", f"output_dir={out}", *more])


def track(out, rewards, *more):
    """A run whose steps have these rewards, with samples of its last step."""
    out.mkdir(exist_ok=True)
    tracker = tracking.Tracker(configure(out, *more), 0, 0, len(rewards))
    for step, values in enumerate(rewards, 1):
        if step == len(rewards):
            tracker.log_samples(step, ROWS)
        tracker.log(
            step,
            {
                "score/mean": sum(values) / len(values),
                "critic/rewards/min": min(values),
                "critic/rewards/max": max(values),
                "reward/informative_groups": 0.625,
                "timing/step": 2.0,
            },
        )
    tracker.close()


def test_the_console_names_steps_whose_rewards_are_all_equal(tmp_path, capsys):
    track(
        tmp_path,
        [[0, 1], *[[0, 0]] * 7, [0, 1], *[[1, 1]] * 4, *[[0, 0]] * 5],
        "trainer.rollout_freq=4",
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step      1  score 0.500  informative 62%  2.00 s"
    named = {
        int(lines[i - 1].split()[1]): line
        for i, line in enumerate(lines)
        if line.startswith("warning: ")
    }
    assert [*named] == [6, 18], (
        "once for seven steps; four with 1 and one with 0 are not five of one kind"
    )
    assert named[6] == (
        "warning: all rewards of the last 5 steps are 0: nothing is learned from them; look at "
        f"{tmp_path}/rollouts/step_4.jsonl"
    )
    track(tmp_path / "unwritten", [[1, 1]] * 5, "trainer.rollout_freq=-1")
    assert (
        "steps are 1: nothing is learned from them; set trainer.rollout_freq=1 to see the responses"
        in capsys.readouterr().out
    )
    track(tmp_path / "single", [[0, 1]], "rollout.n=1")
    assert "score 0.500  2.00 s" in capsys.readouterr().out, (
        "one response has no other to differ from"
    )


@pytest.mark.parametrize(
    "settings, gaps, named",
    [
        ("engine.compute_dtype=float32", [1e-6, 0.016, 0.016], True),
        ("engine.compute_dtype=float32", [5e-4], False),
        ("engine.compute_dtype=bfloat16", [0.045], False),
        ("engine.compute_dtype=bfloat16 rollout.top_p=0.9", [0.3], False),
        ("engine.compute_dtype=bfloat16 rollout.quantization=fp8", [0.3], False),
        ("engine.compute_dtype=bfloat16 rollout.kv_cache_dtype=fp8", [0.3], False),
        ("engine.compute_dtype=bfloat16 engine.float8=tensorwise", [0.3], False),
        ("engine.compute_dtype=bfloat16 rollout.top_p=0.9 rollout.top_k=8", [0.3, 0.4], True),
    ],
)
def test_a_vllm_that_computes_something_else_is_named_once(tmp_path, capsys, settings, gaps, named):
    tracker = tracking.Tracker(configure(tmp_path, *settings.split()), 0, 0, len(gaps))
    for step, gap in enumerate(gaps, 1):
        tracker.log(step, {"rollout_corr/log_prob_gap": gap})
    tracker.close()
    assert capsys.readouterr().out.count("warning: vLLM's log-probabilities differ") == named


@pytest.mark.parametrize(
    "age_0_shares, sample_sizes, is_named",
    [([0.7, 0.7, 0.7], [0.9, 0.4, 0.3], True), ([0.7], [0.6], False), ([1.0], [0.3], False)],
)
def test_a_correction_that_costs_half_of_the_samples_is_named_once(
    tmp_path, capsys, age_0_shares, sample_sizes, is_named
):
    tracker = tracking.Tracker(configure(tmp_path), 0, 0, len(sample_sizes))
    for step, (share, size) in enumerate(zip(age_0_shares, sample_sizes), 1):
        metrics = {
            "partial/age_0/tokens": share,
            "rollout_corr/effective_sample_size": size,
        }
        tracker.log(step, metrics)
    tracker.close()
    assert capsys.readouterr().out.count("warning: because some tokens were generated") == is_named


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_named(tmp_path):
    """The files of tensorboard, whose thread writes them late, and the picture."""
    (tmp_path / "report.png").symlink_to("/dev/full")
    tracker = tracking.Tracker(configure(tmp_path, "trainer.logger=[]"), 0, 0, 1)
    tracker.log(1, {"val/loss": 1.0})
    with pytest.raises(InputError, match=rf"the disk is full: {tmp_path}/report.png needs"):
        tracker.close()
    (tmp_path / "report.png").unlink()
    tracker = tracking.Tracker(configure(tmp_path, "trainer.logger=[tensorboard]"), 0, 1, 2)
    (events,) = (tmp_path / "tensorboard").iterdir()
    (tmp_path / "link").symlink_to("/dev/full")
    (tmp_path / "link").replace(events)
    with pytest.raises(InputError, match=rf"the disk is full: {tmp_path}/tensorboard needs"):
        tracker.log(2, {"val/loss": 1.0})
        tracker.close()


def test_the_lines_of_every_attempt_are_kept(tmp_path):
    """Two runs are killed after step 2, and both times it continues from step 1."""
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "train/loss": 1.0 / step}) + "\n" for step in (1, 2)]
    second = json.dumps({"step": 2, "train/loss": 0.4}) + "\n"
    path.write_text("".join(lines))
    tracking.supersede(path, 1)
    with path.open("a") as file:
        file.write("broken\n" + second)
    tracking.supersede(path, 1)
    with path.open("a") as file:
        file.write("also broken\n")
    tracking.supersede(path, 1)
    assert path.read_text() == lines[0]
    assert (tmp_path / "metrics.superseded.jsonl").read_text() == lines[1] + second
    assert (tmp_path / "metrics.broken.jsonl").read_text() == "broken\nalso broken\n"


def test_a_killed_run_repeats_its_last_steps_and_keeps_their_old_lines(tmp_path, capsys):
    """It was killed after step 3, while a line was written, and continues from step 1."""
    track(tmp_path, [[0, 1]] * 3)
    path = tmp_path / "metrics.jsonl"
    before = path.read_text().splitlines(keepends=True)
    with path.open("a") as file:
        file.write('null\n{"step": 4')
    tracker = tracking.Tracker(configure(tmp_path), 0, 1, 4)
    assert tracker.bar.n == 1
    tracker.log(2, {"train/loss": 1.0})
    tracker.log(2, {"train/late": 2.0})
    tracker.close()
    repeated = json.dumps({"step": 2, "train/loss": 1.0, "train/late": 2.0}) + "\n"
    assert path.read_text() == before[0] + repeated
    superseded = tmp_path / "metrics.superseded.jsonl"
    assert superseded.read_text() == "".join(before[1:]) + '{"step": 4'
    assert (tmp_path / "metrics.broken.jsonl").read_text() == "null\n"
    assert (
        "moved lines that could not be read (1) to metrics.broken.jsonl" in capsys.readouterr().out
    )


@pytest.mark.parametrize("loggers, steps", [("[console]", [2, 3, 4]), ("[tensorboard]", [])])
def test_the_console_shows_every_few_steps_and_every_validation(tmp_path, capsys, loggers, steps):
    settings = [f"trainer.logger={loggers}", "trainer.log_freq=2"]
    tracker = tracking.Tracker(configure(tmp_path, *settings), 0, 0, 4)
    for step in range(1, 5):
        validation = {"val/f": 0.25, "val/loss": 0.5} if step == 3 else {}
        tracker.log(step, {"score/mean": step / 4} | validation)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [int(line.split()[1]) for line in lines] == steps
    for line in lines:
        assert (
            line.count("val/f 0.250") == line.count("val loss 0.5000") == (line.split()[1] == "3")
        )
    assert tracker.bar.n == 4


def test_a_wandb_run_continues_under_its_id(tmp_path):
    first = tracking.run_id(tmp_path)
    assert re.fullmatch("[0-9a-f]{16}", first)
    assert tracking.run_id(tmp_path) == first


def test_wandb_hears_of_the_run_without_its_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "a secret of mine")
    begun = []
    ended = []
    monkeypatch.setattr("wandb.init", lambda **options: begun.append(options))
    monkeypatch.setattr("wandb.log", lambda values, **step: ended.append(([*values], step)))
    monkeypatch.setattr("wandb.finish", lambda: ended.append("finish"))
    settings = ["trainer.logger=[wandb]", "trainer.project_name=mine"]
    settings.append("trainer.experiment_name=first")
    config = configure(tmp_path, *settings, "data.prompt_key=${oc.env:MY_API_KEY}")
    tracker = tracking.Tracker(config, 0, 0, 1)
    (options,) = begun
    assert options["id"] == tracking.run_id(tmp_path)
    assert options["resume"] == "allow"
    assert (options["project"], options["name"]) == ("mine", "first")
    assert options["config"]["output_dir"] == str(tmp_path)
    assert "a secret of mine" not in str(options["config"])
    tracker.log(4, {"train/loss": 1.0})
    tracker.log_samples(5, ROWS)
    tracker.close()
    logged = [(["train/loss"], {"step": 4}), (["val/samples"], {"step": 5}), (["report"], {})]
    assert ended == [*logged, "finish"]


def test_equal_rewards_are_named_once_until_they_differ(tmp_path, capsys):
    equal = [[1.0, 1.0]] * tracking.CONSTANT_STEPS
    track(tmp_path, [*equal, [0.0, 1.0], *equal[1:], [0.0, 1.0]])
    assert capsys.readouterr().out.count("warning: all rewards of the last 5 steps") == 1


def test_a_wandb_id_on_a_full_disk_is_one_line_and_leaves_no_empty_id(tmp_path):
    (tmp_path / "wandb_id.tmp").symlink_to("/dev/full")
    with pytest.raises(InputError, match=rf"the disk is full: {tmp_path}/wandb_id needs 16 bytes"):
        tracking.run_id(tmp_path)
    assert not (tmp_path / "wandb_id").exists()


def test_a_run_that_begins_anew_has_each_step_once(tmp_path):
    """As after a kill before the first checkpoint."""
    for loss in (2.0, 1.0):
        tracker = tracking.Tracker(configure(tmp_path, "trainer.logger=[tensorboard]"), 0, 0, 1)
        for step in (0, 1):
            tracker.log(step, {"val/loss": loss})
        tracker.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 0, "val/loss": 1.0}, {"step": 1, "val/loss": 1.0}]
    superseded = (tmp_path / "metrics.superseded.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in superseded]
    assert lines == [{"step": 0, "val/loss": 2.0}, {"step": 1, "val/loss": 2.0}]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("val/loss")
    assert [(event.step, event.value) for event in events] == [(0, 1.0), (1, 1.0)]


def test_a_resumed_run_keeps_the_steps_before_it_in_tensorboard(tmp_path):
    """It was killed after step 3, and continues from step 2."""
    config = configure(tmp_path, "trainer.logger=[tensorboard]")
    for step, losses in ((0, {1: 1.0, 2: 2.0, 3: 3.0}), (2, {3: 30.0, 4: 40.0})):
        tracker = tracking.Tracker(config, 0, step, 4)
        for number, loss in losses.items():
            tracker.log(number, {"val/loss": loss})
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("val/loss")
    assert [(e.step, e.value) for e in events] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


def test_samples_that_lack_a_column_have_an_empty_cell(tmp_path):
    tracker = tracking.Tracker(configure(tmp_path, "trainer.logger=[tensorboard]"), 0, 0, 1)
    tracker.log_samples(1, [{"prompt": "p", "score": 2}, {"response": "r", "prompt": "q"}])
    tracker.log(1, {"val/loss": 1.0})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (event,) = events.Tensors("val/samples/text_summary")
    assert event.step == 1
    (text,) = event.tensor_proto.string_val
    assert text.decode().splitlines() == [
        "| prompt | score | response |",
        "| --- | --- | --- |",
        "| p | 2 |  |",
        "| q |  | r |",
    ]


def test_special_characters_are_escaped_in_a_table_of_markdown():
    rows = [["a|b", 0.5, "1\n2"], ["*c*", None, "中"]]
    assert tables.markdown_table(["text", "score", "answer"], rows).splitlines() == [
        "| text | score | answer |",
        "| --- | --- | --- |",
        "| a&#124;b | 0&#46;5 | 1<br>2 |",
        "| &#42;c&#42; | None | 中 |",
    ]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_table_of_samples_fits_the_terminal(width):
    header, *lines = tables.table(ROWS, width).splitlines()
    starts = [header.index(name) for name in ("question", "response", "answer", "score")]
    assert header.split() == ["question", "response", "answer", "score"] and len(lines) == 3
    for line, row in zip(lines, ROWS, strict=True):
        assert line.isprintable() and len(line) < tables.terminal_width(line) + 1 <= width + 1
        # Of a line in which each character is on one column.
        cells = re.sub("[一-鿿]", "__", line)
        assert (
            all(cells[start - 1] == " " for start in starts)
            and cells[starts[3] :] == f"{row['score']:.2f}"
        )
    assert lines[0].split() == ["What", "is", "7+8?", "15", "15", "1.00"]
    assert "a|b\\n<" in lines[1] and "the end" in lines[1] and "…" in lines[1], (
        "the middle is left out"
    )
    assert r"\ud800\x1b[31m" in lines[2] or width == 60


@pytest.mark.slow
def test_a_character_that_the_terminal_cannot_show_does_not_end_the_run(tmp_path, monkeypatch):
    with open(tmp_path / "out", "w", encoding="ascii") as file:
        monkeypatch.setattr(sys, "stdout", file)
        track(tmp_path, [[0, 1]])
    assert "????? " in (tmp_path / "out").read_text()


def test_tensorboard_has_metrics_samples_and_the_picture(tmp_path):
    track(tmp_path, [[0, 1]] * 3, "trainer.logger=[tensorboard]")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.value for e in events.Scalars("score/mean")] == [0.5] * 3
    (event,) = events.Tensors("val/samples/text_summary")
    header, _, *lines = event.tensor_proto.string_val[0].decode().splitlines()
    assert event.step == 3 and header == "| question | response | answer | score |"
    assert all(line.count("|") == 5 for line in lines) and unescape(lines[1]).count("|") == 6
    assert "<br>" in lines[1] and "<think> *x*" in unescape(lines[1]) and "<think>" not in lines[1]
    (image,) = events.Images("report")
    height, width, _ = imread(tmp_path / "report.png").shape
    assert (image.step, image.height, image.width) == (3, height, width)


def test_metrics_have_one_object_per_step(tmp_path):
    track(tmp_path, [[0, 1], [1, 1]])
    tracker = tracking.Tracker(configure(tmp_path), 0, 2, 2)
    tracker.log_rest(2, {"timing/save": 3.0})
    tracker.log_rest(3, {"timing/save": 4.0})
    tracker.close()
    first, second, third = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["step"] == 1
    assert second["step"] == 2
    assert second["score/mean"] == 1.0
    assert second["timing/save"] == 3.0
    assert third == {"step": 3, "timing/save": 4.0}


def test_numbers_that_are_not_finite_are_null(tmp_path):
    tracker = tracking.Tracker(configure(tmp_path), 0, 0, 1)
    tracker.log(1, {"a": math.nan, "b": math.inf, "c": 0.0})
    tracker.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert line == '{"step": 1, "a": null, "b": null, "c": 0.0}'


@pytest.mark.parametrize("rank, num_rows", [(0, 4), (1, 0)])
def test_one_rank_shows_the_first_four_samples(tmp_path, capsys, rank, num_rows):
    settings = ["trainer.logger=[console]", "trainer.report=false"]
    tracker = tracking.Tracker(configure(tmp_path, *settings), rank, 0, 1)
    tracker.log_samples(1, [])
    tracker.log_samples(1, [{"response": f"answer {number}"} for number in range(6)])
    tracker.close()
    output = capsys.readouterr().out
    assert [number for number in range(6) if f"answer {number}" in output] == [*range(num_rows)]
    assert not (tmp_path / "report.png").exists()


def test_a_validation_of_an_earlier_step_moves_no_line(tmp_path):
    track(tmp_path, [[0, 1], [1, 1]])
    settings = ["trainer.val_only=true", "data.val_files=x"]
    tracker = tracking.Tracker(configure(tmp_path, *settings), 0, 1, 2)
    tracker.log(1, {"val/exact_match": 0.5})
    tracker.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert [line.get("val/exact_match") for line in lines] == [0.5, None]
    assert [line["score/mean"] for line in lines] == [0.5, 1.0]


def test_the_console_names_the_first_failure_of_a_step(tmp_path, capsys):
    samples = make_samples([{}], [0, 0], [""])
    failure = Failure("raised", "Traceback\nValueError: no Q, please", {}, "Q")
    tracker = tracking.Tracker(configure(tmp_path), 0, 0, 1)
    tracker.report_failures(1, samples)
    tracker.report_failures(2, replace(samples, failures=[failure], num_drawn=3))
    tracker.log(2, {"timing/step": 1.0})
    tracker.close()
    warning = capsys.readouterr().out.splitlines()[0]
    assert "1 of 3 responses of step 2 could not be graded" in warning
    assert "raised: " in warning
    assert "ValueError: no Q, please" in warning


@pytest.mark.parametrize(
    "scores, is_reported",
    [
        ([0, 0.5], True),
        ([-1, 0], True),
        ([1, 2], True),
        ([0, 1], False),
        ([0, 0], False),
        ([1, 1], False),
        ([], False),
    ],
)
def test_scores_on_one_side_of_the_threshold_of_pass_at_k_are_reported_once(
    tmp_path, capsys, scores, is_reported
):
    tracker = tracking.Tracker(configure(tmp_path, "trainer.report=false"), 0, 0, 1)
    for _ in range(2):
        tracker.report_passing_scores(scores, 1)
    tracker.close()
    assert capsys.readouterr().out.count("pass@k counts a score of 1 or more") == is_reported


@pytest.mark.slow
def test_wandb_has_metrics_samples_and_the_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    track(tmp_path, [[0, 1]] * 3, "trainer.logger=[wandb]")
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert "reward/informative_groups 0.625\n" in capsys.readouterr().err, "wandb's own summary"
    (table,) = (run / "files" / "media" / "table" / "val").glob("samples_*.json")
    table = json.loads(table.read_text())
    assert (
        table["columns"] == ["question", "response", "answer", "score"] and len(table["data"]) == 3
    )
    assert table["data"][0] == [*ROWS[0].values()]
    (picture,) = (run / "files" / "media" / "images").glob("report_3_*.png")
    assert picture.read_bytes() == (tmp_path / "report.png").read_bytes()


def test_a_logger_that_is_not_installed_is_a_mistake(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not
    with pytest.raises(InputError, match="wandb, which is not installed"):
        tracking.check_loggers(configure(tmp_path, "trainer.logger=[wandb]"))


@pytest.fixture
def wandb_without_login(tmp_path, monkeypatch):
    """Make wandb read its settings anew, on a machine on which nobody has logged in."""
    import wandb

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb_config"))
    wandb.teardown()
    yield wandb
    wandb.teardown()


def test_wandb_without_a_login_is_a_mistake(tmp_path, monkeypatch, wandb_without_login):
    config = configure(tmp_path, "trainer.logger=[wandb]")
    with pytest.raises(InputError, match="wandb, which has no API key: run `wandb login`"):
        tracking.check_loggers(config)
    monkeypatch.setenv("WANDB_API_KEY", "short")
    with pytest.raises(InputError, match="names wandb, and .* invalid: .* WANDB_MODE=offline"):
        tracking.check_loggers(config)


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_wandb_needs_no_login_offline(tmp_path, monkeypatch, wandb_without_login, mode):
    monkeypatch.setenv("WANDB_MODE", mode)
    wandb_without_login.teardown()
    tracking.check_loggers(configure(tmp_path, "trainer.logger=[wandb]"))


# -- samples ---------------------------------------------------------------------------------------


def make_samples(rows, groups, questions):
    n = len(groups)
    one = torch.ones(n, dtype=torch.int64)
    return Samples(
        Batch(torch.zeros(n), torch.arange(n + 1), {"loss_mask": torch.ones(n)}),
        [f"response {i}" for i in range(n)],
        [Prompt([1], f"prompt {g}", rows[g], questions[g]) for g in groups],
        owner=0 * one,
        rank=0,
        lengths=one,
        response_lengths=one,
        group=torch.tensor(groups),
        scores=torch.arange(n) / 2,
        truncated=one == 0,
        failures=[],
        num_drawn=n,
    )


@pytest.mark.parametrize("length", [MAX_WRITTEN - 1, MAX_WRITTEN, MAX_WRITTEN + 1])
def test_the_middle_of_a_long_text_is_cut(length):
    text = "".join(str(i % 10) for i in range(length))
    half = MAX_WRITTEN // 2
    expected = f"{text[:half]} ... {text[-half:]}" if length > MAX_WRITTEN else text
    assert cut(text) == expected


def test_examples_have_the_question_and_the_true_answer(tmp_path):
    rows = [{"answer": 7}, {"answer": None}, {"answer": "long " * 1000, "tests": ["1" * 5000]}]
    samples = make_samples(rows, [2, 2, 0, 1, 1, 0], ["What?", "", "Why?"])
    long, *others = examples(samples, 3)
    assert others == [
        {"question": "What?", "response": "response 2", "answer": "7", "score": 1.0},
        {"question": "prompt 1", "response": "response 3", "score": 1.5},
    ]
    assert len(long["answer"]) == MAX_WRITTEN + 5 and examples(samples, 1) == [long]
    write_samples(samples, tmp_path / "written" / "step_1.jsonl")
    written = [
        json.loads(line)["row"]
        for line in (tmp_path / "written" / "step_1.jsonl").read_text().splitlines()
    ]
    assert (
        written[2:] == [{"answer": 7}, {"answer": None}, {"answer": None}, {"answer": 7}]
        and written[0] == written[1]
    )
    assert written[0] == {"answer": long["answer"], "tests": f'["{"1" * 998} ... {"1" * 998}"]'}
