"""The loop nodes: one of two nodes is lost, and the run goes on when both are back."""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.soak.killed import Loop
from tests.soak.processes import descendants, wait_for_all
from tests.soak.runs import (
    differences,
    first_step_of,
    last_step,
    newest_checkpoint,
    results_of,
    sft,
)
from tests.support.nodes import Nodes

LOSSES = {
    "power": "its power is cut (cable pulled, then SIGKILL)",
    "killed": "all its processes get SIGKILL",
    "cable": "its cable is pulled",
}
TIMEOUT_MINUTES = 0.3
SECONDS_OF_RUN = 300
KEEP_ALL = ("true", "true")  # what the nodes do before a run: nothing


@dataclass
class Loss:
    """How a node is lost: a key of LOSSES, and the node's number."""

    kind: str
    node: int

    @property
    def survivors(self) -> list[int]:
        return [0, 1] if self.kind == "cable" else [1 - self.node]

    @property
    def leaves_torchrun_waiting(self) -> bool:
        """Cut off from the node of its rendezvous, torchrun itself waits for 15 minutes."""
        return self.kind == "cable" or (self.kind == "power" and self.node == 0)


def run_loop(loop: Loop) -> None:
    """Run rounds until the time is up."""
    with_nodes(loop, run_rounds)


def with_nodes(loop: Loop, run_rounds: Callable[[Loop, Nodes], None]) -> None:
    """Call a function with two nodes; an error of the loop where they cannot be made."""
    try:
        nodes = Nodes()
    except RuntimeError as error:
        message = f"no network namespaces: {error}"
        loop.result.errors.append(message)
        print(f"{loop.name}: {message}", flush=True)
        return
    try:
        run_rounds(loop, nodes)
    finally:
        wait_for_all([], 0)
        nodes.close()


def undisturbed_results(loop: Loop, nodes: Nodes) -> dict[str, object]:
    """Run to the end on both nodes, and return the results."""
    folder = loop.directory / "undisturbed"
    folder.mkdir()
    processes = launch(loop, nodes, folder, "log0", "c10d")
    errors = wait_for_all(processes, SECONDS_OF_RUN)
    if errors or any(process.returncode for process in processes):
        sys.exit(f"the undisturbed run on two nodes failed: {folder}")
    return results_of(folder / "out")


def run_rounds(loop: Loop, nodes: Nodes) -> None:
    expected = undisturbed_results(loop, nodes)
    folder = loop.directory / "not_shared"
    loop.result.report(loop.name, errors_of_unshared_directory(loop, nodes, folder), folder)

    losses = [Loss(kind, node) for kind in LOSSES for node in (1, 0)]
    loop.rng.shuffle(losses)
    while loop.has_time():
        loss = losses[loop.result.rounds % len(losses)]
        loop.result.rounds += 1
        folder = loop.directory / f"round{loop.result.rounds}"
        errors = run_round(loop, nodes, folder, loss, expected)
        messages = [f"round {loop.result.rounds}: {message}" for message in errors]
        loop.result.report(loop.name, messages, folder)


def launch(
    loop: Loop, nodes: Nodes, folder: Path, log: str, rendezvous: str, before=KEEP_ALL
) -> list[subprocess.Popen]:
    """Start the run on both nodes."""
    arguments = sft(loop.assets, folder / "out")
    arguments.append(f"trainer.timeout_minutes={TIMEOUT_MINUTES}")
    processes = []
    for node in range(2):
        file = folder / f"{log}.node{node}"
        process = nodes.torchrun(node, file, rendezvous, *arguments, before=before[node])
        processes.append(process)
    return processes


