"""Comparing the losses and dumps of two runs."""

import csv
import json
import math
import os
import re
import shutil
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch

from profiling import compare
from profiling.dumps import DumpedTensor, largest_difference
from tests.profiling.support import PROBE, arguments
from tests.support.launch import run


def compared(runs, a, b, step, returncode, *arguments):
    """Return what `python -m profiling.compare` prints about one step of two runs."""
    return run(
        [
            sys.executable,
            "-m",
            "profiling.compare",
            str(runs / a),
            str(runs / b),
            "--step",
            str(step),
            *arguments,
        ],
        returncode=returncode,
    ).stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["{tmp}", "{tmp}/absent", "--step=1"],
            "absent: no such directory; give a run's output_dir",
        ),
        (["{tmp}", "{tmp}", "--step=1", "--tolerance=-1"], "-1 must be a number of at least 0"),
        (["{tmp}", "{tmp}", "--step=1", "--tolerance=nan"], "nan must be a number of at least 0"),
    ],
)
def test_arguments_without_a_meaning_are_errors(arguments, message, tmp_path, monkeypatch, capsys):
    paths = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    monkeypatch.setattr("sys.argv", ["compare", *paths])
    with pytest.raises(SystemExit) as caught:
        compare.main()
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_runs_without_dumps_are_answered_with_the_settings_of_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["compare", str(tmp_path), str(tmp_path), "--step=3"])
    assert compare.main() == compare.ExitCode.NOTHING_TO_COMPARE
    printed = capsys.readouterr().out
    assert "no stage of step 3 was dumped by both" in printed
    assert "profiler.tool=msprobe trainer.profile_interval=[3,3]" in printed


def write_dump(run, stage, value=1.0, rank=0, first_layer=0, modules=("norm",)):
    """Write what msprobe dumps of a stage in step 2 on a rank: here a number of each module."""
    statistics = dict.fromkeys(("Max", "Min", "Mean", "Norm"), value)
    number = {"shape": [1], "dtype": "float32", **statistics}
    folder = run / "profile" / "step_2" / stage / "step2" / f"rank{rank}"
    folder.mkdir(parents=True)
    data = {f"Module.0.{module}.forward.0": {"output": [number]} for module in modules}
    (folder / "dump.json").write_text(json.dumps({"data": data}))
    coordinates = {"of": "FSDPEngine", "first_layers": [first_layer]}
    (folder / "coordinates.json").write_text(json.dumps(coordinates))


@pytest.mark.parametrize("stage, code", [(None, 1), ("train_batch", 0)])
def test_a_stage_of_one_run_alone_is_a_divergence(tmp_path, capsys, stage, code):
    write_dump(tmp_path / "a", "train_batch")
    write_dump(tmp_path / "b", "train_batch")
    write_dump(tmp_path / "b", "validate")
    settings = compare.Settings()
    assert compare.compare_runs(tmp_path / "a", tmp_path / "b", 2, stage, settings) == code
    printed = capsys.readouterr().out
    assert "train_batch rank0: 1 tensors agree" in printed
    assert ("dumped in only one run, so not compared: validate" in printed) == bool(code)


@pytest.mark.parametrize("owner", ["a", "b"])
def test_modules_of_either_run_alone_are_a_divergence(tmp_path, capsys, owner):
    """As when a change adds a module: the modules that both runs have agree."""
    for run_name in ("a", "b"):
        modules = ("own", "norm", "second") if run_name == owner else ("norm",)
        write_dump(tmp_path / run_name, "train_batch", modules=modules)
    code = compare.compare_runs(tmp_path / "a", tmp_path / "b", 2, None, compare.Settings())
    assert code == compare.ExitCode.DIVERGE
    _, summary, first = capsys.readouterr().out.splitlines()
    assert summary.startswith("train_batch rank0: 1 tensors agree, 2 in only one run; ")
    assert first == "    the first in only one run: Module.0.own.forward.0.output.0"


