"""Ranks of one process that watch each other: which of them end, and how they explain it."""

import json
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from job import heartbeat as heartbeat_module
from job.heartbeat import Heartbeat, Record

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

LIMIT_SECONDS = 0.4
WAITED = f"waited for trainer.timeout_minutes={LIMIT_SECONDS / 60:g}"


@pytest.fixture
def exits(monkeypatch):
    """The exit codes of ranks that ended; only their watching thread ends here."""
    codes = []

    def end(code: int) -> None:
        codes.append(code)
        raise SystemExit

    monkeypatch.setattr(heartbeat_module.os, "_exit", end)
    monkeypatch.setattr(heartbeat_module, "POLL_SECONDS", 0.1)
    return codes


@pytest.fixture
def make_ranks(tmp_path, exits):
    """Return a function that starts ranks 0 and 1 of a node.

    Its argument is the number of seconds that each rank has been in a collective.
    """
    started = []

    def make(*seconds_in_collective: float) -> list[Heartbeat]:
        for rank, seconds in enumerate(seconds_in_collective):
            minutes = LIMIT_SECONDS / 60
            started.append(
                Heartbeat(tmp_path, rank, rank, minutes, lambda seconds=seconds: seconds)
            )
        return started

    yield make
    for rank in reversed(started):
        rank.close()


@pytest.fixture
def keep_alive():
    """Return a function that updates the records of ranks from now on, as living ranks do."""
    ended = threading.Event()
    threads = []

    def refresh(ranks: tuple[Heartbeat, ...]) -> None:
        while not ended.wait(0.005):
            for rank in ranks:
                rank._refresh()

    def begin(*ranks: Heartbeat) -> None:
        threads.append(threading.Thread(target=refresh, args=(ranks,)))
        threads[-1].start()

    yield begin
    ended.set()
    for thread in threads:
        thread.join()


def wait_for_exits(exits: list[int], number: int) -> None:
    deadline = time.monotonic() + 30
    while len(exits) < number:
        assert time.monotonic() < deadline, f"{len(exits)} ranks ended, not {number}"
        time.sleep(0.01)
    assert exits == [1] * number


@pytest.mark.parametrize("limit, interval", [(0.2, 0.05), (0.4, 0.1), (60.0, 0.1)])
def test_ranks_look_often_and_at_least_four_times_within_the_limit(
    tmp_path, exits, limit, interval
):
    heartbeat = Heartbeat(tmp_path, 0, 0, limit / 60, lambda: 0.0)
    heartbeat.close()
    assert heartbeat.interval == pytest.approx(interval)


def test_a_rank_in_an_earlier_stage_is_named_by_a_waiting_one(make_ranks, exits, capfd):
    late, waiting = make_ranks(0, 0)
    late.enter("reward", 7)
    waiting.enter("reward", 7)
    waiting.enter("actor_update", 7)
    wait_for_exits(exits, 2)
    assert capfd.readouterr().err == (
        "error: 1 rank is missing: rank 0 was last seen in stage 'reward' of step 7, entered 0.0 "
        f"minutes ago, while the other ranks wait in stage 'actor_update'; they {WAITED}\n"
    )


@pytest.mark.parametrize("last_alive", [120.0, 60.0, 0.0])
def test_the_time_in_a_stage_is_by_the_clock_of_the_rank_until_it_is_silent(
    tmp_path, exits, monkeypatch, last_alive
):
    """It is seen after 0, 1 and 2 minutes, and has written no record after `last_alive` seconds."""
    monkeypatch.setattr(heartbeat_module, "POLL_SECONDS", 60.0)
    waiting = Heartbeat(tmp_path, 1, 1, 4.0, lambda: 0.0)
    waiting.close()
    monkeypatch.setattr(heartbeat_module, "POLL_SECONDS", 0.0)  # explaining takes no time
    times = [0.0, 60.0, 120.0]
    previous = []
    for seconds in times:
        records = [Record(0, 2, "reward", 7, since=0.0, alive=min(seconds, last_alive))]
        waiting._count_polls(records, previous)
        previous = records
    (tmp_path / "node1").write_text(json.dumps(asdict(records[0])) + "\n")
    place = "rank 0 on node1 was last seen in stage 'reward' of step 7"
    assert waiting.explain_timeout() == (f"1 rank is missing: {place}, entered 2.0 minutes ago")


