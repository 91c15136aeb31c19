"""Rewards on real answers, and their grading: order, failures that stay with their sample, processes that end."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

import rewards
from config import InputError
from examples.arithmetic import make_rows
from rewards import REWARDS, find
from rollout.grading import Failure, Grader, check_failures

ROOT = Path(__file__).parents[1]
LIMIT, SLACK = 1.5, 20.0        # seconds: the time limit of an item here, and what a busy machine may add


# ---- rewards ----

@pytest.mark.parametrize("response, answer, score", [
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
])
def test_exact_match(response, answer, score):
    assert rewards.exact_match("any", response, {"answer": answer}) == score


def test_exact_match_takes_every_reply_of_the_example_and_no_other():
    rows = make_rows()[1]
    replies = [row["messages"][1]["content"] for row in rows]
    assert any(", " in reply for reply in replies) and any(", " not in reply for reply in replies)
    for row, reply in zip(rows, replies):
        assert rewards.exact_match("", reply, row) == 1.0
        assert rewards.exact_match("", reply + "0", row) == rewards.exact_match("", "1" + reply, {"answer": "x"}) == 0.0


@pytest.mark.parametrize("response, answer, score", [
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
])
def test_math(response, answer, score):
    assert rewards.math("any", response, {"answer": answer}) == score


def test_math_works_in_a_thread():
    """Where the library's own time limits, which are signals, do not."""
    scores = []
    thread = threading.Thread(target=lambda: scores.append(rewards.math("", r"\boxed{\frac{2}{4}}", {"answer": "0.5"})))
    thread.start()
    thread.join()
    assert scores == [1.0]


def test_math_refuses_an_answer_that_it_cannot_read():
    with pytest.raises(ValueError, match="cannot read"):
        rewards.math("", "5", {"answer": ""})


@pytest.mark.parametrize("prompt, response, row, score", [
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
])
def test_format(prompt, response, row, score):
    assert rewards.format(prompt, response, row) == score


@pytest.mark.parametrize("name", ["exact_match", "math"])
def test_a_missing_answer_is_an_error(name):
    for row in ({"result": 5}, {"result": 5, "answer": None}):
        with pytest.raises(KeyError, match='no "answer", only result'):
            REWARDS[name]("", "5", row)


# ---- finding a function ----

def test_names_and_files(tmp_path):
    assert {name: find(name) for name in REWARDS} == REWARDS
    (tmp_path / "beside.py").write_text("BONUS = 2\n")
    (tmp_path / "config.py").write_text(
        "from beside import BONUS\nfrom rewards import exact_match\n\n"
        "def twice(prompt, response, row):\n    return BONUS * exact_match(prompt, response, row)\n")
    function = find(f"{tmp_path}/config.py:twice")
    assert function("", "5", {"answer": 5}) == 2.0
    import config
    assert Path(config.__file__) == ROOT / "config.py", "a user's file must not take the place of ours"


BROKEN = {
    "exact_mach": "the nearest is exact_match",
    "nowhere.py:f": "nowhere.py: no such file",
    "good.py:lenght": "has no function 'lenght'; the nearest is good.py:length",
    "good.py": "has no function ''; the nearest is good.py:",
    "good.py:NUMBER": "has no function 'NUMBER'",
    "good.py:two": "must take (prompt, response, row): too many positional arguments",
    "empty.py:f": "empty.py has no function 'f'",
    "syntax.py:f": "cannot be imported: SyntaxError",
    "missing.py:f": "missing.py:2 cannot be imported: ModuleNotFoundError: No module named 'not_there'",
    "leaves.py:f": "leaves.py:1 cannot be imported: SystemExit",
}


@pytest.fixture
def broken(tmp_path, monkeypatch):
    for name, text in {
            "good": "NUMBER = 1\ndef length(prompt, response, row): return len(response)\ndef two(a, b): return 0\n",
            "empty": "", "syntax": "def f(:\n", "missing": "\nimport not_there\n", "leaves": "raise SystemExit(0)\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("function", BROKEN)
def test_what_cannot_be_found_says_what_to_change(broken, function):
    with pytest.raises(InputError) as raised:
        find(function)
    assert str(raised.value).startswith(f"reward.function={function}") and BROKEN[function] in str(raised.value)


def test_importing_is_light():
    code = "import sys, rewards, rollout.grading; print({'torch', 'transformers', 'sympy', 'numpy'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.stdout.strip() == "set()", out.stderr


# ---- grading ----

BEHAVE = '''
import ctypes, os, re, signal, subprocess, sys, time
from pathlib import Path


def behave(prompt, response, row):
    if response == "raise":
        return 1 / row["zero"]
    if response == "hang":              # holds the interpreter's lock: no thread and no signal handler can run
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
'''


@pytest.fixture(scope="module")
def behave(tmp_path_factory):
    file = tmp_path_factory.mktemp("user") / "behave.py"
    file.write_text(BEHAVE)
    return f"{file}:behave"


@pytest.fixture(scope="module")
def shared(behave):
    """One grader of two workers for the tests that do not count its processes: it must outlive every failure."""
    with closing(Grader(behave, 2, SLACK)) as grader:
        yield grader


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition):
    deadline = time.monotonic() + SLACK
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def grade(grader, *responses, **row):
    return grader.grade([("prompt", response, row) for response in responses])


