"""Track which stage every rank is in, so that the error after a hang names the missing ranks.

The file {directory}/{host} holds one Record for each rank of a node. All ranks enter the same
stages in the same order, so a rank that has entered fewer stages than another is late.
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
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from common.counting import shortened

RECORD_BYTES = 256
POLL_SECONDS = 5.0
# How often to read records of which a network file system shows only a part, within POLL_SECONDS.
NUM_READS = 10
# The errors of reading half a record.
INCOMPLETE = (OSError, ValueError, TypeError)


@dataclass
class Record:
    """The stage that a rank is in.

    Attributes:
        entered: number of stages that the rank has entered.
        stage: the current stage.
        step: the step that the stage belongs to, or None.
        since: when the rank entered the stage (seconds since the epoch, by its own clock).
        alive: when the rank last wrote this record.
        has_timed_out: whether the rank has waited in a collective that timed out.
        host: the rank's node if the run has several, taken from the file's name; otherwise "".
    """

    rank: int
    entered: int = 0
    stage: str = ""
    step: int | None = None
    since: float = 0.0
    alive: float = 0.0
    has_timed_out: bool = False
    host: str = ""


class Heartbeat:
    """Call enter(stage) where a stage begins; a thread watches the records of all ranks.

    The run ends with a one-line error if, for timeout_minutes,

    * a rank is late and no rank enters a new stage;
    * a rank's record is not updated, because its node is lost or its process is stopped; or
    * ranks hang in a collective on the accelerator, which raises no error by itself.

    Attributes:
        explain_out_of_memory: returns the error for a rank that has run out of device memory, from
            (rank, stage, step). None until the run has set it.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        local_rank: int,
        timeout_minutes: float,
        seconds_in_collective: Callable[[], float],
    ):
        """
        Args:
            seconds_in_collective: returns how long this rank has been in the accelerator's oldest
                unfinished collective.
        """
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.rank = rank
        self.offset = local_rank * RECORD_BYTES
        self.limit = timeout_minutes * 60
        self.interval = min(POLL_SECONDS, self.limit / 4)
        self.file = os.open(directory / socket.gethostname(), os.O_RDWR | os.O_CREAT, 0o644)
        self.record = Record(rank)
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.seconds_in_collective = seconds_in_collective
        # By rank: the number of polls since its record last changed, and since its stage did.
        self.unchanged_polls: Counter[int] = Counter()
        self.polls_in_stage: Counter[int] = Counter()
        self.enter("start")
        self.explain_out_of_memory: Callable[[int, str, int | None], str] | None = None
        self.excepthook = sys.excepthook
        sys.excepthook = self._explain
        threading.Thread(target=self._watch, daemon=True).start()

    def enter(self, stage: str, step: int | None = None) -> None:
        """Record that this rank enters a stage."""
        with self.lock:
            self.record.entered += 1
            self.record.stage = stage
            self.record.step = step
            self.record.since = time.time()
            self._write()

    def _refresh(self) -> None:
        with self.lock:
            self._write()

    def _write(self) -> None:
        self.record.alive = time.time()
        line = json.dumps(asdict(self.record)).ljust(RECORD_BYTES - 1) + "\n"
        os.pwrite(self.file, line.encode(), self.offset)

    def records(self) -> list[Record]:
        """Return the records of all ranks that have started, by rank.

        Raises OSError, ValueError or TypeError while a network file system shows half a record.
        """
        records = []
        files = list(self.directory.iterdir())
        for file in files:
            host = file.name if len(files) > 1 else ""
            text = file.read_bytes().replace(b"\0", b"").decode()
            for line in filter(str.strip, text.splitlines()):
                records.append(replace(Record(**json.loads(line)), host=host))
        return sorted(records, key=lambda record: record.rank)

    def _complete_records(self) -> list[Record]:
        """Read the records until they are complete; return [] if they stay incomplete."""
        for _ in range(NUM_READS):
            with suppress(*INCOMPLETE):
                return self.records()
            time.sleep(POLL_SECONDS / NUM_READS)
        return []

    def _watch(self) -> None:
        # Count polls rather than seconds: clocks differ between nodes, and the whole job may have
        # been suspended for a while.
        previous = []
        # Poll at fixed times, however long reading takes: all ranks must reach the limit together.
        due = time.monotonic() + self.interval
        while not self.ended.wait(max(0.0, due - time.monotonic())):
            due = max(due + self.interval, time.monotonic())
            with suppress(*INCOMPLETE):  # it is read again soon
                self._refresh()
                records = self.records()
                self._count_polls(records, previous)
                previous = records
                self._end_if_late(records)
            if self.seconds_in_collective() > self.limit:
                cause = self.explain_timeout()
                records = self._complete_records()
                waiting = [record for record in records if record.has_timed_out] or [self.record]
                subject = "the others" if len(waiting) < len(records) else "they"
                self._end(f"{cause}; {subject}", waiting)

    def _count_polls(self, records: list[Record], previous: list[Record]) -> None:
        """Count the polls since each rank's record last changed, and since it entered its stage."""
        entered = {record.rank: record.entered for record in previous}
        unchanged = [record.rank for record in records if record in previous]
        in_stage = [r.rank for r in records if r.entered == entered.get(r.rank)]
        self.unchanged_polls = Counter({r: self.unchanged_polls[r] + 1 for r in unchanged})
        self.polls_in_stage = Counter({r: self.polls_in_stage[r] + 1 for r in in_stage})

    def _end_if_late(self, records: list[Record]) -> None:
        """End the run if ranks are silent, or if they are late and no rank enters a new stage."""
        limit = self.limit / self.interval
        late = [record for record in records if self.unchanged_polls[record.rank] > limit]
        if not late and all(self.polls_in_stage[record.rank] > limit for record in records):
            most_entered = max(record.entered for record in records)
            late = [record for record in records if record.entered < most_entered]
        if late:
            waiting = [record for record in records if record not in late]
            stage = self.record.stage
            self._end(
                f"{self._describe(late)}, while the other ranks wait in stage {stage!r}; they",
                waiting,
            )

    def _end(self, cause: str, waiting: list[Record]) -> None:
        """End this process; the first of the waiting ranks prints the cause.

        The other ranks wait until then, since torchrun ends all ranks as soon as one has ended.
        """
        if self.rank == min(record.rank for record in waiting):
            print_error(f"{cause} waited for trainer.timeout_minutes={self.limit / 60:g}")
        else:
            time.sleep(2 * POLL_SECONDS)
        os._exit(1)

    def _explain(self, kind, error, traceback) -> None:
        """Explain an error that ends the run in one line, if it is one of these:

        * this rank has run out of device memory;
        * a collective has timed out, or lost its connection: name the missing ranks.

        This method replaces sys.excepthook.
        """
        if is_out_of_memory(error) and self.explain_out_of_memory:
            print_error(self.explain_out_of_memory(self.rank, self.record.stage, self.record.step))
            return
        is_runtime_error = issubclass(kind, RuntimeError)
        if is_runtime_error and "timed out" in str(error).lower():
            minutes = self.limit / 60
            cause = self.explain_timeout()
            print_error(f"{cause}; they waited for trainer.timeout_minutes={minutes:g}: {error}")
            return
        lost_connection = is_runtime_error and "by peer" in str(error)
        gone = self.find_lost() if lost_connection else []
        if not gone:
            self.excepthook(kind, error, traceback)
            return
        gone_ranks = {record.rank for record in gone}
        alive_ranks = {record.rank for record in self._complete_records()} - gone_ranks
        if self.rank == min(alive_ranks, default=self.rank):
            print_error(
                f"{self._describe(gone)}: {error}; look for its own error. If there is none, "
                "check whether its node is lost, or the kernel has killed it for lack of memory "
                "(dmesg)"
            )

    def find_lost(self) -> list[Record]:
        """Return the records of lost ranks, which are no longer updated."""
        # If the rendezvous is lost as well, torchrun sends SIGTERM at once.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        before = self._complete_records()
        time.sleep(2 * self.interval)
        return [record for record in self._complete_records() if record in before]

    def explain_timeout(self) -> str:
        """Describe the ranks missing from this stage, after a collective of this rank timed out."""
        with self.lock:
            self.record.has_timed_out = True
            self._write()
        time.sleep(POLL_SECONDS)  # the other ranks time out at about the same time
        records = self._complete_records()
        if not records:
            return (
                f"the files in {self.directory} cannot be read, so nobody knows which ranks the "
                f"others wait for in stage {self.record.stage!r}"
            )
        missing = [record for record in records if not record.has_timed_out]
        if missing:
            return self._describe(missing)
        hosts = list(dict.fromkeys(record.host for record in records))
        advice = ""
        if len(hosts) > 1:
            advice = f" (check the network between {shortened(hosts)})"
        return (
            f"all ranks wait in stage {self.record.stage!r}: they entered different collectives, "
            f"or cannot reach each other{advice}"
        )

    def _describe(self, records: list[Record]) -> str:
        """Describe where missing ranks were last seen."""
        places = []
        for record in records:
            on_host = f" on {record.host}" if record.host else ""
            of_step = f" of step {record.step}" if record.step is not None else ""
            # By the rank's own clock until it was silent, since clocks differ between nodes.
            seconds_silent = self.unchanged_polls[record.rank] * self.interval
            minutes = (record.alive - record.since + seconds_silent) / 60
            places.append(
                f"rank {record.rank}{on_host} was last seen in stage {record.stage!r}{of_step}, "
                f"entered {minutes:.1f} minutes ago"
            )
        ranks = "1 rank is" if len(records) == 1 else f"{len(records)} ranks are"
        return f"{ranks} missing: {'; '.join(places)}"

    def close(self) -> None:
        """Stop watching."""
        self.ended.set()
        sys.excepthook = self.excepthook


def print_error(text: str) -> None:
    """Print an error to standard error, on a line of its own even below a progress bar."""
    tqdm.write(f"error: {text}", file=sys.stderr)
    sys.stderr.flush()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that device memory has run out.

    torch has a class for that. vLLM's allocator, which maps memory when its engine wakes up, and
    CUDA's own libraries raise a plain RuntimeError with CUDA's message.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and "cuda error" in text and "out of memory" in text
