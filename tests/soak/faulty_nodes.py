"""The loop faults: one of two nodes stays in the network, but is not as it should be."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.soak.killed import Loop
from tests.soak.lost_nodes import (
    KEEP_ALL,
    SECONDS_OF_RUN,
    error_lines,
    launch,
    seconds_until_ended,
    undisturbed_results,
    wait_for_moment,
    with_nodes,
)
from tests.soak.processes import descendants, wait_for_all
from tests.soak.runs import differences, first_step_of, last_step, newest_checkpoint
from tests.support.launch import ROOT
from tests.support.nodes import Nodes

CODE = "algorithms/kl.py"
DISK_MILLISECONDS = 200
SECONDS_TO_STOP = 90


class Faults:
    """The faults of a loop, as methods: each takes a folder, and returns what went wrong.

    nodes     the two nodes
    expected  the results of an undisturbed run
    library   tests/soak/faults.c, compiled
    """

    def __init__(self, loop: Loop, nodes: Nodes, expected: dict[str, object], library: Path):
        self.loop = loop
        self.nodes = nodes
        self.expected = expected
        self.library = library

    def hang(self, folder: Path) -> list[str]:
        """All processes of a node are stopped (SIGSTOP)."""
        return self.hang_with(folder, KEEP_ALL)

    def hang_with_another_clock(self, folder: Path) -> list[str]:
        """The same with clocks that are an hour apart, and so they are in the resumed run."""
        hour = self.loop.rng.choice([3600, -3600])
        preload = f"export LD_PRELOAD={self.library} FAULT_CLOCK={hour}"
        return self.hang_with(folder, ("true", preload))

    def hang_with(self, folder: Path, before: tuple[str, str]) -> list[str]:
        node = self.loop.rng.choice([0, 1])
        processes = self.start(folder, "log0", before)
        wait_for_moment(self.loop, folder, processes)
        stopped = [*descendants(processes[node]), psutil.Process(processes[node].pid)]
        signal_all(stopped, signal.SIGSTOP)
        print(f"faults: node {node} is stopped at step {last_step(folder / 'out')}", flush=True)
        seconds_until_ended([processes[1 - node]])
        errors = check_lines(
            folder, [1 - node], f"rank {node} on node{node} was last seen in stage"
        )
        minutes = [float(text) for text in re.findall("entered (.*) minutes ago", errors.text)]
        if any(not 0 <= number < 3 for number in minutes):
            errors.append(f"the stage was entered {minutes} minutes ago")
        signal_all(stopped, signal.SIGCONT)
        late = wait_for_all(processes, SECONDS_TO_STOP)
        # Without the node of its rendezvous, torchrun itself waits for a quarter of an hour.
        errors += [text for text in late if node == 1 or "torch.distributed.run" not in text]
        return errors + self.resume(folder, before)

    def another_version(self, folder: Path) -> list[str]:
        """A node has another copy of the repository."""
        copy = folder / "other.py"
        copy.write_text((ROOT / CODE).read_text() + "# another version\n")
        place = f"mount --make-rprivate / ; mount --bind {copy} {ROOT / CODE}"
        before = ("true", f"export PYTHONDONTWRITEBYTECODE=1; {place}")
        processes = self.start(folder, "log0", before)
        errors = check_lines_at_end(processes, folder, f"rankwise's {CODE} differs between ranks: ")
        if not re.search(r"on rank 0 \(node0\), \w+ on rank 1 \(node1\)", errors.text):
            errors.append("the nodes are not named")
        if any(not re.search(r"exitcode +: 2 ", log) for log in read_logs(folder)):
            errors.append("a rank did not exit with code 2")
        return errors + self.resume(folder)

    def full_disk(self, folder: Path) -> list[str]:
        """The disk of output_dir is full after a while; then there is room again."""
        out = folder / "out"
        out.mkdir()
        with small_disk(out):
            processes = self.start(folder, "log0")
            wait_for_moment(self.loop, folder, processes)
            filler = fill(out)
            errors = check_lines_at_end(processes, folder, "the disk is full: ")
            if not re.search("on node[01] needs", errors.text):
                errors.append("the node is not named")
            filler.unlink()
            return errors + self.resume(folder)

    def full_local_disk(self, folder: Path) -> list[str]:
        """A node has no room for temporary files (TMPDIR)."""
        local = folder / "local"
        local.mkdir()
        with small_disk(local):
            fill(local)
            processes = self.start(folder, "log0", ("true", f"export TMPDIR={local}"))
            late = wait_for_all(processes, SECONDS_OF_RUN)
        codes = [process.returncode for process in processes]
        if any(codes):
            return [*late, f"exit codes {codes}: {error_lines(folder, [0, 1])}"]
        return late + differences(folder / "out", self.expected, set())

    def slow_disk(self, folder: Path) -> list[str]:
        """Every file of output_dir that a node opens, makes or removes takes longer."""
        slow = f"FAULT_DISK={folder}/out FAULT_DISK_MS={DISK_MILLISECONDS}"
        before = ("true", f"export LD_PRELOAD={self.library} {slow}")
        processes = self.start(folder, "log0", before)
        errors = self.finish(processes, folder)
        seconds = longest_save(folder / "out")
        usual = longest_save(self.loop.directory / "undisturbed" / "out")
        print(f"faults: saving takes {seconds:.1f} s instead of {usual:.1f} s", flush=True)
        if seconds < usual + 2 * DISK_MILLISECONDS / 1000:
            errors.append("the disk was not slow")
        return errors

    def start(self, folder: Path, log: str, before=KEEP_ALL) -> list[subprocess.Popen]:
        return launch(self.loop, self.nodes, folder, log, self.rendezvous, before)

    def resume(self, folder: Path, before=KEEP_ALL) -> list[str]:
        """Start both nodes again, and compare the results."""
        newest = newest_checkpoint(folder / "out")
        processes = self.start(folder, "log1", before)
        errors = self.finish(processes, folder)
        first_step = first_step_of(folder / "log1.node0")
        if first_step != newest:
            errors.append(f"it went on from step {first_step}, not {newest}")
        else:
            self.loop.result.count_start(first_step)
        return errors

    def finish(self, processes: list[subprocess.Popen], folder: Path) -> list[str]:
        """Wait for the end, and compare the results with the undisturbed ones."""
        errors = wait_for_all(processes, SECONDS_OF_RUN)
        codes = [process.returncode for process in processes]
        if any(codes):
            return [*errors, f"exit codes {codes}"]
        return errors + differences(folder / "out", self.expected, set())

    @property
    def rendezvous(self) -> str:
        return ("c10d", "static")[self.loop.result.rounds % 2]


class Errors(list):
    """What went wrong, and the error lines that were printed, as one text."""

    text = ""


def run_loop(loop: Loop) -> None:
    """Run rounds until the time is up."""
    with_nodes(loop, run_rounds)


def run_rounds(loop: Loop, nodes: Nodes) -> None:
    library = loop.directory / "faults.so"
    source = ROOT / "tests/soak/faults.c"
    if shutil.which("cc") is None:
        message = "there is no C compiler (cc) for tests/soak/faults.c"
        loop.result.errors.append(message)
        print(f"{loop.name}: {message}", flush=True)
        return
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    faults = Faults(loop, nodes, undisturbed_results(loop, nodes), library)
    kinds = [
        faults.hang,
        faults.hang_with_another_clock,
        faults.another_version,
        faults.full_disk,
        faults.full_local_disk,
        faults.slow_disk,
    ]
    loop.rng.shuffle(kinds)
    while loop.has_time():
        kind = kinds[loop.result.rounds % len(kinds)]
        loop.result.rounds += 1
        folder = loop.directory / f"round{loop.result.rounds}"
        folder.mkdir()
        errors = kind(folder)
        name = kind.__name__.replace("_", " ")
        loop.result.kills[name] += 1
        print(f"faults {loop.result.rounds}: {name}: {'; '.join(errors) or 'as it should be'}")
        sys.stdout.flush()
        messages = [f"round {loop.result.rounds}, {name}: {message}" for message in errors]
        loop.result.report(loop.name, messages, folder)


def check_lines_at_end(processes: list[subprocess.Popen], folder: Path, part: str) -> Errors:
    """Wait until both nodes have ended by themselves, and check what they printed."""
    late = wait_for_all(processes, SECONDS_OF_RUN)
    errors = check_lines(folder, [0, 1], part)
    errors += late
    return errors


def check_lines(folder: Path, nodes: list[int], part: str) -> Errors:
    """Check that these nodes printed one error, and that it contains this part."""
    lines = error_lines(folder, nodes)
    errors = Errors()
    errors.text = "\n".join(lines)
    print(f"faults: {len(lines)} error lines: {[line[:240] for line in lines]}", flush=True)
    if len(set(lines)) != 1 or part not in errors.text:
        errors.append(f"not one error line with {part!r}: {lines}")
    return errors


def read_logs(folder: Path) -> list[str]:
    return [(folder / f"log0.node{node}").read_text(errors="replace") for node in range(2)]


def longest_save(out: Path) -> float:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return max(line.get("timing/save", 0.0) for line in lines)


def signal_all(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@contextmanager
def small_disk(directory: Path):
    """Within this block, the directory is a disk of 32 MiB. Its files are kept afterwards."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", directory], check=True)
    kept = directory.with_name(f"{directory.name}.kept")
    try:
        yield
    finally:
        shutil.copytree(directory, kept)
        subprocess.run(["umount", "--lazy", directory], check=True)
        directory.rmdir()
        kept.rename(directory)


def fill(directory: Path) -> Path:
    """Fill the disk of a directory, and return the file that does."""
    filler = directory / "filler"
    command = f"head -c 64M /dev/zero > {shlex.quote(str(filler))}"
    subprocess.run(["sh", "-c", command], capture_output=True)
    return filler
