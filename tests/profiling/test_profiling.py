"""The profiler: stages, tools that record them, comparing dumps, and the report of a run.

Whole runs are started as users start them.
"""

import json
import math
import os
import re
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from config import InputError, load
from engines.parallel import affinity
from examples.arithmetic import make_rows, make_tokenizer
from job import setup as job
from profiling import Profiler, compare, is_selected, report
from tests.support.launch import launch, metrics, run
from tests.support.models import make_model

CPU = torch.device("cpu")
MODEL_STAGES = [
    "actor_compute_log_prob",
    "ref_compute_log_prob",
    "compute_values",
    "critic_update",
    "actor_update",
]


def configure(*overrides):
    return load("sft.yaml", ["model.path=unused", "data.train_files=unused", *overrides])


def profile(directory, steps, *overrides, work=None):
    """Profile steps of three stages.

    Returns how often each stage ran, and the metrics of the last step.
    """
    config = configure(f"output_dir={directory}", *overrides)
    ran = Counter()
    results = {}
    profiler = job.start_profiler(config, CPU, 10, ["train_batch"])
    try:
        for step in steps:
            profiler.begin_step(step)
            with profiler.stage("data"):
                ran["data"] += 1
            with profiler.stage("train_batch"):
                ran["train_batch"] += 1
                with profiler.stage("inside"):
                    torch.ones(8, 8) @ torch.ones(8, 8)
                    if work:
                        work(step)
            results = profiler.end_step()
    finally:
        profiler.close()
    return ran, results


def recorded(directory):
    """Return the names of the events in each trace, by the trace's path."""
    profile_directory = directory / "profile"
    events_of_trace = {}
    for path in profile_directory.rglob("*.json"):
        events = json.loads(path.read_text())["traceEvents"]
        name = str(path.relative_to(profile_directory))
        events_of_trace[name] = {event.get("name") for event in events}
    return events_of_trace


# -- stages and steps ------------------------------------------------------------------------------


def test_stages_are_timed_nested_and_repeated():
    profiler = Profiler()
    for _ in range(2):
        with profiler.stage("outer"), profiler.stage("inner"):
            time.sleep(0.01)
    with pytest.raises(KeyError), profiler.stage("raises"):
        raise KeyError
    seconds = profiler.end_step()
    assert list(seconds) == ["timing/inner", "timing/outer", "timing/raises"]
    assert 0.02 <= seconds["timing/inner"] <= seconds["timing/outer"]
    assert profiler.end_step() == {}


@pytest.mark.parametrize(
    "interval, steps, expected",
    [
        ([2, 4], range(1, 7), [2, 3, 4]),
        ([3, 3], range(1, 7), [3]),
        ([1, 1], range(1, 3), [1]),
        ([2, 5], range(1, 4), [2, 3]),
        ([2, 4], range(3, 7), [3, 4]),
        ([2, 4], range(5, 7), []),
        ([-1, -1], range(1, 4), []),
    ],
    ids=[
        "inside",
        "one step",
        "the first",
        "the run ends before",
        "resumed inside",
        "resumed after",
        "off",
    ],
)
def test_the_steps_of_the_interval_are_recorded(tmp_path, capsys, interval, steps, expected):
    ran, results = profile(
        tmp_path, steps, f"trainer.profile_interval={interval}", "profiler.tool=torch"
    )
    assert ran == {"data": len(steps), "train_batch": len(steps)}
    assert "timing/inside" in results
    traces = recorded(tmp_path) if expected else {}
    assert set(traces) == {
        f"step_{n}/{stage}/torch_step{n}_rank0.json"
        for n in expected
        for stage in ("data", "train_batch")
    }
    for name, events in traces.items():
        if "train_batch" in name:
            assert {"train_batch", "inside"} <= events, name
    assert bool(expected) == (tmp_path / "profile").exists(), (
        "nothing is written when nothing is recorded"
    )
    assert ("records nothing" in capsys.readouterr().out) == (interval == [-1, -1])


@pytest.mark.parametrize(
    "steps, name", [(range(1, 6), "2-4"), (range(1, 4), "2-3"), (range(3, 6), "3-4")]
)
def test_one_trace_of_the_whole_interval(tmp_path, steps, name):
    profile(
        tmp_path,
        steps,
        "trainer.profile_interval=[2,4]",
        "profiler.tool=[torch]",
        "profiler.torch.trace=interval",
        "profiler.torch.record_shapes=true",
        "profiler.torch.with_stack=true",
        "profiler.torch.profile_memory=true",
    )
    [(path, names)] = recorded(tmp_path).items()
    assert path == f"step_{name[0]}/interval/torch_step{name}_rank0.json"
    assert {"data", "train_batch", "inside"} <= names
    events = json.loads((tmp_path / "profile" / path).read_text())["traceEvents"]
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert products[0]["args"]["Input Dims"] == [[8, 8], [8, 8]]