@pytest.mark.parametrize("seconds_ahead", [3600, -3600])
def test_a_late_rank_on_a_node_with_another_clock_is_named_in_time(
    make_ranks, exits, capfd, tmp_path, seconds_ahead
):
    """The clock of its node is an hour ahead, or behind."""
    (waiting,) = make_ranks(0)
    waiting.enter("reward", 7)
    waiting.enter("actor_update", 7)
    begin = time.time() + seconds_ahead
    deadline = time.monotonic() + 30
    while not exits:
        assert time.monotonic() < deadline
        late = Record(1, 2, "reward", 7, begin, time.time() + seconds_ahead)
        unfinished = tmp_path.parent / "record"
        unfinished.write_text(json.dumps(asdict(late)) + "\n")
        unfinished.rename(tmp_path / "node1")
        time.sleep(0.01)
    assert exits == [1]
    assert capfd.readouterr().err == (
        "error: 1 rank is missing: rank 1 on node1 was last seen in stage 'reward' of step 7, "
        "entered 0.0 minutes ago, while the other ranks wait in stage 'actor_update'; they "
        f"{WAITED}\n"
    )


def test_ranks_in_one_long_stage_and_ranks_that_go_on_are_left_alone(make_ranks, exits):
    first, second = make_ranks(0, 0)
    for _ in range(6):
        time.sleep(LIMIT_SECONDS / 4)
        first.enter("save")  # the second rank is late, but the first does not wait for it
    for _ in range(6):
        second.enter("save")
    time.sleep(1.5 * LIMIT_SECONDS)
    assert exits == []


