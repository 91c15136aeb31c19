"""The loops sft, ppo and megatron: a run is killed and restarted until it ends."""

import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.processes import kill, torchrun, wait_for_all
from tests.soak.runs import (
    RUNS,
    differences,
    first_step_of,
    last_step,
    newest_checkpoint,
    results_of,
)

SECONDS_AFTER_KILL = 90  # within which everything ends
SECONDS_OF_RUN = 600


@dataclass
class Result:
    """What a loop has counted."""

    rounds: int = 0
    kills: Counter = field(default_factory=Counter)
    num_resumed: int = 0
    num_restarted: int = 0
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def report(self, loop: str, errors: list[str], folder: Path) -> None:
        """Print the errors of a round; without any, remove its folder."""
        self.errors += errors
        for message in errors:
            print(f"{loop}: WRONG: {message}", flush=True)
        if not errors:
            shutil.rmtree(folder)

    def count_start(self, first_step: int) -> None:
        if first_step > 0:
            self.num_resumed += 1
        else:
            self.num_restarted += 1


@dataclass
class Loop:
    """One loop of the soak test.

    Attributes:
        has_time: returns whether another round may begin.
    """

    name: str
    assets: Path
    directory: Path
    rng: random.Random
    result: Result
    has_time: Callable[[], bool]


@dataclass
class Reference:
    """A run that nobody disturbed.

    Attributes:
        seconds: of the whole run.
        seconds_to_first_step: until metrics.jsonl exists.
        saved_steps: steps with a checkpoint.
    """

    results: dict[str, object]
    num_steps: int
    seconds: float
    seconds_to_first_step: float
    saved_steps: list[int]


@dataclass
class Moment:
    """When to kill: `delay` seconds after `condition()` holds."""

    name: str
    condition: Callable[[], bool]
    delay: float

    def __str__(self) -> str:
        return f"{self.name} + {self.delay:.2f} s"


@dataclass
class Attempt:
    """One start of a run.

    Attributes:
        kill: how it was killed, or None.
        stopped_after: the step after which a signal stopped it, or None.
        ended: whether it reached its end.
    """

    kill: str | None
    moment: Moment | None
    errors: list[str]
    stopped_after: int | None
    ended: bool


def run_loop(loop: Loop) -> None:
    """Run rounds until the time is up."""
    reference = undisturbed(lambda out: RUNS[loop.name](loop.assets, out), loop.directory)
    print(
        f"{loop.name}: undisturbed {reference.num_steps} steps in {reference.seconds:.0f} s, "
        f"the first after {reference.seconds_to_first_step:.0f} s",
        flush=True,
    )
    while loop.has_time():
        loop.result.rounds += 1
        run_round(loop, reference)


def undisturbed(command: Callable[[Path], list[str]], directory: Path) -> Reference:
    """Run a command to its end and measure it."""
    folder = directory / "undisturbed"
    folder.mkdir()
    out = folder / "out"
    arguments = command(out)
    begin = time.monotonic()
    process = torchrun(folder / "log", arguments)
    seconds_to_first_step = 0.0
    while process.poll() is None:
        if seconds_to_first_step == 0 and (out / "metrics.jsonl").exists():
            seconds_to_first_step = time.monotonic() - begin
        time.sleep(0.01)
    seconds = time.monotonic() - begin
    if process.returncode != 0:
        sys.exit(f"the undisturbed run ended with code {process.returncode}: {folder}/log")
    num_steps = last_step(out)
    (save_freq,) = [word for word in arguments if word.startswith("trainer.save_freq=")]
    interval = int(save_freq.partition("=")[2])
    saved_steps = list(range(interval, num_steps + 1, interval))
    return Reference(results_of(out), num_steps, seconds, seconds_to_first_step, saved_steps)


def run_round(loop: Loop, reference: Reference) -> None:
    """Start the run, kill it two to five times, let it end, and compare its results."""
    result = loop.result
    folder = loop.directory / f"round{result.rounds}"
    folder.mkdir()
    out = folder / "out"
    command = RUNS[loop.name](loop.assets, out)
    num_kills = loop.rng.randint(2, 5)
    errors = []
    stopped: set[int] = set()
    last_kill = ""
    for number in range(num_kills + 4):
        log = folder / f"log{number}"
        moment = None
        if number < num_kills:
            moment = choose_moment(loop.rng, out, reference)
        attempt = attempt_run(command, out, log, moment, loop.rng)
        prefix = f"round {result.rounds}, attempt {number + 1}"
        errors += [f"{prefix}: {message}" for message in attempt.errors]
        if attempt.stopped_after is not None:
            stopped.add(attempt.stopped_after)
        if last_kill:
            print_start(result, last_kill, first_step_of(log))
            last_kill = ""
        if attempt.kill is None:
            break
        result.kills[attempt.kill] += 1
        name = f"{loop.name} {result.rounds}.{number + 1}"
        last_kill = f"{name}: {attempt.kill}, {moment}, at step {last_step(out)}"
    remaining = ["it has not ended"]
    if attempt.ended:
        remaining = differences(out, reference.results, stopped)
    errors += [f"round {result.rounds}: {message}" for message in remaining]
    result.report(loop.name, errors, folder)


