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
