"""Comparing the losses and dumps of two runs, also of different layouts."""

import json
import math
import re
import shutil
import sys

import pytest

from profiling import compare, shards
from tests.profiling.support import PROBE, arguments
from tests.support.launch import launch, run


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


# Outputs of q_norm, k_norm, o_proj, attention, down_proj, mlp and layer, four times; of the
# embedding and of the last norm; and two of the head.
PER_MICRO_BATCH = 4 * 7 + 2 + 2


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


@pytest.mark.parametrize("codes, expected", [([0, 2], 2), ([2, 1], 1), ([0, 1, 2], 1), ([0], 0)])
def test_diverging_is_the_most_important_exit_code(codes, expected):
    assert compare.worst(codes) == expected


@pytest.mark.parametrize(
    "a, b, expected",
    [
        ((1.0, 0.0), (1.0, 0.0), 0.0),
        ((1.0, 0.0), (1.1, 0.0), 0.1 / 1.1),
        ((math.nan, 0.0), (1.0, 0.0), math.inf),
        ((math.nan, 0.0), (math.nan, 0.0), 0.0),
        ((None, None), (None, None), 0.0),
    ],
)
def test_differences_are_relative_to_the_largest_number_in_the_tensors(a, b, expected):
    statistics_a = {"max": a[0], "min": a[1], "mean": None, "l2norm": None}
    statistics_b = {"max": b[0], "min": b[1], "mean": None, "l2norm": None}
    difference = compare.relative_difference(statistics_a, statistics_b)
    assert difference == pytest.approx(expected)


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


def write_dump(folder, pp_rank, first_layers):
    """Write the dump of a pipeline rank: the output of one layer in each of its chunks."""
    folder.mkdir(parents=True)
    statistics = {"Max": 1.0, "Min": 0.0, "Mean": 0.5, "Norm": 1.0}
    output = {"shape": [2], "dtype": "torch.float32", **statistics}
    calls = {
        f"Module.{chunk}.decoder.layers.0.TransformerLayer.forward.0": {"output": [output]}
        for chunk in range(len(first_layers))
    }
    (folder / "dump.json").write_text(json.dumps({"data": calls}))
    coordinates = {"of": "MegatronEngine", "pp": [pp_rank, 2], "first_layers": first_layers}
    (folder / "coordinates.json").write_text(json.dumps(coordinates))


def test_layers_of_a_virtual_pipeline_are_in_the_order_of_the_model(tmp_path):
    """The first tensor that diverges is the first in this order."""
    write_dump(tmp_path / "rank0", 0, [0, 2])
    write_dump(tmp_path / "rank1", 1, [1, 3])
    outputs = shards.gather(shards.read_ranks(tmp_path)).outputs
    modules = [key.output.module for key in outputs]
    assert modules == [f"model.layers.{layer}." for layer in range(4)]


@pytest.fixture(scope="module")
def layouts(assets, tmp_path_factory):
    """Dumps of the same update on one rank by FSDP2, on two by both, and on four by Megatron."""
    out = tmp_path_factory.mktemp("layouts")
    for num_ranks in (1, 2, 4):
        launch(num_ranks, "tests/profiling/profiling_worker.py", "layouts", assets, out)
    return out


def copy(run, name):
    return shutil.copytree(run, run.parent / name, dirs_exist_ok=True)


def without_tensors(run, name):
    """Copy a run's dumps with only their statistics."""
    for path in copy(run, name).glob("profile/step_2/*/step2/*/dump.json"):
        path.write_text(path.read_text().replace('"data_name"', '"left_out"'))
    return run.parent / name


def compare_layouts(capsys, a, b):
    code = compare.compare_runs(a, b, 2, None, compare.Settings())
    return code, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "a, b",
    [
        ("fsdp", "tp"),
        ("fsdp", "vpp"),
        ("fsdp_whole", "sp_whole"),
        ("tp", "vpp"),
        ("tp_whole", "sp_whole"),
        ("fsdp", "tp_pp"),
        ("vpp", "tp_pp"),
    ],
)
def test_layouts_agree(layouts, capsys, a, b):
    """All outputs in all micro-batches, of joined shards or whole on two tensor-parallel ranks."""
    code, printed = compare_layouts(capsys, layouts / a, layouts / b)
    assert code == 0
    assert printed.startswith("metrics of step 2 agree")
    assert "compute_values: " in printed
    num_agreeing = agreeing_tensors("actor_update", printed)
    num_outputs = (1 if "whole" in a else 2) * PER_MICRO_BATCH
    if (a, b) == ("fsdp", "vpp"):
        assert num_agreeing == num_outputs
    else:
        assert num_outputs <= num_agreeing <= 2 * num_outputs


