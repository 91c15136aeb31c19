"""Kill runs at random moments until they have ended; compare them, to the last bit, with
runs that nobody disturbed.

    make soak                                                   all loops, 50 minutes
    python -m tests.soak ppo nodes --minutes 10 --seed 7        two loops, ten minutes each

Loops: sft, ppo and partial (2 ranks; the last two save in the background, and in partial, responses
continue in later steps), distill (ppo with a teacher), replay (partial, whose policy replays the
experts that vLLM chose), megatron (2 ranks, tensor parallel, saves in the background), nodes: two
nodes in network namespaces, which only root may make, one of which is lost; faults: one of them
hangs, has another clock or version, a full disk or a slow one (needs a C compiler); and slurm: jobs
on a real Slurm of two nodes, which has to be installed (slurm-wlm, munge). Exit code 1 means
that results differ, that an error was not reported, or that a process did not end; the directory
with the logs of every attempt is kept then.
"""

import argparse
import ctypes
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.soak import faulty_nodes, killed, lost_nodes, slurm_jobs
from tests.soak.killed import Loop, Result
from tests.soak.processes import wait_for_all
from tests.soak.runs import make_assets

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
MINUTES = {
    "sft": 4,
    "ppo": 6,
    "partial": 6,
    "distill": 5,
    "replay": 5,
    "megatron": 4,
    "nodes": 6,
    "faults": 8,
    "slurm": 6,
}


class Clock:
    """Decides whether another round of a loop may begin."""

    def __init__(self, result: Result, minutes: float, max_rounds: int | None):
        self.result = result
        self.seconds = 60 * minutes
        self.max_rounds = max_rounds
        self.begin = time.monotonic()
        self.times = [self.begin]

    def has_time(self) -> bool:
        """Return whether a round as long as the longest so far would end in time."""
        self.times.append(time.monotonic())
        if self.max_rounds is not None:
            return self.result.rounds < self.max_rounds
        rounds = [end - start for start, end in zip(self.times, self.times[1:])]
        elapsed = self.times[-1] - self.begin
        return self.result.rounds == 0 or elapsed + max(rounds) < self.seconds


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("loops", nargs="*", help=f"{', '.join(MINUTES)}; default: all")
    parser.add_argument("--minutes", type=float, help="for each loop")
    parser.add_argument("--rounds", type=int, help="of each loop, instead of minutes")
    parser.add_argument("--seed", type=int, help="of the choices; default: from the clock")
    parser.add_argument("--directory", type=Path, help="for the runs; default: a temporary one")
    arguments = parser.parse_args()
    unknown = set(arguments.loops) - MINUTES.keys()
    if unknown:
        parser.error(f"no such loop: {', '.join(unknown)}")
    if arguments.seed is None:
        arguments.seed = int(time.time()) % 10000
    return arguments


def run(name: str, directory: Path, arguments: argparse.Namespace) -> Result:
    """Run one loop until its time is up."""
    result = Result()
    clock = Clock(result, arguments.minutes or MINUTES[name], arguments.rounds)
    rng = random.Random(f"{arguments.seed} {name}")
    loop = Loop(name, directory, directory / name, rng, result, clock.has_time)
    loop.directory.mkdir()
    try:
        if name == "nodes":
            lost_nodes.run_loop(loop)
        elif name == "faults":
            faulty_nodes.run_loop(loop)
        elif name == "slurm":
            slurm_jobs.run_loop(loop)
        else:
            killed.run_loop(loop)
    finally:
        wait_for_all([], 0)
    result.seconds = time.monotonic() - clock.begin
    return result


def print_table(results: dict[str, Result]) -> None:
    columns = ("rounds", "kills", "resumed", "restarted", "errors", "minutes")
    print(f"\n{'loop':10}" + "".join(f"{column:>10}" for column in columns))
    for name, result in results.items():
        counts = (result.rounds, result.kills.total(), result.num_resumed, result.num_restarted)
        cells = "".join(f"{count:10}" for count in counts)
        print(f"{name:10}{cells}{len(result.errors):10}{result.seconds / 60:10.1f}")
        for way, count in sorted(result.kills.items()):
            print(f"{'':10}{count:4} {way}")


def main() -> None:
    arguments = parse_arguments()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Exit through the finally clauses, which end the processes that were started.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if arguments.directory is not None:
        arguments.directory.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="soak", dir=arguments.directory))
    make_assets(directory)
    print(f"seed {arguments.seed}, in {directory}", flush=True)
    results = {}
    for name in arguments.loops or MINUTES:
        results[name] = run(name, directory, arguments)
    print_table(results)
    if any(result.errors for result in results.values()):
        sys.exit(f"the logs of what went wrong are in {directory}")
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