def test_arguments_set_the_tolerance_the_stage_and_the_folder_of_tables(
    tmp_path, monkeypatch, capsys
):
    """A number of one stage differs by a twentieth; another stage exists in only one run."""
    write_dump(tmp_path / "a", "train_batch", 1.0)
    write_dump(tmp_path / "b", "train_batch", 0.95)
    write_dump(tmp_path / "b", "validate")
    command = ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--step=2"]
    one_stage = [*command, "--stage=train_batch"]
    tables = tmp_path / "tables"
    for argv, code in (
        (command, compare.ExitCode.DIVERGE),
        (one_stage, compare.ExitCode.DIVERGE),
        ([*one_stage, "--tolerance=0.04"], compare.ExitCode.DIVERGE),
        ([*one_stage, "--tolerance=0.06", f"--output={tables}"], compare.ExitCode.AGREE),
    ):
        monkeypatch.setattr("sys.argv", argv)
        assert compare.main() == code, argv
        printed = capsys.readouterr().out
        assert ("validate" in printed) == (argv is command)
        if code == compare.ExitCode.DIVERGE:
            assert re.search(r"A: .*max 1\.0 .*\n *B: .*max 0\.95 ", printed)
    assert [table.name for table in tables.iterdir()] == ["train_batch_rank0.csv"]
    with open(tables / "train_batch_rank0.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    name = "Module.0.norm.forward.0.output.0"
    assert row == {
        **{"A name": name, "A shape": "[1]"},
        **{f"A {statistic}": "1.0" for statistic in ("max", "min", "mean", "l2norm")},
        **{"B name": name, "B shape": "[1]"},
        **{f"B {statistic}": "0.95" for statistic in ("max", "min", "mean", "l2norm")},
        "relative difference": str(1 - 0.95),
    }


def test_the_rank_that_diverges_first_has_the_earliest_layers(tmp_path, capsys):
    """Ranks 1 and 2 differ, and rank 2 holds the layers before those of rank 1."""
    for rank, first_layer in enumerate([0, 8, 4]):
        write_dump(tmp_path / "a", "train_batch", 1.0, rank, first_layer)
        value = 1.0 if rank == 0 else 1.5
        write_dump(tmp_path / "b", "train_batch", value, rank, first_layer)
    code = compare.compare_runs(tmp_path / "a", tmp_path / "b", 2, None, compare.Settings())
    assert code == compare.ExitCode.DIVERGE
    lines = capsys.readouterr().out.splitlines()
    name = "Module.0.norm.forward.0.output.0"
    assert lines[1] == f"train_batch: diverges first on rank2, at {name}"
    assert lines[2].startswith("train_batch rank0: 1 tensors agree")
    for rank in (1, 2):
        expected = f"train_batch rank{rank}: diverges at {name}, relative difference 0.333; "
        assert any(line.startswith(expected) for line in lines)


def test_stages_are_in_the_order_of_their_last_dumps(tmp_path):
    times = {"a/step2/rank0": 1, "b/step2/rank0": 2, "a/step2/rank1": 3, "c/step3/rank0": 4}
    for name, seconds in times.items():
        dump = tmp_path / "profile" / "step_2" / name / "dump.json"
        dump.parent.mkdir(parents=True)
        dump.touch()
        os.utime(dump, (seconds, seconds))
    stages = compare.stages_of(tmp_path, 2)
    folder = tmp_path / "profile" / "step_2"
    assert list(stages.items()) == [("b", folder / "b" / "step2"), ("a", folder / "a" / "step2")]


# Outputs of qkv, q_norm, k_norm, o_proj, attention, gate and up, down_proj, mlp and layer, four
# times; of the embedding and of the last norm; and two of the head.
PER_MICRO_BATCH = 4 * 9 + 2 + 2


@pytest.mark.slow
def test_engines_agree(assets, tmp_path):
    """Level mix also dumps calls of functions, which agree within one engine.

    In two engines, calls of functions with the same name are not the same.
    """
    for name, engine in (("fsdp", "fsdp"), ("again", "fsdp"), ("megatron", "megatron")):
        run(
            [
                sys.executable,
                "train_sft.py",
                *arguments(
                    assets,
                    tmp_path / name,
                    PROBE,
                    "profiler.msprobe.level=mix",
                    "trainer.total_steps=1",
                    "trainer.profile_interval=[1,1]",
                    f"model_engine={engine}",
                ),
            ]
        )
    assert re.search(r"rank0: \d+ tensors agree; ", compared(tmp_path, "fsdp", "again", 1, 0))
    printed = compared(tmp_path, "fsdp", "megatron", 1, 0)
    num_agreeing = agreeing_tensors("train_batch", printed)
    assert num_agreeing > 0
    assert num_agreeing % PER_MICRO_BATCH == 0
    assert printed.startswith("metrics of step 1 agree\n    train/loss ")
    assert "    train/grad_norm " in printed


def agreeing_tensors(stage, printed):
    """Return how many tensors agree in a stage, when the layouts differ."""
    line = rf"\n{stage}: (\d+) tensors agree, only outputs of forward passes; largest"
    match = re.search(line, printed)
    assert match, printed
    return int(match[1])


@pytest.mark.slow
def test_the_planted_defect_is_found(sft, tmp_path):
    """The loss hardly shows it, because k_norm divides by the factor."""
    printed = compared(sft, "dumped", "defect", 2, 1, "--output", str(tmp_path))
    assert printed.startswith("metrics of step 2 agree\n    train/loss ")
    first = next(line for line in printed.splitlines() if line.startswith("train_batch"))
    module = "Module.0.hf.model.layers.2.self_attn.k_proj.Linear.forward.0."
    assert first.startswith(f"train_batch rank0: diverges at {module}")
    assert "relative difference 0.00" in first or "relative difference 0.01" in first
    table = (tmp_path / "train_batch_rank0.csv").read_text().splitlines()
    num_tensors = int(re.search(r"tensor \d+ of (\d+)", first)[1])
    assert len(table) == 1 + num_tensors
    assert "A name,A shape,A max" in table[0]
    assert "tensors agree" in compared(sft, "dumped", "defect", 2, 0, "--tolerance", "10")
    settings = compare.Settings(output=sft / "scratch")
    code = compare.compare_runs(sft / "dumped", sft / "defect", 3, None, settings)
    assert code == 2, "no such step"


@pytest.mark.slow
def test_modules_and_stages_of_one_run_alone_are_reported(sft):
    """A dump that agrees as far as it goes."""
    shutil.copytree(sft / "dumped", sft / "less")
    path = sft / "less/profile/step_2/train_batch/step2/rank0/dump.json"
    dump = json.loads(path.read_text())
    dump["data"] = {name: call for name, call in dump["data"].items() if "backward" not in name}
    path.write_text(json.dumps(dump))
    printed = compared(sft, "dumped", "less", 2, 1)
    assert re.search(
        r"tensors agree, \d+ in only one run; .*\n"
        r"    the first in only one run: Module\..*\.backward\.0",
        printed,
    )
    shutil.copytree(sft / "dumped", sft / "more")
    shutil.copytree(sft / "more/profile/step_2/train_batch", sft / "more/profile/step_2/validate")
    printed = compared(sft, "dumped", "more", 2, 1)
    assert "metrics of step 2 agree" in printed
    assert "dumped in only one run, so not compared: validate" in printed
    assert "tensors agree;" in printed
    compared(sft, "dumped", "more", 2, 0, "--stage", "train_batch")


@pytest.mark.parametrize(
    "codes, expected",
    [([0, 2], 2), ([2, 1], 1), ([0, 1, 2], 1), ([0], 0), ([3, 0], 3), ([3, 2], 2), ([3, 1], 1)],
)
def test_diverging_is_the_most_important_exit_code(codes, expected):
    assert compare.worst(codes) == expected


@pytest.mark.parametrize("only_in_one, code", [([], 0), (["b"], 1)])
def test_a_tensor_of_one_run_alone_is_a_divergence(capsys, only_in_one, code):
    comparison = compare.Comparison("stage", [make_pair("a", 0.0)], only_in_one)
    assert compare.report(comparison, compare.Settings()) == code
    assert ("the first in only one run: b" in capsys.readouterr().out) == bool(only_in_one)


def make_pair(name, difference, place=""):
    """Return a pair of tensors with this difference; the second has a shorter name."""
    tensor = DumpedTensor(name, [2], "float32", {"max": 1.0, "min": 0.0}, None)
    return compare.Pair(tensor, replace(tensor, name=name.removeprefix("long.")), difference, place)


def test_the_first_difference_is_reported_with_all_that_could_not_be_compared(capsys):
    pairs = [make_pair("a", 1e-5), make_pair("long.b", 0.25, "output 0, call 3"), make_pair("c", 2)]
    comparison = compare.Comparison("stage", pairs, ["x", "y"], [", outputs alone"], [0, 3, 4])
    comparison.left_out = Counter({"other sizes": 5, "no rows": 1})
    comparison.layers_left_out = [7, 9]
    assert compare.report(comparison, compare.Settings()) == compare.ExitCode.DIVERGE
    assert capsys.readouterr().out.splitlines() == [
        "stage: diverges at long.b / b (output 0, call 3) (3 tensors before it could not be "
        "compared), relative difference 0.25; tensor 2 of 3, outputs alone; 5 not compared: other "
        "sizes; 1 not compared: no rows, 2 in only one run",
        "    A: shape [2]  max 1.0  min 0.0",
        "    B: shape [2]  max 1.0  min 0.0",
        "    largest difference 2, at c",
        "    layers of which nothing was compared: [7, 9]",
        "    the first in only one run: x",
    ]


@pytest.mark.parametrize(
    "num_left_out, layers_left_out, code", [(1, [], 0), (2, [], 3), (0, [4], 3), (0, [], 0)]
)
def test_runs_agree_if_at_most_a_tenth_of_the_tensors_could_not_be_compared(
    num_left_out, layers_left_out, code
):
    pairs = [make_pair(name, 0.0) for name in "abcdefghi"]
    comparison = compare.Comparison("stage", pairs, [])
    comparison.left_out["other sizes"] = num_left_out
    comparison.layers_left_out = layers_left_out
    assert compare.report(comparison, compare.Settings()) == code


@pytest.mark.parametrize(
    "a, b, expected",
    [
        ((1.0, 0.0), (1.0, 0.0), 0.0),
        ((1.0, 0.0), (1.1, 0.0), 0.1 / 1.1),
        ((math.nan, 0.0), (1.0, 0.0), math.inf),
        ((math.nan, 0.0), (math.nan, 0.0), 0.0),
        ((math.inf, 0.0), (1.0, 0.0), math.inf),
        ((None, None), (None, None), 0.0),
    ],
)
def test_differences_are_relative_to_the_largest_number_in_the_tensors(a, b, expected):
    statistics_a = {"max": a[0], "min": a[1], "mean": None, "l2norm": None}
    statistics_b = {"max": b[0], "min": b[1], "mean": None, "l2norm": None}
    difference = compare.relative_difference(statistics_a, statistics_b)
    assert difference == pytest.approx(expected)


def test_elements_are_compared_if_both_runs_have_them_all():
    whole = DumpedTensor("a", [2], "float32", {}, lambda: torch.tensor([1.0, 2.0]))
    other = replace(whole, load=lambda: torch.tensor([1.0, -1.0]))
    assert largest_difference(whole, other) == largest_difference(other, whole) == 3.0
    longer = replace(whole, shape=[3], load=lambda: torch.ones(3))
    for incomparable in (replace(whole, load=None), longer):
        assert largest_difference(whole, incomparable) is None
        assert largest_difference(incomparable, whole) is None
    empty = replace(whole, shape=[0], load=lambda: torch.ones(0))
    assert largest_difference(empty, empty) is None


@pytest.mark.parametrize("name", ["l2norm", "rms"])
def test_a_norm_is_compared_with_itself(name):
    """Relative to the largest element, the difference would be 0.1."""
    extremes = {"max": 1.0, "min": -1.0}
    difference = compare.relative_difference({**extremes, name: 0.1}, {**extremes, name: 0.2})
    assert difference == pytest.approx(0.5)


def test_metrics_of_a_step_are_numbers_also_where_they_are_0(tmp_path):
    """A number that was not finite is null in the file; a step may have several lines."""
    lines = [
        {"step": 1, "loss": 5.0},
        {"step": 2, "loss": 0.0, "grad_norm": None},
        {"step": 2, "val/loss": 0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = compare.metrics_of(tmp_path, 2)
    assert math.isnan(metrics.pop("grad_norm"))
    assert metrics == {"step": 2, "loss": 0.0, "val/loss": 0}


@pytest.mark.parametrize(
    "a, b, expected",
    [
        (1.0, 1.1, 0.1 / 1.1),
        (1e-9, -3e-9, 4e-7),
        (math.nan, math.nan, 0.0),
        (math.nan, 1.0, math.inf),
    ],
)
def test_a_loss_that_is_0_but_for_rounding_agrees(a, b, expected):
    assert compare.metric_difference(a, b) == pytest.approx(expected)