def test_a_trace_changes_no_bit(tmp_path):
    gradients = []

    def work(step):
        torch.manual_seed(0)
        weight = torch.randn(64, 64, requires_grad=True)
        x = torch.randn(32, 64) @ weight
        (x @ weight + x @ weight.T).pow(2).sum().backward()
        gradients.append(weight.grad)

    profile(
        tmp_path, range(1, 4), "trainer.profile_interval=[2,2]", "profiler.tool=torch", work=work
    )
    assert len(gradients) == 3
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_an_exception_leaves_its_trace_and_passes_through(tmp_path):
    done = []

    def work(step):
        done.append(step)
        if step == 3:
            raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        profile(
            tmp_path,
            range(1, 6),
            "trainer.profile_interval=[2,5]",
            "profiler.tool=torch",
            work=work,
        )
    assert done == [1, 2, 3], "no stage runs twice"
    assert {"train_batch", "inside"} <= recorded(tmp_path)[
        "step_3/train_batch/torch_step3_rank0.json"
    ]


def test_the_second_run_of_a_stage_has_a_folder_of_its_own(tmp_path):
    config = configure(
        f"output_dir={tmp_path}", "trainer.profile_interval=[1,1]", "profiler.tool=torch"
    )
    profiler = job.start_profiler(config, CPU, 1, [])
    profiler.begin_step(1)
    for _ in range(2):
        with profiler.stage("wake"):
            pass
    profiler.end_step()
    with profiler.stage("save"):  # after the step's metrics, but still in this step
        pass
    profiler.close()
    assert set(recorded(tmp_path)) == {
        f"step_1/{stage}/torch_step1_rank0.json" for stage in ("wake", "wake.2", "save")
    }


