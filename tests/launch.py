"""Start scripts as their users do, on one rank or several, end them, and read what they leave."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
LIMIT = 1200                # seconds, for a run that takes one or two minutes on a machine of its own


def launch_each(launches: dict, run: Callable) -> Callable:
    """name -> run(name) of every launch: those of one rank two at a time, then the others by themselves, since two ranks fill two
    cores. The values of `launches` have a number of ranks."""
    runs, lone = {}, [name for name in launches if launches[name].ranks == 1]
    for at_once, names in ((2, lone), (1, [name for name in launches if name not in lone])):
        with ThreadPoolExecutor(at_once) as pool:
            runs |= {name: pool.submit(run, name) for name in names}
    return lambda name: runs[name].result()


def environment(**more):
    return {**{k: v for k, v in os.environ.items() if not k.startswith("SLURM")}, "OMP_NUM_THREADS": "1", **more}


def launch(num_ranks: int, script: str, *arguments, returncode: int = 0,
           timeout: float = LIMIT) -> subprocess.CompletedProcess:
    """Run a script (a path from the repository root) under torchrun; unless it exits with returncode within timeout [s], fail
    with the beginning and the end of what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", script,
               *map(str, arguments)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(command, cwd=ROOT, env=environment(PYTHONPATH=path), text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()                      # not kill: torchrun takes its ranks along only when asked to end
        out, err = process.communicate()
        err += f"\n{script} was stopped after {timeout} s"
    # The other ranks complain of the first one's end, at length.
    assert process.returncode == returncode, (
        f"{script} on {num_ranks} ranks: exit code {process.returncode}, not {returncode}\n"
        f"{out[-2000:]}\n{err[max(0, err.find('Traceback')):][:8000]}\n...\n{err[-4000:]}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run(command, returncode=0, cwd=ROOT, **env):
    """One process, to its end."""
    done = subprocess.run(command, cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == returncode, (done.stdout + done.stderr)[-9000:]
    return done


def imported(stderr):
    """The modules that a process started with PYTHONPROFILEIMPORTTIME=1 imported."""
    return {line.rsplit("|", 1)[1].strip() for line in stderr.splitlines() if line.startswith("import time:")}


def heed_signals():
    """In a child: the signals that nohup, and a shell that starts something in the background, let their children ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(command, log, **env):
    """A process to wait for, or to end; log: the file for what it prints."""
    with open(log, "w") as file:
        return subprocess.Popen(command, cwd=ROOT, env=environment(**env), stdout=file, stderr=subprocess.STDOUT,
                                preexec_fn=heed_signals)


def wait_for(condition, process, seconds=LIMIT):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended too early"
        assert time.monotonic() < deadline, "the run is too slow"
        time.sleep(0.002)


def kill_all(process):
    """kill -9 to every rank at once, as a node that goes down does; then to torchrun."""
    family = psutil.Process(process.pid)
    for member in [*family.children(recursive=True), family]:
        member.kill()
    process.wait()


def metrics(out):
    """Of every step, and of validation before the first; without the line that has only the last checkpoint's time."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.keys() != {"step", "timing/save"}]


def checkpoints(out):
    return sorted(p.name for p in (out / "checkpoints").iterdir())