def print_start(result: Result, last_kill: str, first_step: int | None) -> None:
    """Print how the run went on after a kill."""
    if first_step is None:
        print(f"{last_kill}; killed again before it went on", flush=True)
        return
    result.count_start(first_step)
    print(f"{last_kill}; went on from step {first_step}", flush=True)


def choose_moment(rng: random.Random, out: Path, reference: Reference) -> Moment:
    """Choose a moment for a kill among the stages that the run has not passed."""
    step = last_step(out)
    saved = newest_checkpoint(out)
    cache = out.parent / "cache"
    # name -> (condition, the longest delay in seconds, weight)
    choices: dict[str, tuple[Callable[[], bool], float, float]] = {
        "start-up": (lambda: True, reference.seconds_to_first_step, 1),
        "any time": (lambda: True, reference.seconds, 1),
    }
    if not cache.exists() or len(list(cache.iterdir())) < 2:
        choices["tokenization"] = (lambda: any(cache.glob("*.tmp")), 0.5, 1)
    if step < reference.num_steps:
        last_choice = min(reference.num_steps, step + reference.num_steps // 2)
        chosen_step = rng.randint(step + 1, last_choice)
        choices[f"step {chosen_step}"] = (lambda: last_step(out) >= chosen_step, 0.3, 3)
    coming_saves = [k for k in reference.saved_steps if k > saved]
    if coming_saves:
        save = rng.choice(coming_saves[:3])
        unfinished = out / "checkpoints" / f"step_{save:08d}.tmp"
        choices[f"save of step {save}"] = (unfinished.exists, 0.2, 3)
    # A kill during an early export would leave nothing else to kill.
    export_weight = 0.5 if coming_saves else 3
    choices["export"] = ((out / "hf.tmp").exists, 0.1, export_weight)
    weights = [weight for _, _, weight in choices.values()]
    (name,) = rng.choices(list(choices), weights)
    condition, longest_delay, _ = choices[name]
    return Moment(name, condition, rng.uniform(0, longest_delay))


def attempt_run(
    command: list[str], out: Path, log: Path, moment: Moment | None, rng: random.Random
) -> Attempt:
    """Start a run once; kill it at a moment, or let it end if there is none."""
    checkpoint_before = newest_checkpoint(out)
    process = torchrun(log, command)
    killed_how = wait_and_kill(process, moment, rng)
    errors = wait_for_all([process], SECONDS_AFTER_KILL if killed_how else SECONDS_OF_RUN)
    text = log.read_text(errors="replace")
    first_step = first_step_of(log)
    if first_step is not None and first_step != checkpoint_before:
        errors.append(
            f"it went on from step {first_step}, but the newest checkpoint was of step "
            f"{checkpoint_before}"
        )
    for line in text.splitlines():
        if "is damaged" in line or "could not be read" in line:
            errors.append(f"it printed: {line.strip()}")
    stopped = re.search(r"stopped by a signal after step (\d+)", text)
    stopped_after = int(stopped[1]) if stopped else None
    was_terminated = killed_how is not None and "SIGTERM" in killed_how
    if was_terminated and stopped and newest_checkpoint(out) != stopped_after:
        errors.append(
            f"it stopped after step {stopped_after}, but the newest checkpoint is of step "
            f"{newest_checkpoint(out)}"
        )
    if killed_how is None and process.returncode != 0:
        errors.append(f"exit code {process.returncode} without a kill")
    ended = (out / "hf").exists() and killed_how is None
    return Attempt(killed_how, moment, errors, stopped_after, ended)


def wait_and_kill(
    process: subprocess.Popen, moment: Moment | None, rng: random.Random
) -> str | None:
    """Wait for the moment and kill the run; returns how, or None if it ended before."""
    deadline = time.monotonic() + SECONDS_OF_RUN
    while process.poll() is None and time.monotonic() < deadline:
        if moment is not None and moment.condition():
            time.sleep(moment.delay)
            return kill(process, rng) if process.poll() is None else None
        time.sleep(0.002)
    return None
