"""When a run saves and when it stops."""

import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from job import signals
from tests.support.launch import LIMIT, ROOT, environment, heed_signals
from tests.support.ports import unused_port
from tests.support.ranks import on_ranks

CPU = torch.device("cpu")
WAIT_FOR_SIGNALS = """
import sys, time
from job import signals
agreement = signals.Agreement(-1, 30)
if {begins}:
    agreement.begin(1)
print("up", flush=True)
time.sleep(60)
time.sleep(60)
"""

WAIT_FOR_A_RANK = """
from config import load
from job.run import Run
Run.begin(load("sft.yaml", ["model.path=m", "data.train_files=t", "dry_run=true"]))
"""


@pytest.fixture
def one_rank(own_signals):
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still; tests set `now` in seconds."""

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(signals, "time", clock)
    return clock


def saves(agreement: signals.Agreement, step: int) -> bool:
    agreement.update(step, CPU)
    return agreement.save


def test_time_until_a_checkpoint_counts_from_the_loop_and_from_the_last_checkpoint(one_rank, clock):
    agreement = signals.Agreement(save_freq=-1, save_minutes=1)
    clock.now = 100
    agreement.begin(total_steps=10)
    clock.now = 150
    assert not saves(agreement, 1), "the minutes before the loop do not count"
    clock.now = 160
    assert saves(agreement, 2)
    clock.now = 170
    assert not saves(agreement, 3), "a checkpoint was saved ten seconds ago"
    clock.now = 220
    assert saves(agreement, 4)
    assert not agreement.stop


def test_a_checkpoint_by_steps_restarts_the_minutes(one_rank, clock):
    agreement = signals.Agreement(save_freq=3, save_minutes=1)
    clock.now = 0
    agreement.begin(total_steps=10)
    clock.now = 50
    assert saves(agreement, 3)
    clock.now = 70
    assert not saves(agreement, 4), "a checkpoint was saved twenty seconds ago"
    clock.now = 110
    assert saves(agreement, 5)


def test_checkpoints_by_steps_and_after_the_last_one(one_rank):
    agreement = signals.Agreement(save_freq=3, save_minutes=0)
    agreement.begin(total_steps=7)
    saved = [step for step in range(1, 8) if saves(agreement, step)]
    assert saved == [3, 6, 7]


def test_a_signal_saves_and_stops_after_the_step(one_rank, capfd):
    agreement = signals.Agreement(save_freq=-1, save_minutes=0)
    agreement.begin(total_steps=7)
    assert not saves(agreement, 1)
    signal.raise_signal(signal.SIGUSR1)
    assert saves(agreement, 2)
    assert agreement.stop
    assert "SIGUSR1: a checkpoint will be saved after this step" in capfd.readouterr().err


@pytest.mark.parametrize(
    "second, seconds_later, stops",
    [
        (signal.SIGINT, 1.9, False),
        (signal.SIGINT, 2.1, True),
        (signal.SIGTERM, 60, False),
    ],
)
def test_a_ctrl_c_counts_once_and_a_second_signal_of_another_kind_waits(
    one_rank, clock, monkeypatch, capfd, second, seconds_later, stops
):
    """Ranks receive a Ctrl-C twice: from the terminal, and from torchrun."""

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(signals.os, "_exit", leave)
    agreement = signals.Agreement(save_freq=-1, save_minutes=0)
    agreement.begin(total_steps=7)
    signal.raise_signal(signal.SIGINT)
    clock.now = seconds_later
    if stops:
        with pytest.raises(SystemExit, match=str(128 + second)):
            signal.raise_signal(second)
    else:
        signal.raise_signal(second)
    printed = capfd.readouterr().err
    assert printed.count("a checkpoint will be saved after this step") == 1
    assert printed.count("stopped at once") == int(stops)


def test_a_signal_that_is_ignored_stays_ignored(own_signals):
    """Under nohup, a run outlives its terminal."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals.Agreement(save_freq=-1, save_minutes=0)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL


def test_only_rank_0_answers_a_signal(one_rank, monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    agreement = signals.Agreement(save_freq=-1, save_minutes=0)
    agreement.begin(total_steps=7)
    signal.raise_signal(signal.SIGUSR1)
    assert saves(agreement, 1)
    assert capfd.readouterr().err == ""


def decide(rank_with_signal: int | None, rank_with_late_clock: int | None) -> tuple[bool, bool]:
    """Send one rank a signal, or let a minute pass on one rank only; return (stop, save)."""
    agreement = signals.Agreement(save_freq=-1, save_minutes=1)
    agreement.begin(total_steps=7)
    if dist.get_rank() == rank_with_signal:
        signal.raise_signal(signal.SIGUSR1)
    if dist.get_rank() == rank_with_late_clock:
        agreement.saved_at -= 60
    agreement.update(1, CPU)
    return agreement.stop, agreement.save


@pytest.mark.parametrize(
    "rank_with_signal, rank_with_late_clock, decision",
    [(1, None, (True, True)), (None, 0, (False, True)), (None, 1, (False, False))],
)
def test_all_ranks_decide_alike(
    own_signals, tmp_path, rank_with_signal, rank_with_late_clock, decision
):
    """Any rank can receive a signal; time is that of rank 0."""
    decisions = on_ranks(2, tmp_path, decide, rank_with_signal, rank_with_late_clock)
    assert decisions == [decision, decision]


@pytest.mark.parametrize(
    "save_freq, save_minutes, occasions",
    [
        (5, 0.5, "every 5 steps, every 0.5 minutes, when asked to stop"),
        (-1, 0, "when asked to stop"),
    ],
)
def test_the_log_says_when_checkpoints_are_saved(own_signals, save_freq, save_minutes, occasions):
    agreement = signals.Agreement(save_freq, save_minutes)
    assert agreement.describe() == f"checkpoints: {occasions}, and after the last step"


def start_waiting(begins: bool) -> subprocess.Popen:
    """Start a process that has an Agreement and waits for signals."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT_FOR_SIGNALS.format(begins=begins)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        preexec_fn=heed_signals,
    )
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_before_the_first_step_stops_at_once(number):
    process = start_waiting(begins=False)
    process.send_signal(number)
    lines = process.communicate(timeout=LIMIT)[1].splitlines()
    assert lines == ["", f"{number.name}: stopped at once"]
    assert process.returncode == 128 + number


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_second_ctrl_c_stops_at_once(number):
    process = start_waiting(begins=True)
    process.send_signal(number)
    assert process.stderr.readline() == "\n"
    first = process.stderr.readline()
    assert first.startswith(f"{number.name}: a checkpoint will be saved after this step")
    time.sleep(signals.SECONDS_OF_ONE_CTRL_C + 0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    lines = process.communicate(timeout=LIMIT)[1].splitlines()
    assert lines == ["", "SIGINT: stopped at once"]
    assert process.returncode == 128 + signal.SIGINT


@pytest.mark.slow
def test_a_rank_that_waits_for_another_ends_at_once():
    """Python runs no handler of its own while a rank waits in C++ for the others."""
    port = unused_port()
    ranks = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2")
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT_FOR_A_RANK],
        cwd=ROOT,
        env=environment(**ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
    )
    while process.poll() is None:
        time.sleep(0.2)
        with suppress(OSError), socket.create_connection(("127.0.0.1", int(port))):
            break
    time.sleep(0.5)
    process.terminate()
    try:
        assert process.wait(timeout=20) == -signal.SIGTERM
    finally:
        process.kill()