def run_round(
    loop: Loop, nodes: Nodes, folder: Path, loss: Loss, expected: dict[str, object]
) -> list[str]:
    """Lose a node at a random moment, start both nodes again, and describe what is wrong."""
    folder.mkdir()
    out = folder / "out"
    rendezvous = loop.rng.choice(["c10d", "static"])
    processes = launch(loop, nodes, folder, "log0", rendezvous)
    wait_for_moment(loop, folder, processes)
    lose(nodes, processes, loss)
    lost_at = last_step(out)
    seconds = seconds_until_ended(processes)
    late = wait_for_all(processes, 20)
    nodes.plug()
    errors = late
    if loss.leaves_torchrun_waiting:
        errors = [message for message in late if "torch.distributed.run" not in message]
    lines = error_lines(folder, loss.survivors)
    names_rank = any(
        f"rank {loss.node} on node{loss.node} was last seen in stage" in line for line in lines
    )
    if loss.kind != "cable" and not names_rank:
        errors.append(f"the other node did not name rank {loss.node} and its stage")
    if loss.kind == "cable" and not any("node0" in line and "node1" in line for line in lines):
        errors.append("the nodes without a network are not named")
    if not lines:
        errors.append("no line begins with error:")

    newest = newest_checkpoint(out)
    processes = launch(loop, nodes, folder, "log1", rendezvous)
    errors += wait_for_all(processes, SECONDS_OF_RUN)
    first_step = first_step_of(folder / "log1.node0")
    loop.result.kills[f"{loss.kind} of node {loss.node}"] += 1
    if first_step is not None:
        loop.result.count_start(first_step)
    first_line = lines[0][:200] if lines else "nothing"
    print(
        f"nodes {loop.result.rounds}: node {loss.node} is lost at step {lost_at}: "
        f"{LOSSES[loss.kind]} ({rendezvous}); the other node ended after {seconds:.0f} s with "
        f"{first_line!r}; both went on from step {first_step}",
        flush=True,
    )
    codes = [process.returncode for process in processes]
    if any(codes) or first_step != newest:
        errors.append(f"the second start: exit codes {codes}, from step {first_step}, not {newest}")
        return errors
    return errors + differences(out, expected, set())


def wait_for_moment(loop: Loop, folder: Path, processes: list[subprocess.Popen]) -> None:
    """Wait until a random step, or until the data is being tokenized."""
    step = loop.rng.choice([0, *range(1, 25, 3)])
    delay = loop.rng.uniform(0, 0.3)

    def is_reached() -> bool:
        if step == 0:
            return any((folder / "cache").glob("*.tmp"))
        return last_step(folder / "out") >= step

    while not is_reached():
        if any(process.poll() is not None for process in processes):
            break
        time.sleep(0.002)
    time.sleep(delay)


def lose(nodes: Nodes, processes: list[subprocess.Popen], loss: Loss) -> None:
    """Take a node away."""
    if loss.kind != "killed":
        nodes.pull(loss.node)
    if loss.kind != "cable":
        torchrun = processes[loss.node]
        for victim in [*descendants(torchrun), psutil.Process(torchrun.pid)]:
            victim.kill()


def seconds_until_ended(processes: list[subprocess.Popen]) -> float:
    """Wait until every rank has ended and return the seconds it took."""
    begin = time.monotonic()
    limit = 60 * TIMEOUT_MINUTES + 120
    while time.monotonic() - begin < limit:
        if not any(descendants(process) for process in processes):
            break
        time.sleep(0.1)
    return time.monotonic() - begin


def error_lines(folder: Path, nodes: list[int]) -> list[str]:
    """Return the error lines in these nodes' logs; a progress bar may precede one on its line."""
    logs = [(folder / f"log0.node{node}").read_text(errors="replace") for node in nodes]
    return re.findall("error: .*", "".join(logs))


def errors_of_unshared_directory(loop: Loop, nodes: Nodes, folder: Path) -> list[str]:
    """Check that a node which sees another directory as output_dir ends with one line, code 2."""
    (folder / "elsewhere").mkdir(parents=True)
    (folder / "out").mkdir()
    hide = f"mount --make-rprivate / ; mount --bind {folder}/elsewhere {folder}/out"
    processes = launch(loop, nodes, folder, "log0", "static", before=("true", hide))
    errors = wait_for_all(processes, 120)
    for node in range(2):
        log = (folder / f"log0.node{node}").read_text()
        lines = [line for line in log.splitlines() if line.startswith("error")]
        names_cause = "is not the directory that rank 0 writes to" in "".join(lines)
        names_node = "node1" in "".join(lines)
        if len(lines) != 1 or not names_cause or not names_node:
            errors.append(f"output_dir not shared: node {node} printed {lines}")
        if not re.search(r"exitcode +: 2 ", log):
            errors.append(f"output_dir not shared: no rank of node {node} exited with code 2")
    outcome = "; ".join(errors) or "reported on both nodes, exit code 2"
    print(f"nodes: output_dir not shared: {outcome}", flush=True)
    return errors