def test_ranks_are_selected_by_local_rank(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert is_selected(None, 0, 2)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert is_selected(None, 8, 16), "local rank 0 of the second node"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not is_selected(None, 1, 2)
    assert is_selected("all", 1, 2)
    assert not is_selected([0], 1, 2)


# -- mistakes --------------------------------------------------------------------------------------


ON = "trainer.profile_interval=[1,2]"
PROBE = "profiler.tool=msprobe"
# Name of the mistake: overrides, and a part of the error message.
MISTAKES = {
    "an interval without a tool": ([ON], "profiler.tool is null: name a tool"),
    "an interval after the end": (
        ["trainer.profile_interval=[11,12]", "profiler.tool=torch"],
        "after the last step, 10",
    ),
    "an unknown tool": (
        ["profiler.tool=nsys"],
        "profiler.tool=nsys must be one of nvtx, mstx, torch, memory, msprobe",
    ),
    "a rank that does not exist": (
        [ON, "profiler.tool=torch", "profiler.ranks=[0,1]"],
        "profiler.ranks=[0, 1] names a rank",
    ),
    "a stage that does not exist": (
        [PROBE, "profiler.msprobe.stages=[critic_update]"],
        "critic_update is not a stage of this run in which a model computes; these are train_batch",
    ),
    "compiled layers": ([PROBE, "engine.torch_compile=always"], "set engine.torch_compile=never"),
    "no config file": (
        [PROBE, "profiler.msprobe.config_path=/nowhere.json"],
        "/nowhere.json: No such file",
    ),
    "a config file of another task": (
        [PROBE, "profiler.msprobe.config_path={tmp}/task.json"],
        "task=nan_check must be one of",
    ),
    "a config file that selects steps": (
        [PROBE, "profiler.msprobe.config_path={tmp}/step.json"],
        "leave that list empty and set trainer.profile_interval",
    ),
    "a config file that is not JSON": (
        [PROBE, "profiler.msprobe.config_path={tmp}/none.json"],
        "is not JSON",
    ),
    "two tools that need CUPTI": (
        ["profiler.tool=[torch,nvtx]"],
        "torch and nvtx cannot share CUPTI",
    ),
    "a mode that msprobe does not know": (
        [PROBE, "profiler.msprobe.config_path={tmp}/mode.json"],
        "mode.json is rejected by msprobe: ",
    ),
    "hashes beside tensors": (
        [PROBE, "profiler.msprobe.task=tensor", "profiler.msprobe.config_path={tmp}/tensor.json"],
        "summary_mode md5: only statistics",
    ),
    "a group that is not an object": (
        [PROBE, "profiler.msprobe.config_path={tmp}/list.json"],
        "list.json is rejected by msprobe: ",
    ),
    "a folder with a space": (
        [PROBE, "output_dir={tmp}/my runs"],
        "output_dir: msprobe does not accept the path {tmp}/my runs/profile",
    ),
    "a config file with an accent": (
        [PROBE, "profiler.msprobe.config_path={tmp}/é.json"],
        "config_path: msprobe does not accept the path",
    ),
    "hashes": (
        [PROBE, "profiler.msprobe.config_path={tmp}/hash.json"],
        "summary_mode md5: only statistics can be compared",
    ),
}
ON_A_CPU = {"nvtx": "needs CUDA", "mstx": "needs an Ascend NPU", "memory": "needs an accelerator"}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_errors_at_start(tmp_path, mistake):
    for name, text in (
        ("task", '{"task": "nan_check"}'),
        ("step", '{"step": [3]}'),
        ("none", "{"),
        ("mode", '{"statistics": {"data_mode": ["bogus"]}}'),
        ("hash", '{"statistics": {"summary_mode": "md5"}}'),
        ("tensor", '{"task": "tensor", "tensor": {"summary_mode": "md5"}}'),
        ("list", '{"statistics": [1]}'),
    ):
        (tmp_path / f"{name}.json").write_text(text)
    overrides, message = MISTAKES[mistake]
    config = configure(*(pair.replace("{tmp}", str(tmp_path)) for pair in overrides))
    with pytest.raises(InputError) as error:
        job.start_profiler(config, CPU, 10, ["train_batch"])
    assert message.replace("{tmp}", str(tmp_path)) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(
    torch.accelerator.is_available(), reason="needs a machine without an accelerator"
)
@pytest.mark.parametrize("tool", ON_A_CPU)
def test_tools_of_accelerators_are_errors_without_one(tool):
    with pytest.raises(InputError, match=ON_A_CPU[tool]):
        job.start_profiler(configure(f"profiler.tool={tool}"), CPU, 10, [])
    with pytest.raises(InputError, match="cuda is not available on this machine"):
        job.start_profiler(
            configure("profiler.tool=torch", "profiler.torch.activities=[cpu,cuda]"), CPU, 10, []
        )


def test_a_missing_package_is_an_error_at_start(monkeypatch):
    # Python itself marks modules that cannot be imported in this way.
    monkeypatch.setitem(sys.modules, "msprobe.pytorch", None)
    with pytest.raises(InputError, match="pip install mindstudio-probe"):
        job.start_profiler(configure(PROBE), CPU, 10, ["train_batch"])


@pytest.mark.parametrize(
    "pair",
    [
        "trainer.profile_interval=[3,2]",
        "trainer.profile_interval=[0,2]",
        "trainer.profile_interval=[1]",
        "profiler.ranks=[-1]",
        "profiler.ranks=some",
        "profiler.msprobe.level=L2",
        "profiler.torch.trace=always",
        "profiler.tool=[]",
    ],
)
def test_values_are_checked_with_the_configuration(pair):
    with pytest.raises(InputError, match=pair.partition("=")[0]):
        configure(pair)


# -- dumps -----------------------------------------------------------------------------------------


def read_dump(run, step, stage, rank=0):
    return json.loads(
        (run / f"profile/step_{step}/{stage}/step{step}/rank{rank}/dump.json").read_text()
    )["data"]


def dumping(directory, *overrides):
    config = configure(
        f"output_dir={directory}", "trainer.profile_interval=[1,9]", PROBE, *overrides
    )
    return job.start_profiler(config, CPU, 9, ["train_batch", "validate"])


def linear():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    return model, SimpleNamespace(modules=lambda: [model], coordinates=dict)


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


def test_a_named_stage_that_never_ran_is_reported(tmp_path, capsys):
    model, engine = linear()
    profiler = dumping(tmp_path, "profiler.msprobe.stages=[train_batch,validate]")
    profiler.begin_step(1)
    with profiler.stage("train_batch", engine):
        model(torch.ones(1, 4))
    profiler.close()
    printed = capsys.readouterr().out
    assert "msprobe dumped nothing of validate, which did not run in the interval" in printed


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
    assert capsys.readouterr().out.count("could not dump") == 1
    assert len(read_dump(tmp_path / "lenient", 3, "train_batch")) == 2


# -- whole runs ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A model of four layers, copies of it with a scaled matrix, 84 rows, and a reward."""
    directory = tmp_path_factory.mktemp("assets")
    tokenizer = make_tokenizer()
    matrices = {
        "model": (None, 1),
        "defect": ("model.layers.2.self_attn.k_proj.weight", 1.01),
        "late": ("model.layers.3.mlp.down_proj.weight", 1.01),
        "head": ("lm_head.weight", 1.05),
    }
    for name, (matrix, factor) in matrices.items():
        # On CPUs, vLLM has no attention for heads smaller than 32.
        make_model(
            directory / name,
            "qwen3",
            head_dim=32,
            num_hidden_layers=4,
            vocab_size=len(tokenizer),
            eos_token_id=tokenizer.eos_token_id,
        )
        tokenizer.save_pretrained(directory / name)
        if matrix:
            path = directory / name / "model.safetensors"
            weights = load_file(path)
            weights[matrix] *= factor
            save_file(weights, path, metadata={"format": "pt"})
    (directory / "train.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in make_rows()[0][:84])
    )
    (directory / "reward.py").write_text(
        "def letters(prompt, response, row):\n    return len(set(response)) / 10\n"
    )
    return directory


def arguments(assets, out, *overrides):
    return [
        f"model.path={assets}/model",
        f"data.train_files={assets}/train.jsonl",
        f"output_dir={out}",
        f"data.cache_dir={assets}/cache",
        "engine.compute_dtype=float32",
        "data.train_batch_size=8",
        "data.max_tokens_per_micro_batch=128",
        "optim.lr=3e-3",
        *overrides,
    ]


@pytest.fixture(scope="module")
def sft(assets, tmp_path_factory):
    """Runs of three steps: without a profile, with the second step dumped, and with the defect."""
    out = tmp_path_factory.mktemp("sft")
    for name, model, overrides in (
        ("plain", "model", []),
        ("dumped", "model", ["trainer.profile_interval=[2,2]"]),
        ("defect", "defect", ["trainer.profile_interval=[2,2]"]),
    ):
        run(
            [
                sys.executable,
                "train_sft.py",
                *arguments(
                    assets,
                    out / name,
                    f"model.path={assets}/{model}",
                    PROBE,
                    "trainer.total_steps=3",
                    *overrides,
                ),
            ]
        )
    return out


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


@pytest.fixture(scope="module")
def ppo_run(assets, tmp_path_factory):
    """Two steps with a critic and a reference on two ranks; two tools record the second on both."""
    out = tmp_path_factory.mktemp("ppo")
    stages = ",".join(["rollout_generate", *MODEL_STAGES])
    launch(
        2,
        "train_ppo.py",
        *arguments(
            assets,
            out,
            "trainer.total_steps=2",
            "trainer.profile_interval=[2,2]",
            "profiler.tool=[torch,msprobe]",
            "profiler.ranks=all",
            f"profiler.msprobe.stages=[{stages}]",
            "algorithm.adv_estimator=gae",
            "critic.lr=1e-3",
            "algorithm.use_kl_in_reward=true",
            "rollout.n=2",
            "rollout.max_tokens=12",
            "validation.max_tokens=12",
            "data.max_prompt_length=40",
            "rollout.kv_cache_gib=0.05",
            "reward.num_workers=1",
            f"reward.function={assets}/reward.py:letters",
        ),
    )
    return out


@pytest.mark.slow
def test_every_stage_of_a_ppo_step_leaves_a_trace_and_every_model_a_dump_of_its_own(ppo_run):
    assert [p.name for p in (ppo_run / "profile").glob("step_*")] == ["step_2"]
    failed_dumps = [step.get("profiler/failed_dumps") for step in metrics(ppo_run)]
    assert [number for number in failed_dumps if number is not None] == [0]
    for stage in (
        "rollout_generate",
        "reward",
        "advantages",
        "update_weights",
        "save",
        *MODEL_STAGES,
    ):
        for rank in (0, 1):
            trace = json.loads(
                (ppo_run / f"profile/step_2/{stage}/torch_step2_rank{rank}.json").read_text()
            )
            assert stage in {e.get("name") for e in trace["traceEvents"]}, (stage, rank)
    dumps = {
        (stage, rank): read_dump(ppo_run, 2, stage, rank)
        for stage in ("rollout_generate", *MODEL_STAGES)
        for rank in (0, 1)
    }
    for (stage, rank), dump in dumps.items():
        assert any(name.endswith("backward.0") for name in dump) == stage.endswith("_update"), (
            stage,
            rank,
        )
        assert any("layers.3." in name for name in dump)
        assert any(name.endswith(".forward.0") for name in dump)
    call = "Module.0.hf.model.layers.3.mlp.down_proj.Linear.forward.0"
    norms = {}
    for stage in MODEL_STAGES:
        norms[stage] = dumps[stage, 0][call]["parameters"]["weight"]["Norm"]
    assert norms["actor_compute_log_prob"] == norms["actor_update"]
    assert norms["compute_values"] == norms["critic_update"]
    assert len(set(norms.values())) == 3, (
        "actor, critic and reference are three models by the second step"
    )


def test_the_report_of_a_run_that_has_just_begun(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "val/loss": 2.5, "timing/validate": 3.0}\n{"step": 1, "train/lo'
    )
    assert "validate" in report.table(tmp_path)
    assert report.write_report(tmp_path).exists()


def test_the_picture_keeps_metrics_that_are_0_and_has_bars_for_stages_of_some_steps(tmp_path):
    from matplotlib import pyplot

    constant = {
        "critic/score/mean": 0.0,
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


@pytest.mark.slow
def test_a_run_that_ends_with_an_error_writes_its_trace_on_the_first_rank_alone(assets, tmp_path):
    done = launch(
        2,
        "train_sft.py",
        *arguments(
            assets,
            tmp_path,
            "optim.lr=1e30",
            "optim.clip_grad=0",
            "trainer.max_skipped_steps=2",
            "profiler.tool=torch",
            "optim.lr_scheduler_type=constant",
            "optim.lr_warmup_steps_ratio=0",
            "trainer.profile_interval=[2,9]",
            "profiler.torch.trace=interval",
        ),
        returncode=1,
    )
    assert "the gradient was not finite in 3 of 4 updates" in done.stderr
    last = metrics(tmp_path)[-1]["step"] + 1
    [(name, events)] = recorded(tmp_path).items()
    assert name == f"step_2/interval/torch_step2-{last}_rank0.json"
    assert {"data", "train_batch"} <= events


@pytest.mark.slow
def test_a_mistake_is_one_line_before_the_model_is_loaded(assets, tmp_path):
    done = run(
        [
            sys.executable,
            "train_ppo.py",
            *arguments(
                assets,
                tmp_path,
                PROBE,
                "profiler.msprobe.stages=[compute_values]",
                "data.max_prompt_length=60",
                "rollout.max_tokens=60",
                "validation.max_tokens=60",
            ),
        ],
        returncode=2,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert lines[0].endswith("these are rollout_generate, actor_update")
    assert not (tmp_path / "config.yaml").exists()


# -- NUMA ------------------------------------------------------------------------------------------


@pytest.fixture
def cpus():
    """The CPUs of this process; afterwards all of its threads get them back."""
    before = os.sched_getaffinity(0)
    yield before
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), before)


def test_all_threads_move_to_the_devices_node(tmp_path, cpus):
    if len(cpus) < 2:
        pytest.skip("one CPU leaves nothing to choose")
    here = max(cpus)
    (tmp_path / "local_cpulist").write_text(f"{here},4000-4003\n")
    message = affinity.bind_near(tmp_path)
    assert message == f"bound to 1 of {len(cpus)} CPUs"
    for thread in os.listdir("/proc/self/task"):
        assert os.sched_getaffinity(int(thread)) == {here}


@pytest.mark.parametrize(
    "cpulist, message", [("4000-4003\n", "this process may not use"), ("0-4095\n", "bound to ")]
)
def test_an_earlier_choice_of_cpus_stays(tmp_path, cpus, cpulist, message):
    (tmp_path / "local_cpulist").write_text(cpulist)
    assert message in affinity.bind_near(tmp_path)
    assert os.sched_getaffinity(0) == cpus


def test_on_the_real_machine(cpus):
    assert affinity.parse_cpulist("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}
    assert affinity.parse_cpulist("\n") == set()
    line = affinity.bind(torch.device(torch.accelerator.current_accelerator() or "cpu"))
    assert line.startswith("NUMA affinity for ")
    assert os.sched_getaffinity(0) <= cpus
    assert "not bound, because of " in affinity.bind(torch.device("meta")), "never fatal"
    for device in Path("/sys/bus/pci/devices").glob("*"):
        assert affinity.bind_near(device).startswith("bound to ")


@pytest.mark.slow
def test_a_process_does_not_count_the_memory_of_its_parent(tmp_path):
    child = "from engines.parallel import device; print(device.memory()['perf/memory_peak_gib'])"
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys\n"
        "held = b'x' * (1 << 30)\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)\n"
    )
    alone = float(run([sys.executable, "-c", child]).stdout)
    with_parent = float(run([sys.executable, tmp_path / "parent.py"]).stdout)
    assert 0.1 < alone < 0.8
    assert with_parent == pytest.approx(alone, abs=0.2)
