"""Stages, the steps that are recorded, traces, and mistakes in the settings."""

import json
import sys
import time

import pytest
import torch

from config import InputError
from job import setup as job
from profiling import Profiler, is_selected
from tests.profiling.support import CPU, ON, PROBE, configure, dumping, profile, recorded


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


@pytest.mark.parametrize(
    "settings, expected",
    [
        ([], ("statistics", "L0")),
        (["profiler.msprobe.task=tensor", "profiler.msprobe.level=mix"], ("tensor", "mix")),
        (["profiler.msprobe.config_path={tmp}/own.json"], ("tensor", "L1")),
        (
            ["profiler.msprobe.config_path={tmp}/own.json", "profiler.msprobe.level=mix"],
            ("tensor", "mix"),
        ),
        (
            ["profiler.msprobe.config_path={tmp}/own.json", "profiler.msprobe.task=statistics"],
            ("statistics", "L1"),
        ),
        (["profiler.msprobe.config_path={tmp}/empty.json"], ("statistics", "L0")),
    ],
)
def test_keys_of_the_run_come_before_those_of_msprobes_own_file(tmp_path, settings, expected):
    (tmp_path / "own.json").write_text('{"task": "tensor", "level": "L1"}')
    (tmp_path / "empty.json").write_text("{}")
    pairs = [pair.replace("{tmp}", str(tmp_path)) for pair in settings]
    (tool,) = dumping(tmp_path, *pairs).tools
    assert (tool.task, tool.level) == expected


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


@pytest.mark.parametrize(
    "settings, message",
    [
        (["profiler.torch.with_stack=true"], "torch.with_stack=True does nothing without profiler"),
        (["profiler.tool=nvtx", "profiler.memory.max_entries=5"], "without profiler.tool=memory"),
        (["profiler.ranks=all"], "profiler.ranks=all does nothing without profiler.tool: set it"),
    ],
)
def test_a_setting_of_a_tool_that_is_not_used_is_an_error(settings, message):
    with pytest.raises(InputError, match=message):
        job.start_profiler(configure(*settings), CPU, 10, ["train_batch"])
    job.start_profiler(configure("profiler.synchronize=true"), CPU, 10, ["train_batch"])