@pytest.mark.parametrize(
    "stages_entered",
    [
        lambda poll: (poll // 3 + 1, poll // 3),
        lambda poll: (poll // 3 + 2, 1),
    ],
    ids=["both go on", "one goes on"],
)
def test_no_rank_is_late_while_ranks_enter_new_stages(tmp_path, exits, stages_entered):
    """However many polls there have been: only those within one stage count."""
    watching = Heartbeat(tmp_path, 0, 0, LIMIT_SECONDS / 60, lambda: 0.0)
    watching.close()
    previous = []
    for poll in range(40):
        records = [
            Record(rank, entered, "reward", alive=poll)
            for rank, entered in enumerate(stages_entered(poll))
        ]
        watching._count_polls(records, previous)
        watching._end_if_late(records)
        previous = records
    assert exits == []


def test_the_time_in_a_stage_begins_when_the_rank_enters_it(make_ranks):
    (rank,) = make_ranks(0)
    rank.ended.set()
    (at_start,) = rank.records()
    rank.enter("reward", 7)
    (entered,) = rank.records()
    assert at_start.since < entered.since
    assert entered.entered == at_start.entered + 1
    assert (entered.stage, entered.step) == ("reward", 7)
    rank._refresh()
    (alive,) = rank.records()
    assert alive == replace(entered, alive=alive.alive), "a sign of life changes nothing else"
    assert alive.alive > entered.alive


def test_a_rank_that_writes_no_records_is_named_in_any_stage(make_ranks, exits, capfd):
    silent, waiting = make_ranks(0, 0)
    silent.enter("reward")
    waiting.enter("wake")
    silent.ended.set()
    wait_for_exits(exits, 1)
    assert capfd.readouterr().err == (
        "error: 1 rank is missing: rank 0 was last seen in stage 'reward', entered 0.0 minutes "
        f"ago, while the other ranks wait in stage 'wake'; they {WAITED}\n"
    )


@pytest.mark.parametrize(
    "seconds, num_exits, cause, subject",
    [
        (
            (9, 9),
            2,
            "all ranks wait in stage 'start': they entered different collectives, or ",
            "they",
        ),
        (
            (9, 0),
            1,
            "1 rank is missing: rank 1 was last seen in stage 'start', entered 0.0",
            "the others",
        ),
    ],
)
def test_a_hanging_collective_ends_its_ranks(
    make_ranks, exits, capfd, seconds, num_exits, cause, subject
):
    for rank in make_ranks(*seconds):
        assert rank.limit == LIMIT_SECONDS
    wait_for_exits(exits, num_exits)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {cause}")
    assert line.endswith(f"; {subject} {WAITED}")


def test_an_error_of_a_lost_connection_names_the_lost_ranks(
    make_ranks, keep_alive, capfd, own_signals
):
    first, lost = make_ranks(0, 0)
    error = RuntimeError("Connection closed by peer")
    for rank in (first, lost):
        rank.ended.set()
    keep_alive(first)
    first._explain(RuntimeError, error, None)
    expected = (
        "error: 1 rank is missing: rank 1 was last seen in stage 'start', entered 0.0 minutes"
    )
    assert capfd.readouterr().err.startswith(f"{expected} ago: {error}")
    lost._explain(RuntimeError, error, None)
    assert capfd.readouterr().err == "", "only the first of the ranks that are alive explains it"


def test_other_errors_keep_their_traceback(make_ranks, keep_alive, capfd, own_signals):
    ranks = make_ranks(0, 0)
    for rank in ranks:
        rank.ended.set()  # only the handler of errors is tested
    keep_alive(*ranks)
    for error in (RuntimeError("reset by peer"), RuntimeError("a shape"), ValueError("timed out")):
        sys.excepthook(type(error), error, None)
        printed = capfd.readouterr().err
        # Torch puts the rank in front of it if this process has had a process group.
        assert printed.endswith(f"{type(error).__name__}: {error}\n")
        assert "error: " not in printed


def test_an_error_of_a_timeout_names_the_ranks_that_have_none(make_ranks, capfd):
    first, second = make_ranks(0, 0)
    for rank in (first, second):
        rank.ended.set()
    error = RuntimeError("[gloo] Timed out waiting 1000ms")
    first._explain(RuntimeError, error, None)
    line = capfd.readouterr().err
    assert line.startswith("error: 1 rank is missing: rank 1 was last seen in stage 'start'")
    assert line.endswith(f"; they {WAITED}: {error}\n")


def test_an_error_of_a_timeout_on_all_nodes_names_them(make_ranks, tmp_path, capfd):
    (first,) = make_ranks(0)
    first.ended.set()
    other = Record(1, 1, "start", has_timed_out=True)
    (tmp_path / "node1").write_text(json.dumps(asdict(other)) + "\n")
    first._explain(RuntimeError, RuntimeError("[gloo] Timed out waiting 1000ms"), None)
    line = capfd.readouterr().err
    assert "or cannot reach each other (check the network between " in line
    assert "node1" in line.partition("network between ")[2].partition(")")[0]


HALF_RECORD = '{"rank": 1, "ent'
WHOLE_RECORD = json.dumps(asdict(Record(1, 1, "start"))) + "\n"
# Seconds during which a rank reads records that are incomplete.
SECONDS_OF_READS = 2.0
# Seconds between two looks at the records. A busy machine may delay a thread for a part of this.
INTERVAL = 0.5


@pytest.mark.parametrize(
    "error, texts",
    [
        # Read after SECONDS_OF_READS, in which the other ranks time out.
        ("Timed out waiting 1000ms", {0.0: HALF_RECORD, 2.75: WHOLE_RECORD}),
        # Read at once, and again after two intervals.
        ("Connection closed by peer", {0.0: HALF_RECORD, 0.6: WHOLE_RECORD}),
        (
            "Connection closed by peer",
            {0.0: WHOLE_RECORD, 0.4: HALF_RECORD, 1.6: WHOLE_RECORD},
        ),
    ],
    ids=["timeout", "first reading", "second reading"],
)
@pytest.mark.usefixtures("own_signals")
def test_a_record_that_is_shown_by_halves_is_read_again(
    make_ranks, keep_alive, tmp_path, capfd, monkeypatch, error, texts
):
    """texts: after how many seconds the file of the other node has which content."""
    monkeypatch.setattr(heartbeat_module, "POLL_SECONDS", SECONDS_OF_READS)
    (first,) = make_ranks(0)
    first.ended.set()
    first.interval = INTERVAL
    keep_alive(first)
    file = tmp_path / "node1"
    timers = [threading.Timer(at, write, [file, text]) for at, text in texts.items() if at > 0]
    write(file, texts[0.0])
    for timer in timers:
        timer.start()
    first._explain(RuntimeError, RuntimeError(error), None)
    for timer in timers:
        timer.join()
    line = capfd.readouterr().err
    assert line.startswith("error: 1 rank is missing: rank 1 on node1 was last seen")


def write(file: Path, text: str) -> None:
    """Replace a file's content, such that no reader sees an empty file."""
    unfinished = file.parent.with_name(file.name)
    unfinished.write_text(text)
    unfinished.rename(file)


def test_records_that_stay_incomplete_do_not_hide_the_error(
    make_ranks, tmp_path, capfd, own_signals
):
    (first,) = make_ranks(0)
    first.ended.set()
    (tmp_path / "node1").write_text(HALF_RECORD)
    first._explain(RuntimeError, RuntimeError("Timed out waiting 1000ms"), None)
    line = capfd.readouterr().err
    assert line.startswith(f"error: the files in {tmp_path} cannot be read, so nobody knows which")
    assert f"ranks the others wait for in stage 'start'; they {WAITED}" in line
    sys.excepthook(RuntimeError, RuntimeError("Connection closed by peer"), None)
    assert capfd.readouterr().err.endswith("RuntimeError: Connection closed by peer\n")


def test_records_are_those_of_all_nodes_by_rank(make_ranks, tmp_path):
    make_ranks(0, 0)
    others = [Record(3, entered=2, stage="data", step=1), Record(2, stage="start")]
    lines = [json.dumps(asdict(record)) for record in others]
    unused_rank = "\0" * heartbeat_module.RECORD_BYTES
    (tmp_path / "another_node").write_text(unused_rank + " \n".join(lines) + "\n")
    first = Heartbeat(tmp_path, 4, 2, 1, lambda: 0.0)
    first.close()
    records = first.records()
    assert [record.rank for record in records] == [0, 1, 2, 3, 4]
    assert records[3] == replace(others[0], host="another_node")
    assert [record.entered for record in records] == [1, 1, 0, 2, 1]
