"""Reward functions, how they are called, and how samples are graded.

Grading: order, groups, calls in flight, failures that stay with their sample, processes that end.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

import rewards
import train_ppo
from config import InputError, load
from examples.arithmetic import make_rows
from rewards import REWARDS, find
from rollout.grading.grader import (
    EVENT_LOOP_DELAY,
    Failure,
    Grader,
    Reward,
    check_failures,
)
from rollout.grading.process import Ending, worker_environment
from rollout.grading.scores import with_steps
from rollout.grading.signature import Signature

ROOT = Path(__file__).parents[2]
# Seconds: the time limit of items that reach it, and of items that never do.
LIMIT = 1.5
SLACK = 20.0
PATIENCE = 300.0  # seconds that a busy machine may take


# -- rewards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "response, answer, score",
    [
        ("85", "85", 1.0),
        (" 85\n", "85", 1.0),
        ("7+8=15, 4+3+1=8, 85", "85", 1.0),
        ("7+8=15\n4+3+1=8\n85", 85, 1.0),
        ("7+8=15,\n  85", "85", 1.0),
        ("7+8=15, 4+3+1=8, 86", "85", 0.0),
        ("7+8=85", "85", 0.0),
        ("85, 4+3+1=8", "85", 0.0),
        ("7+8=15, 185", "85", 0.0),
        ("the answer is 85", "85", 0.0),
        ("x,85", "85", 0.0),
        ("85.", "85", 0.0),
        ("", "85", 0.0),
        ("1,000", "1,000", 1.0),
        ("1, 2", "1, 2", 1.0),
        ("-7", -7, 1.0),
    ],
)
def test_exact_match(response, answer, score):
    assert rewards.exact_match(response, answer) == score


def test_exact_match_takes_every_reply_of_the_example_and_no_other():
    rows = make_rows()[1]
    replies = [row["messages"][1]["content"] for row in rows]
    assert any(", " in reply for reply in replies)
    assert any(", " not in reply for reply in replies)
    for row, reply in zip(rows, replies):
        assert rewards.exact_match(reply, row["answer"]) == 1.0
        assert rewards.exact_match(reply + "0", row["answer"]) == 0.0
        assert rewards.exact_match("1" + reply, "x") == 0.0


@pytest.mark.parametrize(
    "response, answer, score",
    [
        (r"so it is \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{\dfrac{2}{4}}", r"\frac{1}{2}", 1.0),
        ("The answer is 1/2", r"$\frac12$", 1.0),
        (r"First \boxed{3}. That is not right. Try again: \boxed{4}", "4", 1.0),
        (r"First \boxed{4}. That is not right. Try again: \boxed{3}", "4", 0.0),
        (r"either \boxed{3} or \boxed{4}", "4", 0.0),
        (r"either \boxed{3} or \boxed{4}", r"\{3, 4\}", 1.0),
        (r"$\{2, 1\}$", r"\{1, 2\}", 1.0),
        (r"\boxed{\{1, 3\}}", r"\{1, 2\}", 0.0),
        (r"\boxed{\sqrt{12}}", r"2\sqrt{3}", 1.0),
        (r"\boxed{2}", r"2\sqrt{3}", 0.0),
        (r"\boxed{(1, 2]}", "(1,2]", 1.0),
        (r"\boxed{(1, 2)}", "(1,2]", 0.0),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        (r"\boxed{x = 5}", "5", 1.0),
        ("That makes 1,234 apples.", "1234", 1.0),
        ("50%", "0.5", 1.0),
        (r"\boxed{B}", "B", 1.0),
        (r"\boxed{\pi}", "3.14", 0.0),
        ("no idea", "5", 0.0),
        ("", "5", 0.0),
        (r"\boxed{\frac{1}{", "5", 0.0),
        ("85", 85, 1.0),
    ],
)
def test_math(response, answer, score):
    assert rewards.math(response, answer) == score


def test_math_works_in_a_thread():
    """The library's own time limits are signals, which do not work in threads."""
    scores = []
    thread = threading.Thread(
        target=lambda: scores.append(rewards.math(r"\boxed{\frac{2}{4}}", "0.5"))
    )
    thread.start()
    thread.join()
    assert scores == [1.0]


def test_math_rejects_an_answer_that_it_cannot_read():
    with pytest.raises(ValueError, match="cannot read"):
        rewards.math("5", "")


@pytest.mark.parametrize(
    "prompt, response, row, score",
    [
        ("q", "<think>a\nb</think>\n<answer>5</answer>", {}, 1.0),
        ("q", " <think></think><answer></answer>\n", {}, 1.0),
        ("q", "well <think>a</think><answer>5</answer>", {}, 0.0),
        ("q", "<think>a</think> so <answer>5</answer>", {}, 0.0),
        ("q", "<think>a</think><answer>5</answer><answer>6</answer>", {}, 0.0),
        ("q", "<think>a<think>b</think><answer>5</answer>", {}, 0.0),
        ("q", "<answer>5</answer><think>a</think>", {}, 0.0),
        ("q", "a</think><answer>5</answer>", {}, 0.0),
        ("<|im_start|>assistant\n<think>\n", "a</think><answer>5</answer>", {}, 1.0),
        ("q", "5", {}, 0.0),
        ("q", "x = 5", {"format": r"x = \d+"}, 1.0),
        ("q", "x = 5.", {"format": r"x = \d+"}, 0.0),
        ("q", "a\nb", {"format": "a.b"}, 1.0),
        ("<think>", "a</think><answer>5</answer>", {"format": r"a</think>.*"}, 1.0),
    ],
)
def test_format(prompt, response, row, score):
    assert rewards.format(prompt, response, row) == score


@pytest.mark.parametrize("pattern", [r"x = (\d+", 5])
def test_format_rejects_what_is_no_regular_expression(pattern):
    """As a ValueError, it is reported at the start, in one line with the cause."""
    with pytest.raises(ValueError, match="format .* is not a regular expression"):
        rewards.format("q", "x = 5", {"format": pattern})


@pytest.mark.parametrize("name", ["exact_match", "math"])
def test_built_in_rewards_take_their_answer_from_the_row_or_from_a_place_in_it(name):
    function = REWARDS[name]
    assert call(function, {"answer": 5}, {}) == {"response": "5", "answer": 5}
    place = {"answer": "reward_model.ground_truth"}
    assert call(function, VERL_ROW, place) == {"response": "5", "answer": "5"}
    for row in ({"result": 5}, {"result": 5, "answer": None}):
        with pytest.raises(InputError, match="no answer, only result: set reward.kwargs.answer="):
            call(function, row, {})


# -- finding a function ----------------------------------------------------------------------------


def test_names_and_files(tmp_path):
    assert {name: find(name) for name in REWARDS} == REWARDS
    (tmp_path / "beside.py").write_text("BONUS = 2\n")
    (tmp_path / "config.py").write_text(
        "from beside import BONUS\nfrom rewards import exact_match\n\n"
        "def twice(prompt, response, row):\n"
        "    return BONUS * exact_match(response, row['answer'])\n"
    )
    function = find(f"{tmp_path}/config.py:twice")
    assert function("", "5", {"answer": 5}) == 2.0
    import config

    assert Path(config.__file__) == ROOT / "config.py", (
        "a user's file must not take the place of the built-in one"
    )


