"""A run's directory, locked and shared by all nodes; missing ranks; ranks that outlive torchrun."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from config import InputError
from job import output
from tests.support.launch import LIMIT, ROOT, environment, launch, run, wait_for
from tests.support.ports import unused_port
from tests.support.ranks import on_ranks

HOST = socket.gethostname()
HOLD = """
import sys, time
from pathlib import Path
from job import output
output.Lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""
CHECK_SHARED = """
from pathlib import Path
import config
from engines.parallel import device
from job import output

def main(_):
    device.init()
    output.check_shared(Path({directory!r}), "output_dir", seconds=1.0)
    device.shutdown()

config.run(main, "sft.yaml", "")
"""


def hold(directory):
    """A process that has the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.slow
def test_a_second_run_is_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    process = hold(tmp_path)
    with pytest.raises(InputError, match=f"is in use by process {process.pid} on "):
        output.Lock(tmp_path)
    process.kill()
    process.wait()
    lock = output.Lock(tmp_path)
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    lock.release()
    output.Lock(tmp_path).release()
    assert (tmp_path / ".lock").read_text() == ""


def test_the_lock_of_a_dead_process_names_the_one_that_takes_it(tmp_path):
    """At once, and even if the old record is longer than the new one."""
    file = tmp_path / ".lock"
    file.write_text(json.dumps({"host": HOST, "pid": 1, "since": "long ago", "note": 300 * "x"}))
    start = time.monotonic()
    lock = output.Lock(tmp_path)
    assert time.monotonic() - start < output.WATCH_SECONDS / 2, "nobody else can hold it"
    assert json.loads(file.read_text())["pid"] == os.getpid()
    lock.release()
    assert file.read_text() == ""


def test_a_lock_that_another_process_has_just_taken_holds_before_its_record_is_written(tmp_path):
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="is in use by process None on None"):
            output.Lock(tmp_path)
    output.Lock(tmp_path).release()


def test_a_shared_directory_is_made_with_its_parents_and_may_exist(tmp_path):
    directory = tmp_path / "runs" / "first"
    for _ in range(2):
        assert on_ranks(1, tmp_path, output.check_shared, directory, "output_dir") == [None]
        assert list(directory.iterdir()) == []


def error_of_check(directory: Path) -> str:
    with pytest.raises(InputError) as caught:
        output.check_shared(directory, "data.cache_dir")
    return str(caught.value)


def test_a_directory_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path):
    """Though only rank 0 tries: the others do not wait for its file."""
    (tmp_path / "file").touch()
    directory = tmp_path / "file" / "cache"
    error = (
        f"data.cache_dir={directory} cannot be written: Not a directory; set data.cache_dir to a "
        "directory in which you may write"
    )
    assert on_ranks(2, tmp_path, error_of_check, directory) == [error, error]


def test_a_lock_of_another_host_holds_as_long_as_it_is_touched(tmp_path, monkeypatch):
    """As on a file system whose locks hold on one host alone."""
    monkeypatch.setattr(output, "LOOK_SECONDS", 0.01)
    file = tmp_path / ".lock"
    record = {"host": "elsewhere", "pid": 1, "since": "2026-01-01 00:00:00"}
    file.write_text(json.dumps(record))
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(0.05):
            os.utime(file)

    toucher = threading.Thread(target=touch)
    toucher.start()
    try:
        with pytest.raises(InputError, match="process 1 on elsewhere, since 2026-01-01"):
            output.Lock(tmp_path)
    finally:
        ended.set()
        toucher.join()
    monkeypatch.setattr(output, "WATCH_SECONDS", 0.1)
    output.Lock(tmp_path).release()
    assert file.read_text() == ""


def test_without_flock_a_lock_of_this_host_holds_as_long_as_it_is_touched(tmp_path, monkeypatch):
    """As on a network file system that has no locks."""

    def no_flock(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(output.fcntl, "flock", no_flock)
    monkeypatch.setattr(output, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(output, "TOUCH_SECONDS", 0.05)
    lock = output.Lock(tmp_path)
    with pytest.raises(InputError, match=f"is in use by process {os.getpid()} on {HOST},"):
        output.Lock(tmp_path)
    lock.release()
    file = tmp_path / ".lock"
    file.write_text(json.dumps({"host": HOST, "pid": 1, "since": "long ago"}))  # it was killed
    monkeypatch.setattr(output, "WATCH_SECONDS", 0.1)
    output.Lock(tmp_path).release()


def test_a_lock_whose_file_is_deleted_is_taken_again(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "TOUCH_SECONDS", 0.05)
    file = tmp_path / ".lock"
    lock = output.Lock(tmp_path)
    for _ in range(2):
        file.unlink()
        wait_until(lambda: file.exists() and file.read_text())
        with pytest.raises(InputError, match=f"is in use by process {os.getpid()} on {HOST},"):
            output.Lock(tmp_path)
    os.utime(file, (0, 0))
    wait_until(lambda: file.stat().st_mtime > 0)
    lock.release()
    assert file.read_text() == ""
    file.unlink()
    time.sleep(0.5)
    assert not file.exists(), "a lock that is released is not taken again"


def test_a_lock_that_another_run_has_taken_meanwhile_is_left_to_it(tmp_path, monkeypatch):
    """Whether the file was there again before this run looked, or came while it looked."""
    monkeypatch.setattr(output, "TOUCH_SECONDS", 600)
    file = tmp_path / ".lock"
    lock = output.Lock(tmp_path)
    lock.ended.set()
    file.unlink()
    other = output.Lock(tmp_path)
    record = file.read_text()
    os.utime(file, (0, 0))
    monkeypatch.setattr(output, "TOUCH_SECONDS", 0.05)
    lock.ended.clear()
    threading.Thread(target=lock._touch, daemon=True).start()
    time.sleep(0.5)
    assert file.stat().st_mtime == 0, "another run's file is not touched"
    lock._take_again()
    lock.release()
    assert file.read_text() == record
    other.release()
    assert (tmp_path / ".lock").read_text() == ""


def test_a_lock_that_could_not_be_written_is_written_later(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "TOUCH_SECONDS", 0.05)
    file = tmp_path / ".lock"
    lock = output.Lock(tmp_path)
    record = file.read_text()
    os.truncate(file, 0)  # as a full disk leaves it
    wait_until(lambda: file.read_text() == record)
    lock.release()


def wait_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_directory_that_nodes_do_not_share_is_an_error(tmp_path, is_shared):
    """Two nodes of one rank, each with a working directory of its own."""
    directory = str(tmp_path / "run") if is_shared else "run"
    code = CHECK_SHARED.format(directory=directory)
    group = environment(
        LOCAL_RANK="0",
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=unused_port(),
        PYTHONPATH=str(ROOT),
    )
    processes = []
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        process = subprocess.Popen(
            [sys.executable, "-c", code, "model.path=m", "data.train_files=t"],
            cwd=tmp_path / str(rank),
            env=group | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
    for process in processes:
        stderr = process.communicate(timeout=LIMIT)[1]
        assert process.returncode == (0 if is_shared else 2), stderr
        if not is_shared:
            assert "output_dir=run on" in stderr
            assert "all nodes share" in stderr
    first = tmp_path / "run" if is_shared else tmp_path / "0" / "run"
    assert list(first.iterdir()) == [], "no marker is left"


def check_from_own_folder(folder: Path, shown_after: float | None) -> str | None:
    """Check a relative directory, which rank 1 sees late or, with None, never. Return the error."""
    rank = dist.get_rank()
    os.chdir(folder / str(rank))
    if rank == 1 and shown_after is not None:
        link = threading.Timer(shown_after, os.symlink, [folder / "0" / "run", "run"])
        link.start()
    try:
        output.check_shared(Path("run"), "output_dir", seconds=30 if shown_after else 0.2)
    except InputError as error:
        return str(error)


def test_a_directory_that_a_node_shows_late_is_shared(tmp_path):
    """The file by which ranks recognize it stays until all of them have seen it."""
    for rank in "01":
        (tmp_path / rank).mkdir()
    assert on_ranks(2, tmp_path, check_from_own_folder, tmp_path, 0.05) == [None, None]
    assert list((tmp_path / "0" / "run").iterdir()) == []


def test_a_directory_that_a_node_never_shows_is_an_error_on_all_ranks(tmp_path):
    for rank in "01":
        (tmp_path / rank).mkdir()
    error = f"output_dir=run on {HOST} is not the directory that rank 0 writes to: choose one on a"
    for message in on_ranks(2, tmp_path, check_from_own_folder, tmp_path, None):
        assert message.startswith(error)
    assert list((tmp_path / "0" / "run").iterdir()) == []


HANGS = {
    where: f"1 rank is missing: rank 1 was last seen in stage '{stage}' of step 7, entered "
    for where, stage in (("earlier", "reward"), ("same", "actor_update"))
}


@pytest.mark.slow
@pytest.mark.parametrize("where, said", HANGS.items())
def test_a_hang_names_the_rank_that_did_not_come(tmp_path, where, said):
    done = launch(
        2, "tests/job/hang_worker.py", tmp_path, where, returncode=1, timeout=400
    )  # less than it would sleep
    assert done.stderr.count(said) == 1, done.stderr
    assert (
        "Traceback (most recent call last)" not in done.stderr.split("error: 1 rank is missing")[0]
    )
    # On one rank, which the records of those two would keep from a long stage.
    run([sys.executable, "tests/job/hang_worker.py", tmp_path, "alone"], PYTHONPATH=str(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGSTOP", "SIGKILL"])
def test_a_rank_that_gives_no_sign_of_life_is_named_whatever_the_others_wait_for(tmp_path, number):
    """As on a node without power, whose connections stay, and as on one that reboots.

    Without torchrun, which ends a stopped rank late.
    """
    env = environment(
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=unused_port(),
        PYTHONPATH=str(ROOT),
    )
    stopped, waiting = (
        subprocess.Popen(
            [sys.executable, "tests/job/hang_worker.py", tmp_path, number],
            cwd=ROOT,
            text=True,
            stderr=subprocess.PIPE,
            env=env | {"RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in "01"
    )
    try:
        if number == "SIGKILL":
            stopped.wait(LIMIT)
            time.sleep(2)
            waiting.terminate()  # as torchrun does
        said = waiting.communicate(timeout=LIMIT)[1]
    finally:
        stopped.kill()
        waiting.kill()
    assert waiting.returncode == 1
    assert "error: 1 rank is missing: rank 0 was last seen in stage 'start', entered " in said
    assert "Traceback" not in said
    if number == "SIGKILL":
        assert "; look for its own error. If there is none, check whether its node" in said


@pytest.mark.slow
@pytest.mark.parametrize("when", ["during the imports", "while they train"])
def test_ranks_end_when_torchrun_is_killed(tmp_path, when):
    code = tmp_path / "sleep.py"
    begin = (
        "import os, time; from pathlib import Path; from engines.parallel import device; "
        f"up = Path({str(tmp_path)!r}, 'up' + os.environ['RANK'])\n"
    )
    code.write_text(
        begin
        + (
            "up.touch(); time.sleep(5); device.init()"
            if when == "during the imports"
            else "device.init(); up.touch(); time.sleep(600)"
        )
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", code],
        env=environment(PYTHONPATH=str(ROOT)),
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: (tmp_path / "up0").exists() and (tmp_path / "up1").exists(), process)
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 300
    while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
        assert time.monotonic() < end, "a rank goes on by itself"
        time.sleep(0.1)


def test_a_lock_is_touched_while_its_run_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "TOUCH_SECONDS", 0.05)
    before = threading.enumerate()
    lock = output.Lock(tmp_path)
    (thread,) = [thread for thread in threading.enumerate() if thread not in before]
    assert thread.daemon, "otherwise the process would never end"
    os.utime(lock.path, (0, 0))
    deadline = time.monotonic() + 20
    while lock.path.stat().st_mtime == 0:
        assert time.monotonic() < deadline, "nobody touches the lock's file"
        time.sleep(0.05)
    lock.release()