def test_order_is_kept(tmp_path):
    (tmp_path / "late.py").write_text(
        "import time\ndef late(prompt, response, row):\n    time.sleep(row['seconds'])\n    return int(response)\n")
    with closing(Grader(f"{tmp_path}/late.py:late", 3, 30)) as grader:
        items = [("", str(i), {"seconds": (i * 7 % 5) / 100}) for i in range(40)]
        assert grader.grade(items) == list(map(float, range(40)))
        assert grader.grade([]) == []


def test_items_are_graded_side_by_side(behave, tmp_path):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    with closing(Grader(behave, 2, SLACK)) as grader:
        assert not any(isinstance(r, Failure) and r.kind == "timed out" for r in grader.grade(
            [("", "meet", {"mine": a, "other": b}), ("", "meet", {"mine": b, "other": a})]))
    with closing(Grader(behave, 1, LIMIT)) as grader:
        a, b = str(tmp_path / "c"), str(tmp_path / "d")
        first, _ = grader.grade([("", "meet", {"mine": a, "other": b}), ("", "meet", {"mine": b, "other": a})])
        assert first.kind == "timed out", "the pair above met only because there were two workers"


def test_numbers(shared):
    good = {"1": 1.0, "True": 1.0, "-0.1": -0.1, "10**20": 1e20, "environment": 1.0,
            "__import__('numpy').float32(0.5)": 0.5, "__import__('fractions').Fraction(1, 4)": 0.25}
    assert grade(shared, *good) == list(good.values())
    assert all(type(r) is float for r in grade(shared, *good))
    bad = ["float('nan')", "float('inf')", "None", "'1'", "b'1'", "[1.0]", "1j", "10**400"]
    results = grade(shared, *bad)
    assert [r.kind for r in results] == ["not a number"] * len(bad)
    shown = ["nan", "inf", *bad[2:-1], "1" + "0" * 199]
    assert [r.trace for r in results] == [f"the function returned {value}" for value in shown]


def test_a_function_that_raises(shared, behave):
    result, leaving = grade(shared, "raise", "leave", zero=0)
    assert (result.kind, result.row, result.response) == ("raised", {"zero": 0}, "raise")
    line = BEHAVE.split("\n").index('        return 1 / row["zero"]') + 1
    assert f'behave.py", line {line}, in behave' in result.trace and "ZeroDivisionError" in result.trace
    assert leaving.kind == "raised" and "SystemExit: 3" in leaving.trace


def test_functions_that_hang_are_killed(behave, tmp_path):
    pid = tmp_path / "pid"
    with closing(Grader(behave, 2, LIMIT)) as grader:
        start = time.monotonic()
        results = grade(grader, "1", "hang", "2", "stubborn", "3", "parent", "4", pid=str(pid))
        assert LIMIT <= time.monotonic() - start < 3 * LIMIT + SLACK
        assert results[::2] == [1.0, 2.0, 3.0, 4.0]
        assert [(r.kind, r.trace) for r in results[1::2]] == [("timed out", "took more than 1.5 s")] * 3
        wait_until(lambda: gone(int(pid.read_text())))
        assert grade(grader, "5", "6", "7") == [5.0, 6.0, 7.0]


def test_functions_that_end_their_process(shared, behave, tmp_path):
    pid = tmp_path / "pid"
    results = grade(shared, "1", "exit", "2", "crash", "3", "killed", "4")
    assert results[::2] == [1.0, 2.0, 3.0, 4.0]
    assert [(r.kind, r.trace) for r in results[1::2]] == [
        ("died", "ended with exit code 3"), ("died", "ended by signal SIGSEGV"),
        ("died", "ended by signal SIGKILL (out of memory?)")]
    with closing(Grader(behave, 1, SLACK)) as grader:
        start = time.monotonic()
        forked, = grade(grader, "fork", pid=str(pid))
        assert forked.trace == "ended with exit code 3" and time.monotonic() - start < SLACK
    wait_until(lambda: gone(int(pid.read_text())))


def test_what_a_function_prints_and_reads_is_not_the_protocol(behave, capfd):
    with closing(Grader(behave, 1, SLACK)) as grader:
        assert grade(grader, "print", "2", "print") == [1.0, 2.0, 1.0]
    out, err = capfd.readouterr()
    assert out == "" and all(err.count(f'{{"reward": {n}}}') == 2 for n in (5, 6, 7))


def test_large_and_odd_text(shared):
    long = repr("\u2028\r\n\ud800" * 200_000)
    assert grade(shared, f"len({long})", "len(row['x'])", x=["y" * 10**6] * 3) == [800_000.0, 3.0]


