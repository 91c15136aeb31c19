"""The program of a reward worker: how it calls functions, and what it reports about them."""

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from config import InputError, load
from rollout.grading.grader import Failure, Grader
from rollout.grading.worker import RewardFunction

FUNCTIONS = """
import asyncio, os, resource

def count(response, row):
    print(f"counts {response}", flush=True)
    if response == "exit":
        os._exit(3)
    row["file"] and open(row["file"], "a").write(response)
    return resource.getrlimit(resource.RLIMIT_DATA)[0]

class Judge:
    async def __call__(self, response):
        print(f"judges {response}", flush=True)
        if response == "late":
            await asyncio.sleep(100)
        if response == "leave":
            raise SystemExit(3)
        if response == "timeout":
            raise TimeoutError("of its own")
        return os.getpid()

judge = Judge()

def group(prompts, responses, rows):
    return [len(p) + 10 * len(r) + 100 * row["n"] for p, r, row in zip(prompts, responses, rows)]

def lenient(response, answer="no answer"):
    return 0.0

def trl(prompts, completions):
    return 0.0

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return 0.0
"""
TIMEOUT = 0.3
SECONDS = 20  # for calls that have to end in time on a busy machine


@pytest.fixture
def make(tmp_path):
    (tmp_path / "score.py").write_text(FUNCTIONS)

    def make(function: str, timeout: float, *settings: str) -> Grader:
        keys = ["model.path=unused", "data.train_files=unused", f"output_dir={tmp_path}"]
        keys += [f"reward.function={tmp_path}/score.py:{function}", f"reward.timeout={timeout}"]
        return Grader(load("ppo.yaml", [*keys, "reward.num_workers=1", *settings]))

    return make


def in_this_process(folder: Path, function: str) -> RewardFunction:
    (folder / "score.py").write_text(FUNCTIONS)
    if function != "math":
        function = f"{folder}/score.py:{function}"
    settings = {
        "function": function,
        "kwargs": {},
        "conversation_keys": ["messages", "prompt"],
        "output": str(folder / "output.txt"),
        "weights": {},
        "step_rewards": False,
    }
    return RewardFunction(settings)


def check(function: RewardFunction, row: dict, columns: Sequence[str] = ()) -> dict:
    request = {"check": True, "prompts": [""], "responses": [""], "rows": [row]}
    return function.respond({**request, "columns": [*columns]})


def test_an_async_call_ends_alone_whatever_it_raises(make):
    """The __call__ of this object is async. Its worker lives on, and its output is kept."""
    with closing(make("judge", TIMEOUT, "reward.concurrency=5")) as grader:
        texts = ["first", "late", "leave", "timeout", "last"]
        results = grader.grade([("", text, {}) for text in texts], range(5))
        (again,) = grader.grade([("", "again", {})], [0])
        output = Path(grader.settings["output"]).read_text()
    first, late, leave, timeout, last = results
    assert (late.kind, late.trace) == ("timed out", f"took more than {TIMEOUT} s")
    assert [result.kind for result in (leave, timeout)] == ["raised", "raised"]
    assert "SystemExit: 3" in leave.trace
    assert "TimeoutError: of its own" in timeout.trace
    assert first.score == last.score == again.score != os.getpid()
    assert sorted(output.splitlines()) == sorted(f"judges {text}" for text in [*texts, "again"])


def test_the_output_of_the_first_call_is_kept_even_if_it_ends_the_worker(make):
    with closing(make("count", SECONDS)) as grader:
        (result,) = grader.grade([("", "exit", {"file": ""})], [0])
        assert isinstance(result, Failure)
        assert result.trace == "ended with exit code 3"
        assert Path(grader.settings["output"]).read_text() == "counts exit\n"


def test_a_function_of_groups_gets_the_prompt_and_the_row_of_each_response(make):
    with closing(make("group", SECONDS)) as grader:
        items = [("p" * i, "r" * (i + 1), {"n": i + 2}) for i in range(4)]
        results = grader.grade(items, [5, 3, 5, 3])
    assert [result.score for result in results] == [210, 321, 432, 543]


def test_a_worker_may_use_as_many_gib_as_configured(make):
    with closing(make("count", SECONDS, "reward.memory_gib=3")) as grader:
        (result,) = grader.grade([("", "a", {"file": ""})], [0])
    assert result.score == 3 * 2**30


def test_a_check_calls_only_functions_that_are_built_in(make, tmp_path):
    """A function of the user may take long, cost money or write files."""
    row = {"file": str(tmp_path / "calls.txt")}
    assert check(in_this_process(tmp_path, "count"), row) == {"notice": ""}
    assert not (tmp_path / "calls.txt").exists()
    error = check(in_this_process(tmp_path, "math"), {"answer": ""})["error"]
    assert error.startswith("reward.function=math: math-verify cannot read the row's answer")
    assert check(in_this_process(tmp_path, "math"), {"answer": "5"}) == {"notice": ""}


def test_a_parameter_keeps_its_default_if_no_row_has_its_column(tmp_path):
    function = in_this_process(tmp_path, "lenient")
    assert check(function, {})["notice"].endswith("score.py:lenient: answer keeps its default")
    assert check(function, {"answer": 5}) == {"notice": ""}
    assert check(function, {}, ["answer"]) == {"notice": ""}, "a later row has the column"


def test_a_check_reports_what_a_row_lacks(make):
    with closing(make("compute_score", SECONDS)) as grader:
        assert grader.check({"data_source": "s", "answer": 5}).startswith("reward.function=")
        with pytest.raises(InputError, match="the row has no data_source, only answer"):
            grader.check({"answer": 5})


@pytest.mark.parametrize("answer", [0, False, ""])
def test_an_answer_that_counts_as_false_is_an_answer(tmp_path, answer):
    """A function may have a default for rows without any."""
    function = in_this_process(tmp_path, "lenient")
    request = {"prompts": ["p"], "responses": ["r"], "rows": [{"answer": answer}]}
    assert function.arguments(request) == {"response": "r", "answer": answer}
    assert function.arguments(request | {"rows": [{"answer": None}]}) == {"response": "r"}


def test_a_function_of_trl_gets_the_messages_before_the_last_turn_of_the_assistant(tmp_path):
    """However many messages that turn has."""
    function = in_this_process(tmp_path, "trl")
    question = {"role": "user", "content": "q"}
    replies = [{"role": "assistant", "content": text} for text in "ab"]
    rows = [{"messages": [question, *replies[:n]]} for n in range(3)]
    arguments = function.arguments({"prompts": ["p"] * 3, "responses": [*"xyz"], "rows": rows})
    assert arguments["prompts"] == [[question]] * 3
    completions = [[{"role": "assistant", "content": text}] for text in "xyz"]
    assert arguments["completions"] == completions


def test_a_dictionary_without_parts_is_no_number(tmp_path):
    """Functions written for verl return a part that is named score."""
    function = in_this_process(tmp_path, "compute_score")
    (answer,) = function.answers({"score": 0.5, "note": "text"}, {"responses": ["a"]})
    assert answer == {"score": 0.5, "parts": {"score": 0.5}}
    (answer,) = function.answers({}, {"responses": ["a"]})
    assert answer["kind"] == "not a number"
