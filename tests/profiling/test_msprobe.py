"""What msprobe dumps, and that dumps do not change training."""

import json
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from profiling.msprobe import select_stages
from tests.profiling.support import MODEL_STAGES, dumping, linear, read_dump
from tests.support.launch import launch, metrics
from tests.support.ranks import on_ranks


def test_dumps_hold_their_own_calls_and_a_repeated_step_replaces_an_older_dump(tmp_path):
    model, engine = linear()
    older = tmp_path / "profile/step_2/train_batch/step2/rank0/dump.json"
    older.parent.mkdir(parents=True)
    older.write_text("of a run that was killed")
    profiler = dumping(tmp_path, "profiler.msprobe.stages=[train_batch,validate]")
    for step in (1, 2):
        profiler.begin_step(step)
        for stage, calls in (("train_batch", 1), ("validate", 2), ("train_batch", 3)):
            with profiler.stage(stage, engine):
                for _ in range(calls):
                    model(torch.ones(1, 4))
        model(torch.ones(1, 4))  # in no stage, in no dump
        assert profiler.end_step()["profiler/failed_dumps"] == 0
    profiler.close()
    ready = json.loads((tmp_path / "profile/msprobe_rank0.json").read_text())
    assert (ready["task"], ready["level"], ready["step"]) == ("statistics", "L0", [])
    for folder, calls in (("train_batch", 1), ("validate", 2), ("train_batch.2", 3)):
        for step in (1, 2):
            expected = [
                f"Module.0.{layer}.Linear.forward.{call}"
                for call in range(calls)
                for layer in (0, 1)
            ]
            assert list(read_dump(tmp_path, step, folder)) == expected, (folder, step)


def test_gradients_are_dumped_too(tmp_path):
    model, engine = linear()
    profiler = dumping(tmp_path)
    profiler.begin_step(1)
    with profiler.stage("train_batch", engine):
        model(torch.ones(1, 4)).sum().backward()
    profiler.end_step()
    profiler.close()
    dump = read_dump(tmp_path, 1, "train_batch")
    for layer in (0, 1):
        name = f"Module.0.{layer}.Linear"
        assert {f"{name}.forward.0", f"{name}.backward.0"} <= set(dump), layer


def test_a_named_stage_that_never_ran_is_reported(tmp_path, capsys):
    model, engine = linear()
    profiler = dumping(tmp_path, "profiler.msprobe.stages=[train_batch,validate]")
    profiler.begin_step(1)
    with profiler.stage("train_batch", engine):
        model(torch.ones(1, 4))
    profiler.close()
    printed = capsys.readouterr().out
    assert "msprobe dumped nothing of validate, which did not run in the interval" in printed


def test_the_cost_of_the_first_dumped_step_is_reported_once(tmp_path, capsys):
    """It is compared with the step before the interval. Other stages do not count."""
    model, engine = linear()
    stages = "profiler.msprobe.stages=[train_batch,validate]"
    profiler = dumping(tmp_path, "trainer.profile_interval=[2,9]", stages)
    seconds = {}
    for step in (1, 2, 3):
        profiler.begin_step(step)
        for stage in ("train_batch", "validate"):
            with profiler.stage(stage, engine):
                model(torch.ones(1, 4))
        with profiler.stage("data"):
            time.sleep(0.02)
        times = profiler.end_step()
        seconds[step] = times["timing/train_batch"] + times["timing/validate"]
    profiler.close()
    files = [path for path in (tmp_path / "profile/step_2").rglob("*") if path.is_file()]
    num_bytes = sum(path.stat().st_size for path in files)
    lines = [line for line in capsys.readouterr().out.splitlines() if "msprobe dumped" in line]
    assert lines == [
        "rank 0: msprobe dumped train_batch, validate with statistics L0: "
        f"{seconds[2]:.3g} s in these stages ({seconds[1]:.3g} s in the step before), "
        f"{num_bytes / 1e6:.3g} MB per step and rank"
    ]


def test_without_a_step_before_the_first_dump_its_cost_is_compared_with_nothing(tmp_path, capsys):
    model, engine = linear()
    profiler = dumping(tmp_path, "profiler.msprobe.stages=[train_batch]")
    profiler.begin_step(1)
    with profiler.stage("train_batch", engine):
        model(torch.ones(1, 4))
    seconds = profiler.end_step()["timing/train_batch"]
    profiler.close()
    printed = capsys.readouterr().out
    assert f"with statistics L0: {seconds:.3g} s in these stages, " in printed