def test_workers_start_when_needed_and_live_on(behave):
    me = psutil.Process()
    before = set(me.children())
    with closing(Grader(behave, 3, SLACK)) as grader:
        first, = grade(grader, "pid")
        assert [p.pid for p in set(me.children()) - before] == [first]
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):      # as slurm sends them to every process
            os.kill(int(first), number)
        pids, items = set(), ["time.sleep(0.5) or os.getpid()"] * 3
        thread = threading.Thread(target=lambda: pids.update(grade(grader, *items)))
        thread.start()
        thread.join()
        assert len(pids) == 3 and first in pids
        assert set(grade(grader, *items)) <= pids, "they outlive the thread that started them"
    assert all(gone(int(pid)) for pid in pids)
    assert grade(grader, "2") == [2.0], "closed: it begins anew"
    grader.close()


def test_workers_die_with_a_killed_parent(behave, tmp_path):
    code = f"""if True:
        from rollout.grading import Grader
        items = [("", response, {{"pid": {str(tmp_path / 'pid')!r}}}) for response in ("hang", "parent", "1", "1")]
        Grader({behave!r}, 3, 600).grade(items)"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        wait_until(lambda: len(psutil.Process(parent.pid).children()) == 3)
        time.sleep(1)
        family = psutil.Process(parent.pid).children(recursive=True)
        assert len(family) == 4 and int((tmp_path / "pid").read_text()) in {p.pid for p in family}
        assert parent.poll() is None and not any(gone(p.pid) for p in family)
    finally:
        parent.kill()
        parent.wait()
    for process in family:
        wait_until(lambda: gone(process.pid))


def test_the_working_directory_is_the_users_and_shadows_nothing(tmp_path):
    for name in ("rollout.grading", "rewards", "config", "json"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('shadowed')\n")
    (tmp_path / "mine.py").write_text("def f(prompt, response, row):\n    return len(open('note.txt').read())\n")
    (tmp_path / "note.txt").write_text("12345")
    code = f"""if True:
        import sys
        sys.path[0] = {str(ROOT)!r}
        from rollout.grading import Grader
        grader = Grader("mine.py:f", 1, 20)
        print(grader.grade([("", "", {{}})]))
        grader.close()"""
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert out.stdout.strip() == "[5.0]", out.stderr


@pytest.mark.parametrize("function", ["exact_mach", "good.py:lenght", "missing.py:f"])
def test_a_function_that_cannot_be_imported_is_an_error_at_once(broken, function):
    with pytest.raises(InputError) as raised:
        Grader(function, 2, LIMIT)
    assert BROKEN[function] in str(raised.value)


def test_an_import_may_be_slow_but_not_hang_or_die(tmp_path):
    text = "import os, time\n{}\ndef f(prompt, response, row):\n    return 1\n"
    for name, line in {"slow": f"time.sleep({2 * LIMIT})", "hangs": "time.sleep(600)", "dies": "os._exit(4)"}.items():
        (tmp_path / f"{name}.py").write_text(text.format(line))
    with closing(Grader(f"{tmp_path}/slow.py:f", 1, LIMIT)) as grader:
        assert grade(grader, "x") == [1.0]
    with pytest.raises(InputError, match="while it was imported, its process took more than 1 s"):
        Grader(f"{tmp_path}/hangs.py:f", 1, LIMIT, startup_timeout=1)
    with pytest.raises(InputError, match="while it was imported, its process ended with exit code 4"):
        Grader(f"{tmp_path}/dies.py:f", 1, LIMIT)


def test_math_that_never_ends_is_one_failure():
    with closing(Grader("math", 1, 3 * LIMIT)) as grader:
        row = {"answer": r"\frac{1}{2}"}
        results = grade(grader, r"\boxed{0.5}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{0.25}", **row)
        assert [results[0], results[2]] == [1.0, 0.0]
        assert (results[1].kind, results[1].row) == ("timed out", row)


@pytest.mark.parametrize("num_failures, rate, stops", [
    (0, 0.0, False), (1, 0.0, True), (1, 0.25, False), (2, 0.25, True), (4, 1.0, False), (4, 0.99, True)])
def test_the_share_of_failures_has_a_limit(num_failures, rate, stops):
    failures = [Failure("raised", f"Traceback {i}\nZeroDivisionError\n", {}, "1/0") for i in range(num_failures)]
    results = [1.0] * (4 - num_failures) + failures
    if not stops:
        return check_failures(results, rate)
    with pytest.raises(InputError) as raised:
        check_failures(results, rate)
    assert str(raised.value) == (
        f"{num_failures} of 4 samples ({num_failures / 4:.1%}) could not be graded, more than reward.max_failure_rate="
        f"{rate}; the first: raised: Traceback 0\nZeroDivisionError, for the response '1/0'")


def test_no_results_are_no_failures():
    check_failures([], 0.0)