BROKEN = {
    "exact_mach": "the nearest is exact_match",
    "nowhere.py:f": "nowhere.py: no such file",
    "good.py:lenght": "has no function 'lenght'; the nearest is good.py:length",
    "good.py": "good.py: name a function; the nearest is good.py:",
    "good:length": "must be path/to/file.py:name; did you mean good.py:length?",
    "good.py:NUMBER": "has no function 'NUMBER'",
    "empty.py:f": "empty.py has no function 'f'",
    "syntax.py:f": "cannot be imported: SyntaxError",
    "missing.py:f": (
        "missing.py:2 cannot be imported: ModuleNotFoundError: No module named 'not_there'"
    ),
    "leaves.py:f": "leaves.py:1 cannot be imported: SystemExit",
}


@pytest.fixture
def broken(tmp_path, monkeypatch):
    for name, text in {
        "good": "NUMBER = 1\ndef length(prompt, response, row): return len(response)\n",
        "empty": "",
        "syntax": "def f(:\n",
        "missing": "\nimport not_there\n",
        "leaves": "raise SystemExit(0)\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("function", BROKEN)
def test_a_function_that_is_not_found_is_an_error_that_tells_what_to_change(broken, function):
    with pytest.raises(InputError) as raised:
        find(function)
    assert str(raised.value).startswith(f"reward.function={function}")
    assert BROKEN[function] in str(raised.value)


def test_math_needs_its_package_before_the_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)  # as if it were not installed
    with pytest.raises(InputError, match=r"^reward.function=math: .*; pip install math-verify$"):
        find("math")
    assert find("exact_match") is REWARDS["exact_match"]