@pytest.mark.slow
def test_shards_are_joined_by_their_statistics(layouts, capsys):
    """Where sequences are padded, only the head has the same tokens."""
    fsdp = without_tensors(layouts / "fsdp", "statistics_a")
    tp = without_tensors(layouts / "tp", "statistics_tp")
    code, printed = compare_layouts(capsys, fsdp, tp)
    assert code == 0
    assert re.search(r"actor_update: \d+ tensors agree", printed)
    assert "not compared" not in printed
    sp = without_tensors(layouts / "sp_whole", "statistics_sp")
    code, printed = compare_layouts(capsys, layouts / "fsdp_whole", sp)
    assert code == 0
    assert f"{PER_MICRO_BATCH - 2} not compared: only one run pads them" in printed


@pytest.mark.slow
def test_the_planted_defect_is_found_on_shards(layouts, capsys):
    """On the second pipeline rank, whose layer 1 is the fourth of the model."""
    code, printed = compare_layouts(capsys, layouts / "fsdp_whole", layouts / "defect")
    assert code == 1
    output_a = "Module.0.hf.model.layers.3.mlp.down_proj.Linear.forward.0.output.0"
    output_b = "Module.0.decoder.layers.1.mlp.linear_fc2.TorchRowParallelLinear.forward.0.output.0"
    divergence = f"actor_update: diverges at {output_a} / {output_b}, relative difference 0.0"
    assert divergence in printed


@pytest.mark.slow
def test_another_output_matrix_is_found_at_the_head(layouts, capsys):
    """On the second pipeline rank, after layers that agree. The critic's head is its own."""
    code, printed = compare_layouts(capsys, layouts / "fsdp", layouts / "head")
    assert code == 1
    assert printed.startswith("metrics of step 2 diverge\n    actor/loss ")
    output = "Module.0.head.LogProbHead.forward.0.output.0"
    assert f"\nactor_update: diverges at {output}, relative" in printed
    assert f"; tensor {PER_MICRO_BATCH - 1} of {2 * PER_MICRO_BATCH}, " in printed
    assert "\ncompute_values: 62 tensors agree" in printed


@pytest.mark.slow
def test_outputs_that_cannot_be_compared_are_reported(layouts, capsys):
    code, printed = compare_layouts(capsys, layouts / "fsdp", layouts / "dp")
    assert code == 2
    assert "1 and 2 data-parallel ranks see different tokens" in printed
    assert "metrics of step 2 agree" in printed
    code, printed = compare_layouts(capsys, layouts / "fsdp", layouts / "sp")
    assert code == 2
    assert "not compared: their micro-batches differ" in printed
    code, printed = compare_layouts(capsys, layouts / "fsdp", layouts / "recompute")
    assert code == 0
    assert f"{2 * 4 * 7} not compared: only one run recomputes them" in printed
    for path in copy(layouts / "tp", "one_rank").glob("profile/step_2/*/step2/rank1"):
        shutil.rmtree(path)
    code, printed = compare_layouts(capsys, layouts / "fsdp", layouts / "one_rank")
    assert code == 2
    missing = "run B has dumps of only 1 of 2 tensor- x 1 pipeline-parallel ranks"
    assert f"{missing}: set profiler.ranks=all" in printed


@pytest.mark.slow
def test_losses_that_differ_are_found_where_dumps_agree(layouts, capsys):
    path = copy(layouts / "fsdp", "another_loss") / "metrics.jsonl"
    path.write_text(json.dumps({**json.loads(path.read_text()), "actor/loss": 1.87}) + "\n")
    code, printed = compare_layouts(capsys, layouts / "fsdp", layouts / "another_loss")
    assert code == 1
    assert "diverge" in printed.splitlines()[0]
    assert "B 1.87" in printed
    assert "actor_update rank0: " in printed
    path.unlink()
    code, printed = compare_layouts(capsys, layouts / "fsdp", layouts / "another_loss")
    assert code == 0
    assert printed.startswith("metrics of step 2 are not in both runs")
