"""The loop slurm: jobs of examples/slurm that are stopped, cancelled, or lose a node."""

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.soak.killed import Loop
from tests.soak.runs import differences, last_step, ppo, results_of, sft
from tests.support.launch import ROOT
from tests.support.slurm import Slurm

# The name of a script in examples/slurm -> the command of its run.
COMMANDS = {"sft": sft, "ppo": ppo}
# In place of the scripts' eight GPUs per node.
OPTIONS = ["--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", "--time=30"]
WAYS = {
    "time": "its time is up: SIGUSR1, as Slurm sends it; the script requeues it",
    "cancel": "scancel, and submitted again",
    "requeue": "scontrol requeue",
    "node": "a node is lost, and submitted again unless Slurm requeues it",
}
GOING_ON = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"}
SECONDS_OF_JOB = 400
STEPS = {"sft": (2, 7, 13, 22), "ppo": (1, 3, 6, 9)}


@dataclass
class Job:
    """A job in a folder of its own, submitted as often as needed.

    script: sft or ppo.
    """

    slurm: Slurm
    script: str
    folder: Path
    arguments: list[str]
    number: int = 0

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def submit(self) -> None:
        file = ROOT / "examples" / "slurm" / f"{self.script}.sbatch"
        self.number = self.slurm.submit(file, self.folder / "log", OPTIONS, self.arguments)

    def wait(self, reached: Callable[[], bool]) -> bool:
        """Wait until the condition holds; return False if the job ends or takes too long first.

        A job that was requeued is started at once.
        """
        deadline = time.monotonic() + SECONDS_OF_JOB
        while time.monotonic() < deadline:
            if reached():
                return True
            state = self.slurm.state(self.number)
            if state not in GOING_ON:
                return reached()
            if state == "PENDING":
                self.slurm.start_now(self.number)
            time.sleep(0.1)
        return False

    def has_ended(self) -> bool:
        return self.slurm.state(self.number) not in GOING_ON

    def stop(self, way: str, node: int) -> None:
        """Disturb the job. node: that is lost."""
        if way == "time":
            self.slurm.run("scancel", "--signal=USR1", self.number)
        elif way == "cancel":
            self.slurm.run("scancel", self.number)
        elif way == "requeue":
            self.slurm.run("scontrol", "requeue", self.number)
        else:
            self.slurm.lose_node(node)
            time.sleep(5)  # the other node's rank notices at once
            self.slurm.start_node(node)


def run_loop(loop: Loop) -> None:
    """Run rounds until the time is up."""
    try:
        slurm = Slurm(loop.directory / "slurm")
    except RuntimeError as error:
        message = f"no Slurm: {error}"
        loop.result.errors.append(message)
        print(f"slurm: {message}", flush=True)
        return
    slurm.environment |= {"RANKWISE": str(ROOT), "PYTHON": sys.executable}
    try:
        run_rounds(loop, slurm)
    finally:
        slurm.close()


def make_job(loop: Loop, slurm: Slurm, name: str, script: str) -> Job:
    folder = loop.directory / name
    folder.mkdir()
    command = COMMANDS[script](loop.assets, folder / "out")
    return Job(slurm, script, folder, command[1:])


def run_rounds(loop: Loop, slurm: Slurm) -> None:
    expected = {script: undisturbed_results(loop, slurm, script) for script in COMMANDS}
    choices = [(script, way) for script in COMMANDS for way in WAYS]
    loop.rng.shuffle(choices)
    while loop.has_time():
        script, way = choices[loop.result.rounds % len(choices)]
        loop.result.rounds += 1
        job = make_job(loop, slurm, f"round{loop.result.rounds}", script)
        errors = run_round(loop, job, way, expected[script])
        prefix = f"round {loop.result.rounds}, {script}, {way}"
        messages = [f"{prefix}: {message}" for message in errors]
        loop.result.report(loop.name, messages, job.folder)


def undisturbed_results(loop: Loop, slurm: Slurm, script: str) -> dict[str, object]:
    """Return what a job leaves behind that nobody disturbs."""
    job = make_job(loop, slurm, f"undisturbed_{script}", script)
    job.submit()
    if not job.wait(job.has_ended) or slurm.state(job.number) != "COMPLETED":
        sys.exit(f"the undisturbed job failed: {job.folder}")
    return results_of(job.out)


def run_round(loop: Loop, job: Job, way: str, expected: dict[str, object]) -> list[str]:
    """Disturb a job once, let it end, and describe what is wrong."""
    step = loop.rng.choice(STEPS[job.script])
    job.submit()
    if not job.wait(lambda: last_step(job.out) >= step):
        return [f"the job did not reach step {step}"]
    job.stop(way, node=loop.rng.randrange(2))
    loop.result.kills[way] += 1
    job.wait(lambda: job.has_ended())
    stopped_after = last_step(job.out)
    was_requeued = job.slurm.state(job.number) == "COMPLETED"
    if not was_requeued:
        if way in ("time", "requeue"):
            return [f"the job was not requeued: {job.slurm.state(job.number)}"]
        job.submit()
        job.wait(job.has_ended)
    state = job.slurm.state(job.number)
    print(
        f"slurm {loop.result.rounds}, {job.script}: disturbed at step {step}: {WAYS[way]}; "
        f"{'requeued' if was_requeued else f'submitted again after step {stopped_after}'}; {state}",
        flush=True,
    )
    if state != "COMPLETED":
        return [f"the job ended as {state}"]
    # Stopped by a signal, a run skips the validation of its last step.
    log = (job.folder / "log").read_text(errors="replace")
    return differences(job.out, expected, stopped_steps(log))


def stopped_steps(log: str) -> set[int]:
    """Return the steps after which a signal stopped the run.

    Slurm may kill a process after it has saved its last step and before it says that it has
    stopped. So the steps from which the run was resumed count, too.
    """
    ends = [part.split()[0] for part in log.split("stopped by a signal after step ")[1:]]
    starts = re.findall(r"^resuming from .*: step (\d+) of ", log, re.MULTILINE)
    return {int(step.strip(",.;:")) for step in (*ends, *starts)}
