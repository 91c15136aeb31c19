"""How the profiler calls its tools: in which order, with which stage, and on which ranks."""

from contextlib import contextmanager

import pytest

from profiling import Profiler
from profiling.tool import Stage, Tool
from tests.profiling.support import configure
from tests.support.ranks import on_ranks


class RecordingTool(Tool):
    """Records its calls in a list that several tools share."""

    def __init__(self, name: str, calls: list):
        self.name = name
        self.calls = calls

    def open(self, step):
        self.calls.append((self.name, "open", step))

    @contextmanager
    def stage(self, stage: Stage):
        self.calls.append((self.name, "enter", stage))
        try:
            yield
        finally:
            self.calls.append((self.name, "leave", stage.name))

    def end_step(self, seconds):
        self.calls.append((self.name, "end_step", [*seconds]))
        return {f"metric of {self.name}": len(seconds)}

    def close(self):
        self.calls.append((self.name, "close"))


def make_profiler(directory, interval=(2, 3)) -> tuple[Profiler, list]:
    """Return a profiler with two tools, and the list of their calls."""
    settings = configure("profiler.tool=torch").profiler
    profiler = Profiler(settings, interval, directory)
    calls = []
    profiler.tools = [RecordingTool("outer", calls), RecordingTool("inner", calls)]
    return profiler, calls


def test_tools_enclose_each_other_and_stages_are_nested(tmp_path):
    profiler, calls = make_profiler(tmp_path)
    profiler.begin_step(2)
    with profiler.stage("validate", "engine"), profiler.stage("reward"):
        pass
    folder = tmp_path / "step_2"
    validate = Stage("validate", 2, folder / "validate", "engine", is_nested=False)
    reward = Stage("reward", 2, folder / "reward", None, is_nested=True)
    assert calls == [
        ("outer", "open", 2),
        ("inner", "open", 2),
        ("outer", "enter", validate),
        ("inner", "enter", validate),
        ("outer", "enter", reward),
        ("inner", "enter", reward),
        ("inner", "leave", "reward"),
        ("outer", "leave", "reward"),
        ("inner", "leave", "validate"),
        ("outer", "leave", "validate"),
    ]
    calls.clear()
    metrics = profiler.end_step()
    assert [name for name in metrics if name.startswith("metric")] == [
        "metric of outer",
        "metric of inner",
    ]
    assert metrics["metric of inner"] == 2
    assert calls == [(name, "end_step", ["reward", "validate"]) for name in ("outer", "inner")]
    calls.clear()
    profiler.close()
    profiler.close()
    assert calls == [("inner", "close"), ("outer", "close")]


def test_a_stage_that_fails_is_left_and_the_next_one_is_not_nested(tmp_path):
    profiler, calls = make_profiler(tmp_path)
    profiler.begin_step(2)
    with pytest.raises(KeyError), profiler.stage("data"):
        raise KeyError
    calls.clear()
    with profiler.stage("save"):
        pass
    assert not calls[0][2].is_nested
    profiler.close()


def test_tools_are_open_from_the_first_step_of_the_interval_to_the_end_of_the_last(tmp_path):
    """Also for a checkpoint that is saved after the last step's metrics."""
    profiler, calls = make_profiler(tmp_path)
    told = []
    profiler.on_stage = lambda name, step: told.append((name, step))
    for step in range(1, 6):
        profiler.begin_step(step)
        profiler.end_step()
        with profiler.stage("save"):
            pass
    assert told == [("save", step) for step in range(1, 6)]
    of_outer = [call[1:] for call in calls if call[0] == "outer" and call[1] != "end_step"]
    kinds = [kind for kind, *_ in of_outer]
    assert kinds == ["open", "enter", "leave", "enter", "leave", "close"]
    assert of_outer[0] == ("open", 2)
    assert [of_outer[i][1].step for i in (1, 3)] == [2, 3]


def tools_on_rank(directory, ranks: str, interval: list[int]) -> list[str]:
    settings = configure("profiler.tool=torch", f"profiler.ranks={ranks}").profiler
    profiler = Profiler(settings, interval, directory, total_steps=9)
    return [type(tool).__name__ for tool in profiler.tools]


@pytest.mark.parametrize(
    "ranks, interval, expected",
    [
        ("[1]", [2, 3], [[], ["Torch"]]),
        ("all", [2, 3], [["Torch"], ["Torch"]]),
        ("all", [9, 9], [["Torch"], ["Torch"]]),
        ("all", [-1, -1], [[], []]),
    ],
)
def test_the_ranks_that_record(tmp_path, ranks, interval, expected):
    assert on_ranks(2, tmp_path, tools_on_rank, tmp_path, ranks, interval) == expected
