"""The worker's end of a worker process, before and while it calls the user's function.

A worker of a few lines, which imports nothing else, runs the statements of its requests.
"""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from rollout.grading.process import Ending, Program, WorkerProcess
from tests.support.launch import ROOT

WORKER = """
import asyncio, os, sys, time
from rollout.grading.program import OutputFile, serve, serve_async, start

channel = start(int(sys.argv[1]))
print("printed by the import", flush=True)
os.write(1, b"written by the import\\n")
settings = channel.read()
output = OutputFile(settings["output"])
names = {}

def respond(request):
    output.redirect()
    exec(request["code"], globals(), names)
    return {"result": names.get("result")}

async def respond_async(request):
    exec(request["code"], globals(), names)
    return {"result": await names["result"]}

channel.reply(settings["token"])
if settings["is_async"]:
    asyncio.run(serve_async(channel, respond_async))
else:
    serve(channel, respond)
"""
SECONDS = 20  # for an answer, on a busy machine
SHORT = 2.0  # for an answer that another process must not delay


def start(output: Path, is_async: bool = False) -> WorkerProcess:
    command = [sys.executable, "-S", "-c", WORKER]
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    settings = {"output": str(output), "is_async": is_async}
    program = Program("reward.function=f.py:f", command, environment, settings)
    return WorkerProcess(program, SECONDS)


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "reward_output" / "of a rank" / "rank_0.txt"


@pytest.fixture
def worker(output):
    worker = start(output)
    yield worker
    worker.kill()


def run(worker: WorkerProcess, code: str, seconds: float = SECONDS):
    worker.send({"code": code}, seconds, [0])
    received = worker.receive()
    return received and received[1]["result"]


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + SECONDS
    while not all(map(has_ended, pids)):
        assert time.monotonic() < deadline, "a process lives on"
        time.sleep(0.01)


def test_a_function_cannot_read_the_requests(worker):
    """Otherwise, it would wait for input, and take away the next request."""
    code = """
import subprocess
of_program = subprocess.run("cat", stdout=subprocess.PIPE).stdout
result = [sys.stdin.read(), os.read(0, 9).decode(), of_program.decode()]
"""
    assert run(worker, code) == ["", "", ""]
    assert run(worker, "result = 5") == 5


def test_all_output_goes_to_the_file_and_none_of_it_is_an_answer(worker, output):
    assert not output.exists(), "a dry run leaves nothing"
    code = """
print("printed")
print("printed as an error", file=sys.stderr)
os.write(1, b"written\\n")
os.system("echo echoed")
result = "an answer"
"""
    for _ in range(2):
        assert run(worker, code) == "an answer"
    written = ["printed", "printed as an error", "written", "echoed"]
    of_import = ["printed by the import", "written by the import"]
    lines = output.read_text().splitlines()
    assert lines[:2] == of_import
    # Python writes what was printed when it likes.
    assert sorted(lines[2:]) == sorted(2 * written)


def test_the_output_of_a_worker_follows_that_of_an_earlier_one(worker, output):
    run(worker, "print('first')")
    worker.kill()
    later = start(output)
    run(later, "print('second')")
    later.kill()
    lines = output.read_text().splitlines()
    assert lines.index("first") < lines.index("second")
    assert lines.count("printed by the import") == 2


def test_a_crash_leaves_a_trace_in_the_output(worker, output):
    assert run(worker, "os.kill(os.getpid(), 11)") is None
    assert worker.ending == Ending("died", "ended by signal SIGSEGV")
    assert "Fatal Python error: Segmentation fault" in output.read_text()


def test_the_end_of_a_worker_is_noticed_although_its_fork_lives_on(worker):
    """The fork has left the worker's session, so it is not killed with it."""
    code = f"""
if os.fork() == 0:
    os.setsid()
    time.sleep({2 * SHORT})
    os._exit(0)
os._exit(3)
"""
    assert run(worker, code, SHORT) is None
    assert worker.ending == Ending("died", "ended with exit code 3")
    assert worker.expired is None, "its time was not up"


def test_signals_that_all_processes_of_a_job_get_do_not_end_a_worker(worker):
    """The parent handles them. Programs that the function starts can be ended, as usual."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(worker.process.pid, number)
        assert run(worker, "result = 'alive'") == "alive"
    numbers = f"{signal.SIGTERM:d}, {signal.SIGUSR1:d}"
    code = f"""
import subprocess
program = "import signal; print([signal.getsignal(n) == signal.SIG_DFL for n in ({numbers})])"
result = subprocess.run([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE).stdout
result = result.decode()
"""
    assert run(worker, code) == "[True, True]\n"


def test_a_worker_and_its_programs_end_with_their_parent(worker):
    """Even while a program holds the worker: the end of a pipe tells the kernel."""
    code = """
import subprocess
child = subprocess.Popen(["sleep", "100"])
result = [os.getpid(), child.pid]
"""
    pids = run(worker, code)
    assert not any(map(has_ended, pids))
    worker.send({"code": "import re; re.match('(a*)*b', 'a' * 40)"}, SECONDS, [0])
    os.close(worker.lifeline)
    worker.lifeline = os.open(os.devnull, os.O_RDONLY)  # for kill() to close
    wait_until_ended(pids)
    assert worker.receive() is None
    assert worker.ending == Ending("died", "ended by signal SIGKILL (out of memory?)")


def test_async_calls_run_at_the_same_time(output):
    """The first one waits for the last. Others occupy all threads that the event loop has."""
    worker = start(output, is_async=True)
    threads = 40  # more than the event loop's executor has on any machine
    codes = ["event = asyncio.Event(); result = event.wait()"]
    codes.append("import threading; opened = threading.Event(); result = asyncio.sleep(0, 'first')")
    waiting = "asyncio.get_running_loop().run_in_executor(None, opened.wait)"
    codes += [f"result = {waiting}"] * threads
    codes.append("event.set(); opened.set(); result = asyncio.sleep(0, 'last')")
    for call, code in enumerate(codes):
        worker.send({"code": code}, SECONDS, [call])
    results = {}
    for _ in codes:
        received = worker.receive()
        assert received, "a call waits for one that was not read"
        (number,), answer = received
        results[number] = answer["result"]
    assert [results[i] for i in range(len(codes))] == [True, "first", *threads * [True], "last"]
    worker.kill()
