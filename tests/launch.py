"""Start scripts on one rank or several, end them, and read what they leave.

start() starts them as their users do. run() and launch() wait for their end, and fork them off a Python that has imported torch
(tests/forked.py) where that is the same: scripts and modules of this repository, without environment variables of their own.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
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


# Imported before the fork: by all, and by scripts that generate, on a CPU.
TRAINING = ("torch.distributed.run", "job", "tracking", "roles", "engines.fsdp.engine", "data.dataset", "data.prompts",
            "matplotlib.pyplot")
ROLLOUT = (*TRAINING, "rollout.vllm", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn",
           "vllm.model_executor.models.qwen2", "compressed_tensors.compressors")
GENERATING = re.compile(r"train_ppo|/(rollout|rollout_images|scheduler|speculation|adapters)_worker")


@cache
def fork_server(modules: tuple[str, ...]) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "tests.forked", "serve", *modules], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                            stdout=subprocess.DEVNULL, env=environment(VLLM_LOGGING_LEVEL="ERROR"))


def end_of(command: list[str], cwd: Path, env: dict[str, str], timeout: float) -> subprocess.CompletedProcess:
    """Run a command to its end, for at most timeout [s]; what begins with this Python is forked off one that is there already."""
    command = [*map(str, command)]
    script = next((word for word in command[1:] if word.endswith(".py")), "")
    own = command[1] == "-m" and (ROOT / command[2].replace(".", "/")).with_suffix(".py").exists()
    if command[0] != sys.executable or not (own or (script and (ROOT / script).is_relative_to(ROOT))) or command[1] == "-c":
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
    server = fork_server(ROLLOUT if GENERATING.search(script) else TRAINING)
    with tempfile.TemporaryDirectory() as name:
        folder, deadline = Path(name), time.monotonic() + timeout
        (folder / "request.json").write_text(json.dumps({"command": command[1:], "cwd": str(cwd), "env": env}))
        server.stdin.write(f"{folder}\n")
        server.stdin.flush()
        while not (folder / "code").exists():
            assert server.poll() is None, f"no Python to fork from: exit code {server.returncode}"
            if time.monotonic() > deadline:
                os.kill(int((folder / "pid").read_text()), signal.SIGTERM)
                raise subprocess.TimeoutExpired(command, timeout, *((folder / s).read_text() for s in ("stdout", "stderr")))
            time.sleep(0.02)
        return subprocess.CompletedProcess(command, int((folder / "code").read_text()),
                                           *((folder / s).read_text() for s in ("stdout", "stderr")))


def launch(num_ranks: int, script: str, *arguments, returncode: int = 0,
           timeout: float = 2 * LIMIT) -> subprocess.CompletedProcess:
    """Run a script (a path from the repository root) under torchrun; unless it exits with returncode within timeout [s], fail
    with the beginning and the end of what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", script, *arguments]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = end_of(command, ROOT, environment(PYTHONPATH=path), timeout)
    except subprocess.TimeoutExpired as late:
        done = subprocess.CompletedProcess(command, "none", late.stdout, f"{late.stderr}\nstopped after {timeout} s")
    out, err = done.stdout, done.stderr
    # The other ranks complain of the first one's end, at length.
    assert done.returncode == returncode, (
        f"{script} on {num_ranks} ranks: exit code {done.returncode}, not {returncode}\n"
        f"{out[-2000:]}\n{err[max(0, err.find('Traceback')):][:8000]}\n...\n{err[-4000:]}")
    return done


def run(command, returncode=0, cwd=ROOT, **env):
    """One command, to its end; as its user would start it if the environment has something to tell it."""
    ended = partial(subprocess.run, capture_output=True, text=True) if env else end_of
    done = ended(command, cwd=cwd, env=environment(**env), timeout=LIMIT)
    assert done.returncode == returncode, (done.stdout + done.stderr)[-9000:]
    return done


def export(checkpoint: Path, directory: Path, *more, returncode=0) -> str:
    """What the offline export of a checkpoint says to standard error."""
    return run([sys.executable, "-m", "engines.checkpoint", "export", checkpoint, directory, *more], returncode).stderr


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