def test_stages_with_the_largest_dumps_are_dumped_only_when_they_are_named():
    stages = ["rollout_generate", "actor_update", "validate"]
    assert select_stages(None, stages) == ["actor_update"]
    assert select_stages(["validate", "rollout_generate"], stages) == [
        "validate",
        "rollout_generate",
    ]


def test_the_cost_is_that_of_the_first_step_with_a_dump(tmp_path, capsys):
    """In the first step of the interval, the named stage does not run."""
    model, engine = linear()
    profiler = dumping(tmp_path, "profiler.msprobe.stages=[validate]")
    printed = []
    for step in (1, 2):
        profiler.begin_step(step)
        with profiler.stage("validate" if step == 2 else "train_batch", engine):
            model(torch.ones(1, 4))
        profiler.end_step()
        printed.append(capsys.readouterr().out)
    profiler.close()
    assert "msprobe dumped" not in printed[0]
    assert "msprobe dumped validate with statistics L0: " in printed[1]


def test_dumps_do_not_nest(tmp_path):
    _, engine = linear()
    profiler = dumping(
        tmp_path, "profiler.msprobe.stages=[train_batch,validate]", "profiler.msprobe.strict=false"
    )
    profiler.begin_step(1)
    with pytest.raises(RuntimeError, match="cannot dump stage validate inside stage train_batch"):
        with profiler.stage("train_batch", engine), profiler.stage("validate", engine):
            pass
    profiler.close()


def test_a_dump_that_fails_stops_the_run_or_is_reported_once_and_counted(tmp_path, capsys):
    model, engine = linear()
    broken = SimpleNamespace(modules=lambda: ["no module"])
    profiler = dumping(tmp_path)
    profiler.begin_step(1)
    with pytest.raises(RuntimeError, match="could not dump train_batch of step 1"):
        with profiler.stage("train_batch", broken):
            pass
    with pytest.raises(RuntimeError, match="no module ran"):
        with profiler.stage("train_batch", engine):
            pass
    with pytest.raises(KeyError), profiler.stage("train_batch", engine):
        raise KeyError("the stage's own error")
    profiler.close()

    profiler = dumping(tmp_path / "lenient", "profiler.msprobe.strict=false")
    outputs = []
    for step in (1, 2, 3):
        profiler.begin_step(step)
        with profiler.stage("train_batch", engine if step == 3 else broken):
            outputs.append(model(torch.ones(1, 4)))
        num_failed = profiler.end_step()["profiler/failed_dumps"]
    profiler.close()
    assert len(outputs) == 3
    assert num_failed == 2
    lines = [line for line in capsys.readouterr().out.splitlines() if "could not dump" in line]
    assert len(lines) == 1
    assert lines[0].startswith("rank 0: msprobe could not dump train_batch of step 1; further ")
    assert len(read_dump(tmp_path / "lenient", 3, "train_batch")) == 2


def failed_dumps_of_rank(directory: Path) -> list[int | None]:
    """Return the count of each of four steps, of which the second and the third are recorded.

    Each dump of rank 1 fails. Rank 0 runs no stage that is dumped, and rank 2 does not record.
    """
    broken = SimpleNamespace(modules=lambda: ["no module"])
    settings = ["profiler.ranks=[0,1]", "profiler.msprobe.strict=false"]
    profiler = dumping(directory, *settings, "trainer.profile_interval=[2,3]")
    counts = []
    for step in (1, 2, 3, 4):
        profiler.begin_step(step)
        with profiler.stage("data" if dist.get_rank() == 0 else "train_batch", broken):
            pass
        counts.append(profiler.end_step().get("profiler/failed_dumps"))
    profiler.close()
    return counts


def test_dumps_that_fail_are_counted_over_all_ranks(tmp_path):
    """Rank 0 writes the metrics, whichever rank has failed, and whether or not it records."""
    assert on_ranks(3, tmp_path, failed_dumps_of_rank, tmp_path) == [[None, 1, 2, None]] * 3


