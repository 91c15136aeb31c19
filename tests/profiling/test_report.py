"""The table and the picture of a run."""

import json

import pytest

from profiling import report
from tests.profiling.support import MODEL_STAGES
from tests.support.launch import metrics


def test_the_report_of_a_run_that_has_just_begun(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "val/loss": 2.5, "timing/validate": 3.0}\n{"step": 1, "train/lo'
    )
    assert "validate" in report.table(tmp_path)
    assert report.write_report(tmp_path).exists()


def test_a_stage_of_some_steps_has_the_median_of_these(tmp_path):
    lines = [{"step": step, "timing/step": 2.0, "timing/reward": 1.0} for step in range(1, 8)]
    lines[2] |= {"timing/save": 3.0}
    lines[5] |= {"timing/save": 4.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = {line.split()[0]: line.split()[1:] for line in report.table(tmp_path).splitlines()}
    assert rows["save"] == ["3.5000", "4.0000", "7.00", "50.0%", "2"]
    assert rows["reward"] == ["1.0000", "1.0000", "7.00", "50.0%", "7"]


def test_stages_are_in_the_order_in_which_they_ran():
    """A stage that later steps add comes last."""
    first = {"step": 1, "timing/wake": 1.0, "score/mean": 0.5, "timing/actor_update": 2.0}
    second = {"step": 2, "timing/save": 3.0, "timing/wake": 1.0}
    expected = ["timing/wake", "timing/actor_update", "timing/save"]
    assert report.stages_in([first, second]) == expected


@pytest.mark.parametrize("num_rows", [1, 3])
def test_panels_have_gaps_and_margins_in_inches(num_rows):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4 * num_rows))
    grid = report.add_grid(figure, num_rows)
    bottoms, tops, lefts, rights = grid.get_grid_positions(figure)
    assert len(lefts) == report.NUM_COLUMNS
    assert 12 * lefts[0] == pytest.approx(report.LEFT_MARGIN)
    assert 12 * (1 - rights[-1]) == pytest.approx(report.RIGHT_MARGIN)
    assert 12 * (lefts[1:] - rights[:-1]) == pytest.approx(report.COLUMN_GAP)
    assert 4 * num_rows * (1 - tops[0]) == pytest.approx(report.TOP_MARGIN)
    assert 4 * num_rows * bottoms[-1] == pytest.approx(report.BOTTOM_MARGIN)
    assert 4 * num_rows * (bottoms[:-1] - tops[1:]) == pytest.approx(report.ROW_GAP)


