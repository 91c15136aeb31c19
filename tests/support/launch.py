"""Start scripts on one rank or several, end them, and read what they leave.

start() starts them as their users do. run() and launch() wait for their end, and unless told that it is to be a fresh Python, fork
them off one that has imported torch (tests/support/forked.py), if they are scripts or modules of this repository.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
# Seconds: for a run that takes one or two minutes, and for all cases of an engine, which take ten.
LIMIT, LONG_LIMIT = 900, 2400


def launch_each(launches: dict, run: Callable) -> Callable:
    """name -> run(name) of every launch: those of one rank two at a time, then the others by themselves, since two ranks fill two
    cores. The values of `launches` have a number of ranks."""
    runs, lone = {}, [name for name in launches if launches[name].ranks == 1]
    for at_once, names in ((2, lone), (1, [name for name in launches if name not in lone])):
        with ThreadPoolExecutor(at_once) as pool:
            runs |= {name: pool.submit(run, name) for name in names}
    return lambda name: runs[name].result()


def environment(**more):
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("SLURM")},
        "OMP_NUM_THREADS": "1",
        **more,
    }


# What is imported before forks: for every command, and for those that generate.
TRAINING = (
    "torch.distributed.run",
    "job.setup",
    "job.tracking",
    "rl.roles",
    "engines.fsdp.engine",
    "data.dataset",
    "data.prompts",
    "matplotlib.pyplot",
)
ROLLOUT = (
    *TRAINING,
    "rollout.vllm.engine",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.qwen2",
    "compressed_tensors.compressors",
)
GENERATING = re.compile(
    r"train_ppo|/(rollout|rollout_images|scheduler|speculation|adapters)_worker|"
    r"/(generation_profile|speculative_h200|weight_sync_h200)"
)
SERVERS = threading.Lock()


@cache
def fork_server(modules: tuple[str, ...]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.forked", "serve", *modules],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment(VLLM_LOGGING_LEVEL="ERROR"),
    )


def script_of(command: list[str], cwd: Path, env: dict[str, str]) -> str | None:
    """The script or module of this repository that a command of this Python's runs, if it is one."""
    if command[0] != sys.executable or command[1] == "-c":
        return None
    if command[1] == "-m" and command[2] != "torch.distributed.run":
        found = str(ROOT) in (str(cwd), *env.get("PYTHONPATH", "").split(os.pathsep))
        module = ROOT / command[2].replace(".", "/")
        exists = module.with_suffix(".py").exists() or (module / "__main__.py").exists()
        return command[2] if found and exists else None
    script = next((word for word in command[1:] if word.endswith(".py")), None)
    return script if script and (cwd / script).resolve().is_relative_to(ROOT) else None


def end_of(
    command: list, cwd: Path, env: dict[str, str], timeout: float, fresh: bool
) -> subprocess.CompletedProcess:
    """Run a command to its end. If that takes more than timeout [s], it is stopped and has no exit code."""
    command = [*map(str, command)]
    script = None if fresh else script_of(command, cwd, env)
    if script:
        return end_of_fork(
            command, ROLLOUT if GENERATING.search(script) else TRAINING, cwd, env, timeout
        )
    process = subprocess.Popen(
        command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # not kill: torchrun takes its ranks along only when asked to end
        out, err = process.communicate()
        return subprocess.CompletedProcess(command, None, out, f"{err}\nstopped after {timeout} s")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def end_of_fork(
    command: list[str], modules: tuple[str, ...], cwd: Path, env: dict[str, str], timeout: float
) -> subprocess.CompletedProcess:
    """The same of a fork of a Python that has imported these modules."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder, deadline, late = Path(name), time.monotonic() + timeout, ""
        code, said = folder / "code", [folder / "stdout", folder / "stderr"]
        for file in said:
            file.touch()
        (folder / "request.json").write_text(
            json.dumps({"command": command[1:], "cwd": str(cwd), "env": env})
        )
        with SERVERS:  # of which two threads would start two
            server = fork_server(modules)
            server.stdin.write(f"{folder}\n")
            server.stdin.flush()
        try:
            while not code.exists() and time.monotonic() < deadline:
                assert server.poll() is None, (
                    f"no Python to fork from: exit code {server.returncode}"
                )
                time.sleep(0.02)
        finally:
            if not code.exists() and (folder / "watcher").exists():
                late = f"\nstopped after {timeout} s"
                family = psutil.Process(int((folder / "watcher").read_text())).children(
                    recursive=True
                )
                for process in family[:1]:
                    process.terminate()  # torchrun takes its ranks along
                for process in psutil.wait_procs(family, 40)[1]:
                    process.kill()
        out, err = (file.read_text() for file in said)
        return subprocess.CompletedProcess(
            command, None if late or not code.exists() else int(code.read_text()), out, err + late
        )


def launch(
    num_ranks: int,
    script: str,
    *arguments,
    returncode: int = 0,
    timeout: float = LIMIT,
    fresh: bool = False,
) -> subprocess.CompletedProcess:
    """Run a script (a path from the repository root) under torchrun; unless it exits with returncode within timeout [s], fail
    with the beginning and the end of what it printed."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
        script,
        *arguments,
    ]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = end_of(command, ROOT, environment(PYTHONPATH=path), timeout, fresh)
    out, err = done.stdout, done.stderr
    # The other ranks complain of the first one's end, at length.
    assert done.returncode == returncode, (
        f"{script} on {num_ranks} ranks: exit code {done.returncode}, not {returncode}\n"
        f"{out[-2000:]}\n{err[max(0, err.find('Traceback')) :][:8000]}\n...\n{err[-4000:]}"
    )
    return done


def run(command, returncode=0, cwd=ROOT, fresh=False, **env):
    """One command, to its end; if it has environment variables of its own other than PYTHONPATH, in a fresh Python."""
    done = end_of(
        command, cwd, environment(**env), LIMIT, fresh or bool(env.keys() - {"PYTHONPATH"})
    )
    assert done.returncode == returncode, (done.stdout + done.stderr)[-9000:]
    return done


def export(checkpoint: Path, directory: Path, *more, returncode=0, fresh=False) -> str:
    """What the offline export of a checkpoint says to standard error."""
    return run(
        [sys.executable, "-m", "engines.checkpoint", "export", checkpoint, directory, *more],
        returncode,
        fresh=fresh,
    ).stderr


def imported(stderr):
    """The modules that a process started with PYTHONPROFILEIMPORTTIME=1 imported."""
    return {
        line.rsplit("|", 1)[1].strip()
        for line in stderr.splitlines()
        if line.startswith("import time:")
    }


def heed_signals():
    """In a child: the signals that nohup, and a shell that starts something in the background, let their children ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(command, log, **env):
    """A process to wait for, or to end; log: the file for what it prints."""
    with open(log, "w") as file:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(**env),
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=heed_signals,
        )


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