@pytest.mark.slow
def test_a_dump_changes_nothing_that_is_learned_but_for_rounding(sft):
    """The second step is dumped.

    Its forward pass is the same to the last bit. Its gradients differ in the order of their sums,
    and the third step has the weights that follow.
    """
    plain = metrics(sft / "plain")
    dumped = metrics(sft / "dumped")
    losses = [step["train/loss"] for step in plain]
    dumped_losses = [step["train/loss"] for step in dumped]
    norms = [step["train/grad_norm"] for step in plain]
    dumped_norms = [step["train/grad_norm"] for step in dumped]
    assert len(losses) == 3
    assert losses[:2] == dumped_losses[:2]
    assert norms[0] == dumped_norms[0]
    assert norms[1] == pytest.approx(dumped_norms[1], rel=1e-5)
    assert losses[2] == pytest.approx(dumped_losses[2], rel=1e-4)
    assert norms[2] == pytest.approx(dumped_norms[2], rel=1e-3)
    assert not (sft / "plain" / "profile").exists()
    assert [p.name for p in (sft / "dumped" / "profile").glob("step_*/*")] == ["train_batch"]
    num_failed = [step.get("profiler/failed_dumps") for step in dumped]
    assert num_failed == [None, 0, None]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, task, more",
    [
        ("fsdp", "tensor", []),
        *(
            (
                "megatron",
                task,
                [
                    "engine.pipeline_model_parallel_size=2",
                    "engine.virtual_pipeline_model_parallel_size=2",
                ],
            )
            for task in ("statistics", "tensor")
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_engines_dump_all_they_run(assets, tmp_path, kind, task, more):
    """The worker asserts that results are the same to the last bit with a dump and without."""
    done = launch(
        2, "tests/profiling/profiling_worker.py", kind, assets / "model", tmp_path, task, *more
    )
    assert "'profiler/failed_dumps': 0" in done.stdout
    assert f"with {task} L0:" in done.stdout
    assert " MB per step and rank" in done.stdout
    for stage in MODEL_STAGES:
        for rank in (0, 1):
            dump = read_dump(tmp_path, 2, stage, rank)
            chunks = {name.split(".")[1] for name in dump}
            assert chunks == ({"0", "1"} if kind == "megatron" else {"0"}), (stage, rank)
            assert any(name.endswith("backward.0") for name in dump) == stage.endswith("_update")
            tensors = list(
                (tmp_path / f"profile/step_2/{stage}/step2/rank{rank}").glob(
                    "dump_tensor_data/*.pt"
                )
            )
            assert bool(tensors) == (task == "tensor")
    # An adapter's base is computed with the actor's modules: its dump does not replace the actor's.
    actor, base = (read_dump(tmp_path, 2, stage) for stage in MODEL_STAGES[:2])
    assert list(actor) == list(base)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, level, more",
    [
        ("fsdp", "mix", ["engine.activation_checkpointing=true"]),
        ("megatron", "L1", ["engine.recompute=full", "engine.pipeline_model_parallel_size=2"]),
    ],
    ids=["mix", "L1"],
)
def test_calls_are_dumped_also_where_backward_runs_forward_again(
    assets, tmp_path, kind, level, more
):
    done = launch(
        2,
        "tests/profiling/profiling_worker.py",
        kind,
        assets / "model",
        tmp_path,
        "statistics",
        f"profiler.msprobe.level={level}",
        *more,
    )
    assert "'profiler/failed_dumps': 0" in done.stdout
    assert f"with statistics {level}:" in done.stdout
    for stage in MODEL_STAGES:
        for rank in (0, 1):
            kinds = Counter(
                (name.split(".")[0], "backward" in name)
                for name in read_dump(tmp_path, 2, stage, rank)
            )
            assert (kinds["Module", False] > 0) == (level == "mix"), (stage, rank)
            assert kinds["Functional", False] > 0, (stage, rank)
            assert (kinds["Functional", True] > 0) == stage.endswith("_update"), (stage, rank)


@pytest.mark.slow
def test_dumps_that_fail_on_any_rank_are_counted(assets, tmp_path):
    in_the_way = tmp_path / "profile/step_2/actor_update/step2/rank1"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.touch()
    done = launch(
        2,
        "tests/profiling/profiling_worker.py",
        "fsdp",
        assets / "model",
        tmp_path,
        "statistics",
        "profiler.msprobe.strict=false",
        "profiler.msprobe.stages=[actor_update]",
    )
    assert "'profiler/failed_dumps': 1" in done.stdout
    assert "rank 1: msprobe could not dump actor_update" in done.stdout