def test_the_picture_keeps_metrics_that_are_0_and_has_bars_for_stages_of_some_steps(tmp_path):
    from matplotlib import pyplot

    constant = {
        "score/mean": 0.0,
        "response_length/clip_ratio": 0.0,
        "perf/mfu": None,
        "val/failures": 0,
    }
    lines = [
        {"step": step, "timing/step": 3.0, "timing/actor_update": 1.0, "timing/reward": 2.0}
        | constant
        for step in range(1, 21)
    ]
    for line in lines[4::5]:
        line |= {"timing/validate": 6.0, "val/exact_match": 0.0, "val/mine": 0.0}
    lines += [
        {"step": 0, "timing/validate": 7.0, "val/mine": 0.0},
        {"step": 20, "timing/save": 4.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figure = report.draw(tmp_path)
    panels = {axis.get_title(): axis for axis in figure.axes}
    assert {*panels} == {
        "exact match",
        "score per response",
        "validation score",
        "cut off at max_tokens",
        "time by stage [s]",
        "",
    }
    assert list(panels["score per response"].lines[0].get_ydata()) == [0.0] * 20
    assert panels["validation score"].lines[0].get_xdata().tolist() == [5, 10, 15, 20, 0]
    axis = panels["time by stage [s]"]
    bars = {}
    for container in axis.containers:
        bars[container.get_label()] = [
            (bar.get_center()[0], bar.get_y(), bar.get_height()) for bar in container
        ]
    assert bars == {
        "validate 6": [(5, 3, 6), (10, 3, 6), (15, 3, 6), (20, 3, 6), (0, 0, 7)],
        "save 4": [(20, 9, 4)],
    }
    assert [area.get_label() for area in axis.collections] == ["actor_update 1", "reward 2"]
    assert {text.get_text() for text in panels[""].get_legend().texts} == {
        *bars,
        "actor_update 1",
        "reward 2",
    }
    assert [area.get_datalim(axis.transData).ymax for area in axis.collections] == [1, 3]
    pyplot.close(figure)


def write_metrics(run, lines: list[dict]) -> None:
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_table_begins_with_the_longest_stage_and_ends_with_speed_and_memory(tmp_path):
    """Validations before the first step count, but step 0 has no speed."""
    lines = [
        {"step": 0, "timing/validate": 4.5, "perf/memory_peak_gib": 99.0},
        {"step": 1, "timing/reward": 0.5, "timing/step": 2.0, "perf/mfu": 0.25},
        {"step": 2, "timing/reward": 0.75, "timing/step": 3.0, "perf/mfu": 0.375},
        {"step": 3, "timing/reward": 0.25, "timing/step": 5.0, "perf/mfu": 0.3125},
    ]
    for line in lines[1:]:
        line["perf/tokens_per_second"] = 1000.0 * line["step"]
        line["perf/memory_training_gib"] = None
    write_metrics(tmp_path, lines)
    assert report.table(tmp_path).splitlines() == [
        "stage                       median [s] longest [s]   total [s]   share  steps",
        "step                            3.0000      5.0000       10.00  100.0%      3",
        "validate                        4.5000      4.5000        4.50   45.0%      1",
        "reward                          0.5000      0.7500        1.50   15.0%      3",
        "tokens/s per device               2000        3000",
        "MFU                             0.3125       0.375",
    ]


def test_each_metric_of_memory_has_a_name_of_its_own_in_the_table(tmp_path):
    memory = {"peak": 7.5, "training": 5.25, "asleep": 1.5}
    line = {f"perf/memory_{name}_gib": value for name, value in memory.items()}
    write_metrics(tmp_path, [{"step": 1, "timing/step": 1.0} | line])
    rows = report.table(tmp_path).splitlines()[2:]
    assert [(row[:26].rstrip(), float(row.split()[-1])) for row in rows] == [
        ("GiB, peak", 7.5),
        ("GiB in use, training", 5.25),
        ("GiB in use, vLLM asleep", 1.5),
    ]


def test_without_a_step_shares_are_unknown(tmp_path):
    write_metrics(tmp_path, [{"step": 0, "timing/validate": 3.0}])
    (_, row) = report.table(tmp_path).splitlines()
    assert row.split() == ["validate", "3.0000", "3.0000", "3.00", "nan%", "1"]


def test_panels_show_only_metrics_that_have_a_value_in_a_fixed_order():
    """Of the metrics of a validation, those that the reward function named are its scores."""
    lines = [
        {"step": 1, "actor/lr": 1.0, "train/loss": 2.0, "critic/lr": None, "score/mean": 0.0},
        {"step": 2, "val/mine/b": 1.0, "val/mine/a": 0.5, "val/rewards/margins": 0.1},
        {"step": 2, "val/loss": 2.0, "val/response_length": 5.0, "val/truncated": 0.0},
        {"step": 2, "val/failures": 1, "val/exact_match": None},
        {"step": 3} | {f"val/mine/{letter}": 0.0 for letter in "fdec"},
    ]
    assert [(panel.title, panel.names) for panel in report.panels_with_data(lines)] == [
        ("loss", ["train/loss", "val/loss"]),
        ("margin of rewards", ["val/rewards/margins"]),
        ("score per response", ["score/mean"]),
        ("validation score", [f"val/mine/{letter}" for letter in "abcdef"]),
        ("response length [tokens]", ["val/response_length"]),
        ("cut off at max_tokens", ["val/truncated"]),
        ("learning rate", ["actor/lr"]),
    ]


def test_only_stages_of_more_than_a_hundredth_of_the_time_are_drawn():
    """Those within steps come before those that only the first line has."""
    times = {"timing/data": 0.5, "timing/reward": 0.51, "timing/step": 50.0}
    lines = [{"step": 0, "timing/validate": 2.0}, {"step": 1} | times, {"step": 2} | times]
    assert report.visible_stages(lines) == ["timing/reward", "timing/validate"]


def test_the_picture_names_its_run_and_its_axes(tmp_path):
    from matplotlib import pyplot

    write_metrics(tmp_path / "first", [{"step": 1, "train/lr": 1.0, "timing/step": 1.0}])
    figure = report.draw(tmp_path / "first")
    assert figure.get_suptitle() == str(tmp_path / "first")
    panels = {axis.get_title(): axis for axis in figure.axes}
    assert panels["learning rate"].get_xlabel() == "step"
    assert panels["time by stage [s]"].get_xlabel() == "step"
    pyplot.close(figure)


def test_a_panel_of_several_metrics_has_a_legend_and_long_lines_have_no_markers():
    from matplotlib.figure import Figure

    first, second = Figure().subplots(1, 2)
    lines = [{"step": step, "a": 1.0, "b": 2.0 if step > 1 else None} for step in range(1, 31)]
    report.draw_metrics(first, lines, ["a", "b"])
    report.draw_metrics(second, lines, ["b"])
    assert [text.get_text() for text in first.get_legend().texts] == ["a", "b"]
    assert second.get_legend() is None
    assert [line.get_marker() for line in first.lines] == ["None", "o"]
    assert list(second.lines[0].get_xdata()) == [*range(2, 31)]


def test_the_command_prints_the_table_and_writes_it_beside_the_picture(tmp_path, capsys):
    write_metrics(tmp_path, [{"step": 1, "timing/step": 1.0}])
    report.main([str(tmp_path)])
    table = report.table(tmp_path)
    assert capsys.readouterr().out == f"{table}\n{tmp_path}/report.png\n"
    assert (tmp_path / "report.txt").read_text() == table + "\n"
    assert (tmp_path / "report.png").stat().st_size > 0


def test_a_directory_without_metrics_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        report.main([str(tmp_path)])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path} has no metrics.jsonl: give the output_dir of a run that has finished a "
        "step\n"
    )


@pytest.mark.slow
def test_the_report_has_every_stage(ppo_run):
    text = (ppo_run / "report.txt").read_text()
    assert text == report.table(ppo_run) + "\n"
    assert (ppo_run / "report.png").stat().st_size > 10_000
    rows = {line.split()[0]: line.split() for line in text.splitlines()}
    assert {
        "rollout_generate",
        "reward",
        "advantages",
        "update_weights",
        "tokens/s",
        *MODEL_STAGES,
    } <= set(rows)
    steps = [m for m in metrics(ppo_run) if "timing/step" in m]
    assert float(rows["actor_update"][3]) == pytest.approx(
        sum(m["timing/actor_update"] for m in steps), abs=0.01
    )
    assert rows["step"][4:] == ["100.0%", "2"]