def test_importing_is_light():
    code = (
        "import sys, rewards, rollout.grading.signature; "
        "heavy = {'torch', 'transformers', 'sympy', 'numpy', 'asyncio', 'omegaconf'}; "
        "print(heavy & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.stdout.strip() == "set()", out.stderr


# -- how a function is called ----------------------------------------------------------------------

VERL_ROW = {
    "data_source": "gsm8k",
    "prompt": [{"role": "user", "content": "q"}],
    "extra_info": {"index": 3},
    "reward_model": {"style": "rule", "ground_truth": "5"},
}
TRL_ROW = {
    "prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "before"}],
    "solution": "5",
    "level": 2,
}


def call(function, row, kwargs, responses=("5", "6")):
    """Return the arguments that a function gets for these responses to one prompt."""
    signature = Signature(function, kwargs, ["messages", "prompt"])
    if not signature.convention.takes_groups:
        responses = responses[:1]
    return signature.arguments(["q"] * len(responses), list(responses), [row] * len(responses))


def turn(text):
    return [{"role": "assistant", "content": text}]


# Name of the case: function, row, reward.kwargs, and the arguments that the function gets.
CALLS = {
    "built-in": (
        lambda prompt, response, row: 0,
        {"a": 1},
        {},
        {"prompt": "q", "response": "5", "row": {"a": 1}},
    ),
    "in another order": (
        lambda row, prompt, response: 0,
        {"a": 1},
        {},
        {"prompt": "q", "response": "5", "row": {"a": 1}},
    ),
    "one built-in parameter": (lambda response: 0, {"a": 1}, {}, {"response": "5"}),
    "by name alone": (lambda *, row: 0, {"a": 1}, {}, {"row": {"a": 1}}),
    "all parameters": (
        lambda response, **more: 0,
        {"a": 1},
        {},
        {"prompt": "q", "response": "5", "row": {"a": 1}},
    ),
    "a part of the row": (
        lambda response, ground_truth: 0,
        VERL_ROW,
        {"ground_truth": "reward_model.ground_truth"},
        {"response": "5", "ground_truth": "5"},
    ),
    "the answer": (
        lambda response, answer: 0,
        {"answer": 5},
        {},
        {"response": "5", "answer": 5},
    ),
    "a column": (lambda answer: 0, {"a": 1}, {"answer": "a"}, {"answer": 1}),
    "columns for names of another convention": (
        lambda rows, answer: 0,
        {"a": 1, "b": [2, 3]},
        {"rows": "b", "answer": "a"},
        {"rows": [2, 3], "answer": 1},
    ),
    "a default": (lambda response, scale=2: 0, {"a": 1}, {}, {"response": "5"}),
    "a group": (
        lambda prompts, responses, rows: 0,
        {"a": 1},
        {},
        {"prompts": ["q", "q"], "responses": ["5", "6"], "rows": [{"a": 1}, {"a": 1}]},
    ),
    "a group's column": (
        lambda responses, answers: 0,
        {"a": 1},
        {"answers": "a"},
        {"responses": ["5", "6"], "answers": [1, 1]},
    ),
    "verl": (
        lambda data_source, solution_str, ground_truth, extra_info=None: 0,
        VERL_ROW,
        {},
        {
            "data_source": "gsm8k",
            "solution_str": "5",
            "ground_truth": "5",
            "extra_info": {"index": 3},
        },
    ),
    "verl on our own rows": (
        lambda solution_str, ground_truth, extra_info: 0,
        {"answer": "5"},
        {},
        {"solution_str": "5", "ground_truth": "5", "extra_info": {}},
    ),
    "verl from another column": (
        lambda solution_str, ground_truth: 0,
        VERL_ROW,
        {"ground_truth": "data_source"},
        {"solution_str": "5", "ground_truth": "gsm8k"},
    ),
    "verl's batch": (
        lambda data_sources, solution_strs, ground_truths, extra_infos: 0,
        VERL_ROW,
        {},
        {
            "data_sources": ["gsm8k"] * 2,
            "solution_strs": ["5", "6"],
            "ground_truths": ["5"] * 2,
            "extra_infos": [{"index": 3}] * 2,
        },
    ),
    "TRL": (
        lambda completions, solution, **kwargs: 0,
        TRL_ROW,
        {},
        {
            "prompts": [TRL_ROW["prompt"][:1]] * 2,
            "completions": [turn("5"), turn("6")],
            "solution": ["5", "5"],
            "level": [2, 2],
        },
    ),
    "TRL on messages": (
        lambda prompts, completions, **kwargs: 0,
        {"messages": TRL_ROW["prompt"], "solution": "5"},
        {},
        {
            "prompts": [TRL_ROW["prompt"][:1]] * 2,
            "completions": [turn("5"), turn("6")],
            "messages": [TRL_ROW["prompt"]] * 2,
            "solution": ["5", "5"],
        },
    ),
    "TRL on text": (
        lambda prompts, completions, solution=None: 0,
        {"prompt": "q", "solution": "5", "level": 2},
        {},
        {"prompts": ["q", "q"], "completions": ["5", "6"], "solution": ["5", "5"]},
    ),
    "TRL from another column": (
        lambda completions, solution: 0,
        {"answer": "5"},
        {"solution": "answer"},
        {"completions": ["5", "6"], "solution": ["5", "5"]},
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_parameters_are_bound_by_name(case):
    function, row, kwargs, arguments = CALLS[case]
    assert call(function, row, kwargs) == arguments


# Name of the case: function, row, reward.kwargs, and a part of the error message.
REJECTED = {
    "unknown names": (
        lambda p, r, row: 0,
        {},
        {},
        "its parameter p is unknown in a function that takes response: it may take prompt,",
    ),
    "no names": (lambda *arguments: 0, {}, {}, "it has no known parameter: it may"),
    "any names": (lambda **arguments: 0, {}, {}, "it has no known parameter: it may"),
    "positions": (lambda prompt, response, row, /: 0, {}, {}, "its parameter prompt is unknown"),
    "a name that is not in reward.kwargs": (
        lambda response, truth: 0,
        {"truth": 1},
        {},
        "which you set with reward.kwargs.truth=COLUMN",
    ),
    "one and many": (
        lambda prompt, responses: 0,
        {},
        {},
        "its parameter prompt is unknown in a function that takes responses",
    ),
    "two names for one thing": (
        lambda response, completions: 0,
        {},
        {},
        "it takes response and completions",
    ),
    "a key that is not a parameter": (
        lambda response: 0,
        {},
        {"truth": "a"},
        "it has no parameter truth, but reward.kwargs sets it",
    ),
    "a missing column": (
        lambda response, truth: 0,
        {"a": {"b": 1}, "c": None, "d": 2},
        {"truth": "a.x"},
        "the row has no a.x, only a, a.b, d: set reward.kwargs.truth=COLUMN",
    ),
    "verl's without a source": (
        lambda data_source, solution_str, ground_truth: 0,
        {"answer": 5},
        {},
        "the row has no data_source, only answer",
    ),
    "verl's without a truth": (
        lambda solution_str, ground_truth: 0,
        {"result": 5},
        {},
        "the row has no reward_model.ground_truth, only result",
    ),
    "TRL's without its column": (
        lambda completions, solution: 0,
        {"answer": 5},
        {},
        "the row has no solution, only answer",
    ),
    "TRL's internals": (
        lambda completions, trainer_state: 0,
        {"answer": 5},
        {},
        "the row has no trainer_state",
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_parameters_that_cannot_be_bound_are_errors(case):
    function, row, kwargs, message = REJECTED[case]
    with pytest.raises(InputError) as raised:
        call(function, row, kwargs)
    assert message in str(raised.value)


# -- grading ---------------------------------------------------------------------------------------

BEHAVE = """
import ctypes, os, re, signal, subprocess, sys, time
from pathlib import Path


def behave(prompt, response, row):
    if response == "raise":
        return 1 / row["zero"]
    if response == "hang":              # holds the GIL: no thread and no signal handler can run
        re.match("(a+)+$", "a" * 64 + "b")
    if response == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1)
    if response == "parent":            # of a program that sleeps
        Path(row["pid"]).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        time.sleep(600)
    if response == "fork":              # a child that keeps every pipe, left alone
        child = os.fork()
        if child == 0:
            time.sleep(600)
        Path(row["pid"]).write_text(str(child))
        os._exit(3)
    if response == "exit":
        os._exit(3)
    if response == "leave":
        sys.exit(3)
    if response == "crash":
        ctypes.string_at(0)
    if response == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "print":
        print('{"reward": 5}', flush=True)
        os.write(1, b'{"reward": 6}\\n')
        subprocess.run(["echo", '{"reward": 7}'])
        return 1 if sys.stdin.read() == "" else 0
    if response == "meet":              # the other item of this pair, in another process
        Path(row["mine"]).touch()
        while not Path(row["other"]).exists():
            time.sleep(0.01)
    if response == "environment":
        return os.environ["CUDA_VISIBLE_DEVICES"] == "" and os.environ["OMP_NUM_THREADS"] == "1"
    if response == "pid":
        return os.getpid()
    return eval(response)
"""


@pytest.fixture(scope="module")
def behave(tmp_path_factory):
    file = tmp_path_factory.mktemp("user") / "behave.py"
    file.write_text(BEHAVE)
    return f"{file}:behave"


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Return a function that makes a Grader with this many workers and seconds per item."""

    def make(function, num_workers, timeout, *overrides, startup_timeout=300.0):
        config = load(
            "ppo.yaml",
            [
                "model.path=unused",
                "data.train_files=unused",
                f"output_dir={tmp_path_factory.mktemp('out')}",
                f"reward.function={function}",
                f"reward.num_workers={num_workers}",
                f"reward.timeout={timeout}",
                *overrides,
            ],
        )
        return Grader(config, startup_timeout)

    return make


@pytest.fixture(scope="module")
def shared(make, behave):
    """A grader with two workers for tests that do not count them: it must outlive every failure."""
    with closing(make(behave, 2, SLACK)) as grader:
        yield grader


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def grade(grader, *responses, **row):
    """Return the scores of responses, each in a group of its own, and Failures as they are."""
    items = [("prompt", response, row) for response in responses]
    results = grader.grade(items, range(len(responses)))
    return [r.score if isinstance(r, Reward) else r for r in results]


def test_order_is_kept(make, tmp_path):
    (tmp_path / "late.py").write_text(
        "import time\n"
        "def late(prompt, response, row):\n"
        "    time.sleep(row['seconds'])\n"
        "    return int(response)\n"
    )
    with closing(make(f"{tmp_path}/late.py:late", 3, 30)) as grader:
        items = [("", str(i), {"seconds": (i * 7 % 5) / 100}) for i in range(40)]
        assert grader.grade(items, range(40)) == [Reward(float(i), {}) for i in range(40)]
        assert grader.grade([], []) == []


@pytest.mark.slow
def test_items_are_graded_side_by_side(make, behave, tmp_path):
    def items_that_meet(name, other_name):
        """Return two items, each of which waits until the other one is graded, too."""
        a = str(tmp_path / name)
        b = str(tmp_path / other_name)
        return [("", "meet", {"mine": a, "other": b}), ("", "meet", {"mine": b, "other": a})]

    with closing(make(behave, 2, SLACK)) as grader:
        for result in grader.grade(items_that_meet("a", "b"), [0, 0]):
            assert not (isinstance(result, Failure) and result.kind == "timed out")
    with closing(make(behave, 1, LIMIT)) as grader:
        first, _ = grader.grade(items_that_meet("c", "d"), [0, 0])
        assert first.kind == "timed out", "the pair above met only because there were two workers"


def test_numbers(shared):
    good = {
        "1": 1.0,
        "True": 1.0,
        "-0.1": -0.1,
        "10**20": 1e20,
        "environment": 1.0,
        "__import__('numpy').float32(0.5)": 0.5,
        "__import__('fractions').Fraction(1, 4)": 0.25,
    }
    assert grade(shared, *good) == list(good.values())
    assert all(type(r) is float for r in grade(shared, *good))
    bad = [
        "float('nan')",
        "float('inf')",
        "None",
        "'1'",
        "b'1'",
        "[1.0]",
        "1j",
        "3.5e+38",
        "-3.5e+38",
        "{}",
        "10**400",
    ]
    results = grade(shared, *bad)
    assert [r.kind for r in results] == ["not a number"] * len(bad)
    shown = ["nan", "inf", *bad[2:-1], "1" + "0" * 199]
    assert [r.trace for r in results] == [
        f"the function returned {value}, which is not a finite number in fp32" for value in shown
    ]
    largest = torch.finfo(torch.float32).max
    assert grade(shared, repr(largest)) == [largest]
    assert torch.tensor(3.5e38).isinf()


def test_named_parts(make, behave):
    with closing(make(behave, 1, SLACK)) as grader:
        results = grader.grade(
            [("", "{'correct': True, 'format': 0.2}", {}), ("", "{'a': 1.0, 'b': None}", {})],
            [0, 0],
        )
        assert results[0] == Reward(1.2, {"correct": 1.0, "format": 0.2})
        assert results[1].kind == "not a number"
        assert results[1].summary == (
            "not a number: the function returned {'a': 1.0, 'b': None}, whose parts and sum are "
            "not all finite numbers in fp32"
        )
    with closing(
        make(behave, 1, SLACK, "reward.weights.correct=2", "reward.weights.format=-0.5")
    ) as grader:
        texts = [
            "{'correct': 1, 'format': 0.2, 'length': 9}",
            "{'correct': 1, 'fromat': 0.2}",
            "1.0",
            "{'correct': 3e38, 'format': 0}",
        ]
        weighted, *failed = grader.grade([("", text, {}) for text in texts], range(4))
        assert weighted == Reward(1.9, {"correct": 1.0, "format": 0.2, "length": 9.0}), (
            "a part without a weight is logged only"
        )
        assert [f.kind for f in failed] == ["missing part", "missing part", "not a number"]
        for failure in failed[:2]:
            assert re.search("without the part '(format|correct)'", failure.trace)


def test_parts_are_the_same_for_all(shared):
    texts = ["1/0", "{'a': 1, 'b': 2}", "{'b': 1, 'a': 2}", "{'a': 1}", "1"]
    items = [("", text, {"row": i}) for i, text in enumerate(texts)]
    results = shared.check_parts(items, shared.grade(items, range(5)))
    kinds = [r.kind if isinstance(r, Failure) else r.score for r in results]
    assert kinds == ["raised", 3.0, 3.0, "different parts", "different parts"]
    assert results[3].row == {"row": 3}
    assert results[3].trace == "the function returned the parts a, but at first a, b"
    assert results[4].trace == "the function returned the parts none, but at first a, b"
    later = shared.check_parts(items[3:4], shared.grade(items[3:4], [0]))
    assert later[0].kind == "different parts", "in a later batch, too"


FILE = """
import asyncio, os, re, time
from pathlib import Path
calls = 0
most = 0

def rank(prompts, responses, rows):
    global calls
    calls += 1
    if "raise" in responses:
        raise ValueError("a bad group")
    if "fewer" in responses:
        return [1.0]
    if "text" in responses:
        return "ab"
    if "set" in responses:
        return {1.0, 2.0}
    order = sorted(responses)
    size = len(responses)
    results = [{"rank": order.index(r), "size": size, "calls": calls} for r in responses]
    return [float("nan") if r == "nan" else result for r, result in zip(responses, results)]

async def judge(prompt, response, row):
    global calls, most
    calls, most = calls + 1, max(most, calls + 1)
    try:
        if response == "slow":
            await asyncio.sleep(600)
        if response == "block":
            time.sleep(600)
        if response == "exit":
            os._exit(3)
        if response == "raise":
            raise TimeoutError("of its own")
        await asyncio.sleep(0.3)
        return {"length": len(response), "most": most, "process": os.getpid()}
    finally:
        calls -= 1

async def judge_group(responses):
    await asyncio.sleep(0.01)
    return [len(responses)] * len(responses)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    acc = solution_str == ground_truth
    return {"score": float(acc), "acc": acc, "pred": solution_str, "no": None}

def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
    return [{"score": len(text), "pred": text, "acc": False} for text in solution_strs]

def number(responses):
    return len(responses)

async def first_attempt_hangs(response, path):
    marker = Path(path)
    if response == "exit":
        while not marker.exists():
            await asyncio.sleep(0.01)
        os._exit(3)
    if not marker.exists():
        marker.touch()
        await asyncio.sleep(600)
    return len(response)

def hang(response):
    time.sleep(600)

def accuracy(completions, solution, log_extra=None, **kwargs):
    return [float(turns[0]["content"] == s) for turns, s in zip(completions, solution)]

def remember(response):
    global calls
    calls += 1
    return calls if response != "exit" else os._exit(3)

def allocate(response):
    return len(bytearray(int(response)))

def environment(response):
    return {"secret": "JUDGE_KEY" in os.environ,
            "other": bool({"PYTHON_SECRET", "OTHER_SECRET"} & os.environ.keys()),
            "home": "HOME" in os.environ,
            "oom": int(Path("/proc/self/oom_score_adj").read_text())}

def forge(response):
    answers = b'{"answers": [{"score": 99.0, "parts": {}}], "token": "0123456789abcdef"}\\n'
    if response == "forge":
        for descriptor in range(3, 64):
            try:
                if "pipe" in os.readlink(f"/proc/self/fd/{descriptor}"):
                    os.write(descriptor, answers)
            except OSError:
                pass
    return len(response)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "file.py"
    path.write_text(FILE)
    return path


def test_a_function_of_groups_gets_each_group_in_one_call(make, file):
    with closing(make(f"{file}:rank", 1, SLACK)) as grader:
        texts = [
            "b",
            "x",
            "a",
            "raise",
            "c",
            "y",
            "fewer",
            "d",
            "nan",
            "e",
            "text",
            "z",
            "set",
            "w",
        ]
        groups = [7, 3, 7, 4, 7, 4, 5, 5, 6, 6, 8, 8, 9, 9]
        results = grader.grade([("", text, {"text": text}) for text in texts], groups)
        assert [results[i].parts["rank"] for i in (0, 2, 4, 1, 9)] == [1, 0, 2, 0, 0]
        assert [results[i].parts["size"] for i in (0, 1, 9)] == [3, 1, 2]
        assert results[9].parts["calls"] == 5
        failed = {
            i: (results[i].kind, results[i].row["text"]) for i in (3, 5, 6, 7, 8, 10, 11, 12, 13)
        }
        assert failed == {
            3: ("raised", "raise"),
            5: ("raised", "y"),
            6: ("not a list", "fewer"),
            7: ("not a list", "d"),
            8: ("not a number", "nan"),
            10: ("not a list", "text"),
            11: ("not a list", "z"),
            12: ("not a list", "set"),
            13: ("not a list", "w"),
        }
        assert "not a list of 2" in results[6].trace
        assert "all responses of a group" in grader.check({})


def test_the_first_prompt_is_tried_with_a_group_of_full_size(make, tmp_path, capsys):
    """Before the run, as if each response in the group were the true answer."""
    (tmp_path / "of_three.py").write_text(
        "def f(responses):\n    _, _, _ = responses\n    return [len(r) for r in responses]\n"
    )
    needed = ["model.path=unused", "data.train_files=unused", "rollout.n=3"]
    config = load("ppo.yaml", [*needed, f"reward.function={tmp_path}/of_three.py:f"])
    prompt = SimpleNamespace(text="q", row={"answer": 1234})
    with closing(make(f"{tmp_path}/of_three.py:f", 1, SLACK)) as grader:
        train_ppo.grade_one(config, grader, [prompt])
    assert "gives 4 for the response '1234' to the first prompt" in capsys.readouterr().out


def test_the_first_prompt_is_graded_once_by_a_function_of_single_responses(make, tmp_path):
    (tmp_path / "of_one.py").write_text(
        "from pathlib import Path\n"
        "def f(response, row):\n"
        "    with open(row['log'], 'a') as file:\n"
        "        file.write(response + '\\n')\n"
        "    return 1.0\n"
    )
    needed = ["model.path=unused", "data.train_files=unused", "rollout.n=3"]
    config = load("ppo.yaml", [*needed, f"reward.function={tmp_path}/of_one.py:f"])
    prompt = SimpleNamespace(text="q", row={"log": f"{tmp_path}/log"})
    with closing(make(f"{tmp_path}/of_one.py:f", 1, SLACK)) as grader:
        train_ppo.grade_one(config, grader, [prompt])
    assert (tmp_path / "log").read_text() == "\n", "an empty response, as the row has no answer"


def test_a_function_of_verl_for_a_batch_has_a_score_and_other_parts(make, file):
    with closing(make(f"{file}:compute_scores", 1, SLACK)) as grader:
        results = grader.grade([("q", text, VERL_ROW) for text in ("5", "67")], [0, 0])
    parts = [{"score": 1.0, "acc": 0.0}, {"score": 2.0, "acc": 0.0}]
    assert results == [Reward(1.0, parts[0]), Reward(2.0, parts[1])]


def test_one_number_for_a_group_is_not_a_list(make, file):
    with closing(make(f"{file}:number", 1, SLACK)) as grader:
        results = grader.grade([("q", text, {}) for text in ("5", "67")], [0, 0])
    assert [r.kind for r in results] == ["not a list"] * 2
    assert results[0].trace == "the function returned 2, not a list of 2"


def test_a_call_beside_one_that_ended_the_worker_is_made_again(make, file, tmp_path):
    """Both are in flight when the worker ends: the first attempt of the other one never ends."""
    row = {"marker": str(tmp_path / "marker")}
    function = f"{file}:first_attempt_hangs"
    settings = ("reward.concurrency=2", "reward.kwargs.path=marker")
    with closing(make(function, 1, SLACK, *settings)) as grader:
        items = [("", text, row) for text in ("abc", "exit", "exit", "ab")]
        first, *ended, last = grader.grade(items, range(4))
        kinds = [(result.kind, result.trace) for result in ended]
        assert kinds == [("died", "ended with exit code 3")] * 2
        assert [first, last] == [Reward(3.0, {}), Reward(2.0, {})]


def test_a_call_is_made_again_if_the_time_of_another_one_ended_the_worker(make, file, tmp_path):
    """The time of the other one was over just before its answer was read."""
    marker = tmp_path / "marker"
    function = f"{file}:first_attempt_hangs"
    with closing(make(function, 1, SLACK, "reward.kwargs.path=marker")) as grader:
        (worker,) = grader.idle

        def end_worker_when_the_call_hangs() -> None:
            wait_until(marker.exists)
            worker.expired = "an answered call"
            worker.ending = Ending("timed out", "took too long")
            os.killpg(worker.process.pid, signal.SIGKILL)

        thread = threading.Thread(target=end_worker_when_the_call_hangs)
        thread.start()
        results = grader.grade([("", "ab", {"marker": str(marker)})], [0])
        thread.join()
        assert worker.ending.kind == "timed out"
        assert results == [Reward(2.0, {})]


def test_a_call_that_hangs_ends_its_worker(make, file):
    with closing(make(f"{file}:hang", 1, 0.3)) as grader:
        (worker,) = grader.idle
        (result,) = grade(grader, "1")
        assert (result.kind, result.trace) == ("timed out", "took more than 0.3 s")
        assert grader.idle == []
        assert has_ended(worker.process.pid)


def test_an_async_call_that_is_late_and_one_that_raises_leave_the_worker(make, file):
    with closing(make(f"{file}:judge", 1, 0.5, "reward.concurrency=2")) as grader:
        (worker,) = grader.idle
        late, raised = grade(grader, "slow", "raise")
        assert (late.kind, late.trace) == ("timed out", "took more than 0.5 s")
        assert raised.kind == "raised"
        assert "TimeoutError: of its own" in raised.trace
        assert grader.idle == [worker]


@pytest.mark.slow
def test_a_worker_that_writes_all_the_time_times_out(make, tmp_path):
    """It has found the pipe of the answers, and never ends its line."""
    (tmp_path / "writes.py").write_text(
        "import os, time\n"
        "def judge(response):\n"
        "    while response == 'write':\n"
        "        for number in os.listdir('/proc/self/fd'):\n"
        "            path = f'/proc/self/fd/{number}'\n"
        "            if os.path.exists(path) and 'pipe' in os.readlink(path):\n"
        "                try:\n"
        "                    os.write(int(number), b'x')\n"
        "                except OSError:\n"
        "                    pass\n"
        "        time.sleep(0.01)\n"
        "    return 1.0\n"
    )
    with closing(make(f"{tmp_path}/writes.py:judge", 1, 0.5)) as grader:
        writing, after = grade(grader, "write", "a")
        assert (writing.kind, writing.trace) == ("timed out", "took more than 0.5 s")
        assert after == 1.0


@pytest.mark.slow
def test_a_worker_that_stops_reading_times_out(make, tmp_path):
    """Its calls are larger than a pipe, so sending them would otherwise wait for ever."""
    (tmp_path / "stops.py").write_text(
        "import os, signal\n"
        "async def judge(response, row):\n"
        "    if response == 'stop':\n"
        "        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    return 1.0\n"
    )
    row = {"text": "a" * 2**20}
    items = [("", text, row) for text in ("stop", "a", "b", "c")]
    with closing(make(f"{tmp_path}/stops.py:judge", 1, 0.5, "reward.concurrency=4")) as grader:
        stopped, *others = grader.grade(items, range(4))
        assert stopped.kind == "timed out"
        assert [result.score for result in others] == [1.0] * 3


def test_a_new_worker_may_take_longer_to_start_than_a_call(make, tmp_path):
    (tmp_path / "late.py").write_text(
        "import os, time\ntime.sleep(0.3)\n"
        "def late(response):\n    return 1.0 if response == '1' else os._exit(3)\n"
    )
    with closing(make(f"{tmp_path}/late.py:late", 1, 0.2)) as grader:
        (first,) = grade(grader, "exit")
        assert first.kind in ("died", "timed out")
        (second,) = grade(grader, "1")
        assert second == 1.0 or second.kind == "timed out"  # on a busy machine


def test_the_environment_of_a_worker(monkeypatch):
    variables = {
        "JUDGE_API_KEY": "named",
        "OTHER_API_KEY": "not named",
        "SOMETHING": "not named",
        "LC_TIME": "C",
        "PYTHONHASHSEED": "1",
        "PYTHON_API_KEY": "a secret",
        "PYTHONPATH": f"/one{os.pathsep}/two",
        "CUDA_VISIBLE_DEVICES": "3",
        "OMP_NUM_THREADS": "8",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment = worker_environment(["JUDGE_API_KEY"])
    passed_on = {name for name in variables if name in environment}
    assert passed_on == variables.keys() - {"OTHER_API_KEY", "SOMETHING", "PYTHON_API_KEY"}
    assert environment["PYTHONPATH"] == os.pathsep.join([str(ROOT), "/one", "/two"])
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["PATH"] == os.environ["PATH"]
    monkeypatch.delenv("PYTHONPATH")
    assert worker_environment([])["PYTHONPATH"] == str(ROOT)


@pytest.mark.slow
def test_an_async_function_has_several_calls_in_flight(make, file):
    with closing(make(f"{file}:judge", 2, SLACK, "reward.concurrency=5")) as grader:
        results = grader.grade([("", "a" * i, {}) for i in range(20)], range(20))
        assert [r.parts["length"] for r in results] == list(range(20)), (
            "each answer goes to its own item"
        )
        assert max(r.parts["most"] for r in results) == 5
        assert len({r.parts["process"] for r in results}) == 2
    with closing(make(f"{file}:judge_group", 1, SLACK, "reward.concurrency=4")) as grader:
        assert grade(grader, "a", "b") == [1.0, 1.0]
    with pytest.raises(InputError, match="reward.concurrency=2 has no effect.* is not async"):
        make(f"{file}:remember", 1, SLACK, "reward.concurrency=2")


@pytest.mark.slow
def test_an_async_call_that_is_late_is_cancelled_and_one_that_blocks_is_found(make, file):
    with closing(make(f"{file}:judge", 1, LIMIT, "reward.concurrency=8")) as grader:
        results = grader.grade([("", text, {}) for text in ("a", "slow", "raise", "bb")], range(4))
        assert (results[1].kind, results[1].trace) == ("timed out", "took more than 1.5 s")
        assert results[2].kind == "raised"
        assert "TimeoutError: of its own" in results[2].trace
        later = grader.grade([("", "ccc", {})], [0])
        processes = {r.parts["process"] for r in (results[0], results[3], later[0])}
        assert len(processes) == 1, "the worker lives on"
        texts = ["a", "block", "bb", "exit", "ccc", "dddd"]
        results = grader.grade([("", text, {}) for text in texts], range(6))
        assert [r.kind for r in results if isinstance(r, Failure)] == ["timed out", "died"]
        assert [r.parts["length"] for r in results if isinstance(r, Reward)] == [1, 2, 3, 4], (
            "calls in flight are made again"
        )
        assert results[1].trace == f"took more than {LIMIT + EVENT_LOOP_DELAY:g} s"
        assert results[3].trace == "ended with exit code 3"


def test_functions_of_verl_and_trl_are_called_as_these_do(make, file):
    with closing(make(f"{file}:compute_score", 1, SLACK)) as grader:
        assert grader.check(VERL_ROW) == (
            f"reward.function={file}:compute_score: it is called as verl does; ground_truth is "
            "the row's reward_model.ground_truth, else ground_truth, else answer"
        )
        right, wrong = grader.grade([("q", "5", VERL_ROW), ("q", "6", VERL_ROW)], [0, 0])
        assert right == Reward(1.0, {"score": 1.0, "acc": 1.0})
        assert wrong == Reward(0.0, {"score": 0.0, "acc": 0.0})
        with pytest.raises(
            InputError, match=r"file.py:compute_score: the row has no data_source, only answer"
        ):
            grader.check({"answer": 5})
    with closing(make(f"{file}:accuracy", 1, SLACK)) as grader:
        assert grader.check(TRL_ROW).endswith(
            "as TRL does, with a group and the columns of its rows; log_extra keeps its default"
        )
        right, wrong = grader.grade([("q", "5", TRL_ROW), ("q", "6", TRL_ROW)], [0, 0])
        assert right.score == 1.0
        assert wrong.score == 0.0
    with closing(make("exact_match", 1, SLACK)) as grader:
        assert grader.check({"answer": 5}) == "", "built-in functions need no explanation"
        with pytest.raises(
            InputError,
            match="reward.function=exact_match: the row has no answer, only solution: set",
        ):
            grader.check({"solution": 5})


@pytest.mark.parametrize("parameters", ["response, hint=None", "responses, hint=None"])
def test_a_column_that_a_parameter_would_not_get_is_an_error(make, tmp_path, parameters):
    file = tmp_path / "optional.py"
    file.write_text(f"def f({parameters}):\n    return 1.0\n")
    for row, columns in (({"hint": 5}, []), ({}, ["hint"])):
        with closing(make(f"{file}:f", 1, SLACK)) as grader:
            with pytest.raises(InputError, match="hint would keep its default, although rows have"):
                grader.check(row, columns)
    for row in ({"hint": None}, {"hint": ""}, {}):
        with closing(make(f"{file}:f", 1, SLACK)) as grader:
            assert grader.check(row).endswith("hint keeps its default")
    with closing(make(f"{file}:f", 1, SLACK, "reward.kwargs.hint=hint")) as grader:
        assert "default" not in grader.check({"hint": 5})


def test_an_answer_may_have_a_default(make, tmp_path):
    file = tmp_path / "optional.py"
    file.write_text("def f(response, answer=3):\n    return float(answer)\n")
    rows = [("q", "", {"answer": 5}), ("q", "", {"answer": None}), ("q", "", {})]
    with closing(make(f"{file}:f", 1, SLACK)) as grader:
        assert "default" not in grader.check({"answer": 5})
        assert "default" not in grader.check({}, ["answer"]), "later rows have one"
        assert [result.score for result in grader.grade(rows, [0, 1, 2])] == [5.0, 3.0, 3.0]


def test_the_state_of_a_module_lives_and_dies_with_its_worker(make, file):
    with closing(make(f"{file}:remember", 1, SLACK)) as grader:
        assert grade(grader, "a", "b") == [1.0, 2.0]
        before, ended, *after = grade(grader, "c", "exit", "d", "e")
        assert before == 3.0
        assert ended.kind == "died"
        assert after == [1.0, 2.0]


def test_a_worker_has_a_memory_limit(make, file):
    with closing(make(f"{file}:allocate", 1, SLACK, "reward.memory_gib=0.5")) as grader:
        small, large, after = grade(grader, str(2**20), str(2**30), "1")
        assert (small, after) == (2.0**20, 1.0)
        assert large.kind == "raised"
        assert "MemoryError" in large.trace


def test_secrets_reach_a_worker_only_if_reward_env_names_them(make, file, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    monkeypatch.setenv("OTHER_SECRET", "secret")
    monkeypatch.setenv("PYTHON_SECRET", "secret")
    for overrides, seen in (([], 0.0), (["reward.env=[JUDGE_KEY]"], 1.0)):
        with closing(make(f"{file}:environment", 1, SLACK, *overrides)) as grader:
            assert grader.grade([("", "", {})], [0])[0].parts == {
                "secret": seen,
                "other": 0.0,
                "home": 1.0,
                "oom": 1000.0,
            }
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(
        InputError, match="reward.env names JUDGE_KEY, which is not set in the environment"
    ):
        make(f"{file}:environment", 1, SLACK, "reward.env=[JUDGE_KEY]")


def test_text_that_a_function_writes_into_the_pipe_is_not_an_answer(make, file):
    with closing(make(f"{file}:forge", 1, SLACK)) as grader:
        before, forged, after = grade(grader, "a", "forge", "bb")
        assert (before, after) == (1.0, 2.0)
        assert forged.kind == "forged"


def test_grading_ends_when_too_many_have_failed(make, behave):
    with closing(make(behave, 1, 600)) as grader:
        responses = ["1", "raise", "2", "raise", "raise"] + ["time.sleep(600)"] * 40
        items = [("", response, {"zero": 0}) for response in responses]
        results = grader.grade(items, range(45), max_failures=2)
        assert [r.kind for r in results if isinstance(r, Failure)] == ["raised"] * 3
        assert results[5:] == [None] * 40


@pytest.mark.parametrize(
    "setting, message",
    [
        ("reward.weights.a=much", "reward.weights.a=much must be a number"),
        ("reward.weights.a=yes", "reward.weights.a=True must be a number"),
        ("reward.kwargs.a=5", "reward.kwargs.a=5 must be the name of a column"),
        ("reward.kwargs.a=b", "exact_match: it has no parameter a"),
    ],
)
def test_keys_that_users_add_are_checked(make, setting, message):
    with pytest.raises(InputError) as raised:
        make("exact_match", 1, SLACK, setting)
    assert message in str(raised.value)


def test_a_class_is_rejected_and_its_objects_are_called(make, tmp_path):
    (tmp_path / "judge.py").write_text(
        "class Judge:\n    def __call__(self, response): return 0.5\njudge = Judge()\n"
    )
    with pytest.raises(
        InputError, match="judge.py:Judge is a class: use a function, or an instance of the class"
    ):
        make(f"{tmp_path}/judge.py:Judge", 1, SLACK)
    with closing(make(f"{tmp_path}/judge.py:judge", 1, SLACK)) as grader:
        assert grade(grader, "5") == [0.5]


def workers_of_this_process() -> set[int]:
    children = psutil.Process().children()
    return {child.pid for child in children if "rollout.grading.worker" in child.cmdline()}


def test_a_worker_that_reports_an_error_is_ended(make, tmp_path):
    (tmp_path / "needs.py").write_text("def needs(response, truth): return 0.0\n")
    before = workers_of_this_process()
    with pytest.raises(InputError, match="its parameter truth is unknown"):
        make(f"{tmp_path}/needs.py:needs", 1, SLACK)
    assert workers_of_this_process() == before
    grader = make(f"{tmp_path}/needs.py:needs", 1, SLACK, "reward.kwargs.truth=column")
    with pytest.raises(InputError, match="the row has no column"):
        grader.check({"other": 1})
    assert workers_of_this_process() == before


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_workers_that_have_ended_leave_no_file_open(make, behave):
    """Otherwise a long run whose workers die could not open files any more."""
    before = num_open_files()
    with closing(make(behave, 1, SLACK)) as grader:
        with_a_worker = num_open_files()
        for _ in range(2):
            (result,) = grade(grader, "exit")
            assert result.kind == "died"
        assert grade(grader, "1") == [1.0]
        assert num_open_files() == with_a_worker
    assert num_open_files() == before


def test_a_function_that_raises(shared, behave):
    result, leaving = grade(shared, "raise", "leave", zero=0)
    assert (result.kind, result.row, result.response) == ("raised", {"zero": 0}, "raise")
    line = BEHAVE.split("\n").index('        return 1 / row["zero"]') + 1
    assert f'behave.py", line {line}, in behave' in result.trace
    assert "ZeroDivisionError" in result.trace
    file = behave.removesuffix(":behave")
    assert result.summary == f"raised: ZeroDivisionError: division by zero ({file}:{line})"
    assert leaving.kind == "raised"
    assert "SystemExit: 3" in leaving.trace


TRACE = """Traceback (most recent call last):
  File "/install/rollout/episodes/worker.py", line 5, in run
    play()
  File "/install/rollout/episodes/threads.py", line 9, in call
    return function(*arguments)
  File "/home/user/agent.py", line 10, in solve
    helper(1 / 0)
  File "/home/user/tools.py", line 2, in helper
    raise ValueError("no number")
ValueError: no number
"""


def test_a_summary_names_the_first_line_of_the_users_own():
    failure = Failure("raised", TRACE, {}, "")
    assert failure.summary == "raised: ValueError: no number (/home/user/agent.py:10)"


@pytest.mark.slow
def test_functions_that_hang_are_killed(make, behave, tmp_path):
    pid = tmp_path / "pid"
    with closing(make(behave, 2, LIMIT)) as grader:
        start = time.monotonic()
        results = grade(grader, "1", "hang", "2", "stubborn", "3", "parent", "4", pid=str(pid))
        assert LIMIT <= time.monotonic() - start
        assert results[::2] == [1.0, 2.0, 3.0, 4.0]
        assert [(r.kind, r.trace) for r in results[1::2]] == [
            ("timed out", "took more than 1.5 s")
        ] * 3
        wait_until(lambda: has_ended(int(pid.read_text())))
        assert grade(grader, "5", "6", "7") == [5.0, 6.0, 7.0]


def test_functions_that_end_their_process(make, shared, behave, tmp_path):
    pid = tmp_path / "pid"
    results = grade(shared, "1", "exit", "2", "crash", "3", "killed", "4")
    assert results[::2] == [1.0, 2.0, 3.0, 4.0]
    assert [(r.kind, r.trace) for r in results[1::2]] == [
        ("died", "ended with exit code 3"),
        ("died", "ended by signal SIGSEGV"),
        ("died", "ended by signal SIGKILL (out of memory?)"),
    ]
    with closing(make(behave, 1, SLACK)) as grader:
        (forked,) = grade(grader, "fork", pid=str(pid))
        assert forked.trace == "ended with exit code 3", "its time was not up"
    wait_until(lambda: has_ended(int(pid.read_text())))


def test_functions_may_print_and_read(make, tmp_path, capfd):
    talks = "import os; os.write(1, b'hello from a library\\n'); print('hello from the import')\n"
    (tmp_path / "talks.py").write_text(talks + BEHAVE)
    with closing(make(f"{tmp_path}/talks.py:behave", 1, SLACK)) as grader:
        output = Path(grader.settings["output"])
        assert not output.exists(), "a dry run leaves nothing"
        assert grade(grader, "print", "2", "print", "crash")[:3] == [1.0, 2.0, 1.0]
        assert output.parts[-2:] == ("reward_output", "rank_0.txt")
        text = output.read_text()
    assert text.startswith("hello from a library\nhello from the import\n")
    for number in (5, 6, 7):
        assert text.count(f'{{"reward": {number}}}') == 2
    assert "Segmentation fault" in text
    out, err = capfd.readouterr()
    assert out == ""
    assert err == ""


def test_large_and_odd_text(shared):
    long = repr("\u2028\r\n\ud800" * 200_000)
    assert grade(shared, f"len({long})", "len(row['x'])", x=["y" * 10**6] * 3) == [800_000.0, 3.0]


@pytest.mark.slow
def test_workers_start_when_needed_and_live_on(make, behave):
    me = psutil.Process()
    before = set(me.children())
    with closing(make(behave, 3, SLACK)) as grader:
        (first,) = grade(grader, "pid")
        assert [p.pid for p in set(me.children()) - before] == [first]
        # Slurm sends these signals to every process.
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(int(first), number)
        pids = set()
        items = ["time.sleep(0.5) or os.getpid()"] * 3
        thread = threading.Thread(target=lambda: pids.update(grade(grader, *items)))
        thread.start()
        thread.join()
        assert len(pids) == 3
        assert first in pids
        assert set(grade(grader, *items)) <= pids, "they outlive the thread that started them"
    assert all(has_ended(int(pid)) for pid in pids)
    assert grade(grader, "2") == [2.0], "after close() it starts again"
    grader.close()


@pytest.mark.slow
def test_workers_die_with_a_killed_parent(behave, tmp_path):
    code = f"""if True:
        from config import load
        from rollout.grading.grader import Grader
        row = {{"pid": {str(tmp_path / "pid")!r}}}
        items = [("", response, row) for response in ("hang", "parent", "1", "1")]
        config = load("ppo.yaml", [
            "model.path=unused", "data.train_files=unused", "output_dir={tmp_path}",
            "reward.function={behave}", "reward.num_workers=3", "reward.timeout=600"])
        Grader(config).grade(items, range(4))"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        wait_until(lambda: len(psutil.Process(parent.pid).children()) == 3)
        time.sleep(1)
        family = psutil.Process(parent.pid).children(recursive=True)
        assert len(family) == 4
        assert int((tmp_path / "pid").read_text()) in {p.pid for p in family}
        assert parent.poll() is None
        assert not any(has_ended(p.pid) for p in family)
    finally:
        parent.kill()
        parent.wait()
    for process in family:
        wait_until(lambda: has_ended(process.pid))


@pytest.mark.slow
def test_the_working_directory_is_the_users_and_shadows_nothing(tmp_path):
    for name in ("rollout.grading", "rewards", "config", "json"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('shadowed')\n")
    (tmp_path / "mine.py").write_text(
        "def f(prompt, response, row):\n    return len(open('note.txt').read())\n"
    )
    (tmp_path / "note.txt").write_text("12345")
    code = f"""if True:
        import sys
        sys.path[0] = {str(ROOT)!r}
        from config import load
        from rollout.grading.grader import Grader
        overrides = ["model.path=unused", "data.train_files=unused"]
        grader = Grader(load("ppo.yaml", [*overrides, "reward.function=mine.py:f"]))
        print(grader.grade([("", "", {{}})], [0])[0].score)
        grader.close()"""
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert out.stdout.strip() == "5.0", out.stderr


@pytest.mark.parametrize("function", ["exact_mach", "good.py:lenght", "missing.py:f"])
def test_a_function_that_cannot_be_imported_is_an_error_at_once(make, broken, function):
    with pytest.raises(InputError) as raised:
        make(function, 2, LIMIT)
    assert BROKEN[function] in str(raised.value)


@pytest.mark.slow
def test_an_import_may_be_slow_but_not_hang_or_die(make, tmp_path):
    text = "import os, time\n{}\ndef f(prompt, response, row):\n    return 1\n"
    for name, line in {
        "slow": f"time.sleep({2 * LIMIT})",
        "hangs": "time.sleep(600)",
        "dies": "os._exit(4)",
        "leaves": "os._exit(0)",
    }.items():
        (tmp_path / f"{name}.py").write_text(text.format(line))
    with closing(make(f"{tmp_path}/slow.py:f", 1, LIMIT)) as grader:
        assert grade(grader, "x") == [1.0]
    with pytest.raises(InputError, match="while it was imported, its process took more than 1 s"):
        make(f"{tmp_path}/hangs.py:f", 1, LIMIT, startup_timeout=1)
    for name, code in {"dies": 4, "leaves": 0}.items():
        with pytest.raises(
            InputError, match=f"while it was imported, its process ended with exit code {code}"
        ):
            make(f"{tmp_path}/{name}.py:f", 1, LIMIT)


@pytest.mark.slow
def test_a_worker_that_ends_while_a_row_is_checked_is_reported(make):
    with closing(make("exact_match", 1, SLACK)) as grader:
        grader.idle[-1].process.kill()
        with pytest.raises(InputError, match="while a row was checked, its process ended by"):
            grader.check({"answer": 5})


@pytest.mark.slow
def test_math_that_never_ends_is_one_failure(make):
    with closing(make("math", 1, 10)) as grader:  # a slow machine's first answer takes seconds
        row = {"answer": r"\frac{1}{2}"}
        results = grade(grader, r"\boxed{0.5}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{0.25}", **row)
        assert [results[0], results[2]] == [1.0, 0.0]
        assert (results[1].kind, results[1].row) == ("timed out", row)


@pytest.mark.parametrize(
    "num_failures, rate, stops",
    [
        (0, 0.0, False),
        (1, 0.0, True),
        (1, 0.25, False),
        (2, 0.25, True),
        (4, 1.0, False),
        (4, 0.99, True),
    ],
)
def test_the_share_of_failures_has_a_limit(num_failures, rate, stops):
    trace = 'Traceback\n  File "a.py", line 3, in f\n    1/0\nZero\n  division {}\n'
    failures = [Failure("raised", trace.format(i), {}, "1/0") for i in range(num_failures)]
    if not stops:
        return check_failures(failures, 4, rate)
    with pytest.raises(InputError) as raised:
        check_failures(failures, 4, rate)
    assert str(raised.value) == (
        f"{num_failures} of 4 samples ({num_failures / 4:.1%}) could not be graded, more than "
        f"reward.max_failure_rate={rate}; the first: raised: Zero division 0 (a.py:3), for the "
        "response '1/0' (all failures are in failures.jsonl; the function's output is in "
        "reward_output/)"
    )


def test_a_closed_grader_can_grade_again(make):
    grader = make("exact_match", 1, SLACK)
    for _ in range(2):
        (result,) = grader.grade([("", "85", {"answer": "85"})], [0])
        assert result.score == 1.0
        grader.close()


def test_no_samples_are_no_failures():
    check_failures([], 0, 0.0)


def test_failures_of_earlier_draws_of_the_step_count():
    failures = [Failure("raised", "Zero", {}, "1/0")]
    check_failures(failures, 8, 0.25, num_earlier=1)
    with pytest.raises(InputError, match=r"^3 of 8 samples \(37.5%\) could not be graded"):
        check_failures(failures, 8, 0.25, num_earlier=2)
    check_failures([], 8, 0.25, num_earlier=3)  # reported before


def test_rewards_of_steps_count_in_the_score():
    answer = {"score": 1.0, "parts": {"length": 1.0}}
    steps = [(1, 0.5), (3, -0.25)]
    assert with_steps(answer, steps, "abc", "f") == answer | {
        "score": 1.25,
        "steps": [[1, 0.5], [3, -0.25]],
    }


def test_the_time_of_a_call_ends_with_its_answer(make):
    """Otherwise it would end the worker during a later call."""
    with closing(make("exact_match", 1, SLACK)) as grader:
        grader.grade([("", "85", {"answer": "85"})] * 3, range(3))
        (worker,) = grader.idle
        assert worker.pending == {}
        assert worker.deadlines == {}
