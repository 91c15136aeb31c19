"""Where every rank is, so that a hang names the ranks that did not come.

{directory}/{host} holds one record per rank of a node: the rank, how many stages it has entered, the stage, since when, and when it
was written last: every few seconds. All ranks enter the same stages in the same order, so a rank with a lower number is behind.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

RECORD_BYTES = 256
POLL_SECONDS = 5.0


class Heartbeat:
    """enter(stage) where a stage begins; a thread watches the other ranks' records."""

    def __init__(
        self,
        directory: Path,
        rank: int,
        local_rank: int,
        timeout_minutes: float,
        seconds_in_collective: Callable[[], float],
    ):
        """timeout_minutes: a rank that is behind the others, while neither moves for this long, ends the run with one line. So
        does one whose record nobody writes for this long (the node is lost, or the process stands still), and one that the
        others of its stage have waited for in a collective of the accelerator, which raises no error."""
        directory.mkdir(exist_ok=True)
        self.directory, self.rank, self.offset, self.limit = (
            directory,
            rank,
            local_rank * RECORD_BYTES,
            timeout_minutes * 60,
        )
        self.interval = min(POLL_SECONDS, self.limit / 4)
        self.file = os.open(directory / socket.gethostname(), os.O_RDWR | os.O_CREAT, 0o644)
        self.record, self.lock, self.ended = (
            {"rank": rank, "entered": 0},
            threading.Lock(),
            threading.Event(),
        )
        self.seconds_in_collective = seconds_in_collective
        self.enter("start")
        self.excepthook, sys.excepthook = sys.excepthook, self._explain
        threading.Thread(target=self._watch, daemon=True).start()

    def enter(self, stage: str, step: int | None = None) -> None:
        self._write(entered=self.record["entered"] + 1, stage=stage, step=step, since=time.time())

    def _write(self, **changes) -> None:
        with self.lock:
            self.record |= changes | {"alive": time.time()}
            os.pwrite(
                self.file,
                json.dumps(self.record).ljust(RECORD_BYTES - 1).encode() + b"\n",
                self.offset,
            )

    def records(self) -> list[dict]:
        """Of all ranks that have begun."""
        found = [
            json.loads(line)
            for file in self.directory.iterdir()
            for line in file.read_bytes().replace(b"\0", b"").decode().splitlines()
            if line.strip()
        ]
        return sorted(found, key=lambda record: record["rank"])

    def _watch(self) -> None:
        unchanged, before = Counter(), []
        while not self.ended.wait(self.interval):
            try:
                self._write()
                now, records = time.time(), self.records()
            except (
                OSError,
                ValueError,
            ):  # read while it is written, on a network's file system: the next look is soon
                continue
            # Looks are counted, not seconds: clocks differ between nodes, and a whole job may have been suspended.
            unchanged = Counter(
                {
                    record["rank"]: unchanged[record["rank"]] + 1
                    for record in records
                    if record in before
                }
            )
            before, first = records, max(record["entered"] for record in records)
            late = [
                record
                for record in records
                if unchanged[record["rank"]] * self.interval > self.limit
            ]
            if not late and all(now - record["since"] > self.limit for record in records):
                late = [record for record in records if record["entered"] < first]
            if late:
                self._end(
                    f"{describe(late, now)}, while the other ranks wait in stage {self.record['stage']!r}; they",
                    [record for record in records if record not in late],
                )
            if self.seconds_in_collective() > self.limit:
                told = self.timed_out()
                self._end(
                    f"{told}; the others",
                    [record for record in self.records() if record.get("waited")],
                )

    def _end(self, told: str, waiting: list[dict]) -> None:
        """The first of the ranks that wait tells. The others let it: torchrun ends every rank as soon as one has ended."""
        if self.rank == min(record["rank"] for record in waiting):
            say(f"{told} waited for trainer.timeout_minutes={self.limit / 60:g}")
        else:
            time.sleep(2 * POLL_SECONDS)
        os._exit(1)

    def _explain(self, kind, error, traceback) -> None:
        """In the place of sys.excepthook: a collective that timed out, or whose connection broke, names the ranks that it waited
        for."""
        if issubclass(kind, RuntimeError) and "timed out" in str(error).lower():
            say(
                f"{self.timed_out()}; they waited for trainer.timeout_minutes={self.limit / 60:g}: {error}"
            )
        elif issubclass(kind, RuntimeError) and "by peer" in str(error) and (gone := self.gone()):
            if self.rank == min(
                record["rank"] for record in self.records() if record["rank"] not in gone
            ):
                say(f"{describe([*gone.values()], time.time())}: {error}")
        else:
            self.excepthook(kind, error, traceback)

    def gone(self) -> dict[int, dict]:
        """The records that nobody writes any more, by rank."""
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # torchrun sends it at once where the rendezvous is lost, too
        before = self.records()
        time.sleep(2 * self.interval)
        return {record["rank"]: record for record in self.records() if record in before}

    def timed_out(self) -> str:
        """Called by a rank whose collective has timed out: names the ranks of the same stage that did not come."""
        self._write(waited=True)
        time.sleep(POLL_SECONDS)  # the others' timeouts come at about the same time
        missing = [record for record in self.records() if not record.get("waited")]
        return (
            describe(missing, time.time())
            if missing
            else f"all ranks wait in stage {self.record['stage']!r}: they entered different collectives, or do not reach each other"
        )

    def close(self) -> None:
        self.ended.set()
        sys.excepthook = self.excepthook


def say(text: str) -> None:
    tqdm.write(f"error: {text}", file=sys.stderr)  # on a line of its own, not beside the bar
    sys.stderr.flush()


def describe(records: list[dict], now: float) -> str:
    ranks = "; ".join(
        f"rank {r['rank']} was last seen in stage {r['stage']!r}"
        + f" of step {r['step']}" * (r["step"] is not None)
        + f", entered {(now - r['since']) / 60:.1f} minutes ago"
        for r in records
    )
    return f"{len(records)} rank{'s' * (len(records) > 1)} did not come: {ranks}"
