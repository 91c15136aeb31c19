"""Start scripts on one rank or several, end them, and read the files they leave.

`start()` starts a command; `run()` and `launch()` wait for it to end. Unless told to use a fresh
interpreter, they fork it off one that has already imported torch (tests/support/forked.py), which
saves 10 to 20 seconds per command.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import psutil
import pytest
from filelock import FileLock

from tests.support import metric_names

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# Environment variables that no import reads, so that commands with their own values can be forked.
READ_WHEN_USED = {"PYTHONPATH", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"}
# Seconds. Most runs take one or two minutes; all cases of an engine together take ten.
LIMIT = 900
LONG_LIMIT = 2400
# After SIGTERM torchrun has this many seconds to end its ranks.
SECONDS_TO_END = 40

# Modules that are imported before forking: for every command, for those that generate, and for
# those with Megatron, some of which generate.
TRAINING = (
    "torch.distributed.run",
    "job.run",
    "rl.roles",
    "engines.fsdp.engine",
    "data.dataset",
    "data.prompts",
    "matplotlib.pyplot",
    "matplotlib.backends.backend_agg",
    "transformers.models.qwen3.modeling_qwen3",
    "datasets",
    "peft",
    "torch.utils.tensorboard",
)
ROLLOUT = (
    *TRAINING,
    "rollout.vllm.engine",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.qwen2",
    "compressed_tensors.compressors",
)
MEGATRON = (*ROLLOUT, "engines.megatron.engine")
# A server with more modules is a fork of the one with fewer.
FORKED_FROM = {ROLLOUT: TRAINING, MEGATRON: ROLLOUT}
GENERATES = re.compile(
    r"train_ppo|examples/loop|rollout\.episodes\.try|engines\.check|"
    r"/(rollout|rollout_images|episodes|partial|scheduler|speculation|adapters|pooling|fp8|routes)"
    r"_worker|"
    r"/(episodes_gpu|generation_profile|speculative_h200|weight_sync_h200)"
)
USES_MEGATRON = re.compile(r"megatron_worker|profiling_worker|model_engine=megatron")
# pyarrow, which data sets need, would start a thread that returns memory to the system.
SERVER_VARIABLES = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
# On a machine with a GPU, importing torch starts threads, which a fork would lack.
CAN_FORK = shutil.which("nvidia-smi") is None
# vLLM's build for CPUs gives the shared memory of tensor parallelism the same name in every run, so
# two runs must not start at once, even in the two processes of pytest-xdist.
SHARED_MEMORY_LOCK = Path(tempfile.gettempdir()) / "rankwise-tests-shared-memory.lock"
# Otherwise two threads could each start a server.
SERVER_LOCK = threading.Lock()


class QuickGuard:
    """Fails a test that starts torchrun although `make quick` selected it.

    tests/conftest.py sets `item`, the running test, when pytest deselects slow tests.
    """

    item: pytest.Item | None = None

    @classmethod
    def check(cls, command: list[str]) -> None:
        starts_torchrun = "torch.distributed.run" in command
        if starts_torchrun and cls.item is not None:
            pytest.fail(f"{cls.item.nodeid} starts torchrun: mark it with @pytest.mark.slow")


def launch_each(launches: dict, run: Callable) -> Callable:
    """Call `run(name)` for every launch and return a function that maps a name to its result.

    Launches of one rank run two at a time; the others run alone, since two ranks fill two cores.

    Args:
        launches: name -> an object with the attribute `ranks`.
    """
    single = [name for name in launches if launches[name].ranks == 1]
    several = [name for name in launches if launches[name].ranks > 1]
    runs: dict[str, Future] = {}
    for num_threads, names in ((2, single), (1, several)):
        with ThreadPoolExecutor(num_threads) as pool:
            for name in names:
                runs[name] = pool.submit(run, name)
    return lambda name: runs[name].result()


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment for a run: one thread per rank, and no Slurm job.

    Runs may write bytecode: each imports the repository's modules, and would compile them anew.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    inherited.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**inherited, "OMP_NUM_THREADS": "1", **variables}


@dataclass
class ForkServer:
    """An interpreter that has imported some modules and forks for every request.

    first: the server it is a fork of, or itself. When that ends, so do its forks.
    requests: where it reads them; see tests/support/forked.py
    """

    first: subprocess.Popen
    requests: TextIO

    def send(self, *words: Any) -> None:
        self.requests.write("\t".join(map(str, words)) + "\n")
        self.requests.flush()


@cache
def fork_server(modules: tuple[str, ...]) -> ForkServer:
    """Return the server that has imported these modules."""
    if modules in FORKED_FROM:
        shared = FORKED_FROM[modules]
        return fork_of_server(fork_server(shared), modules[len(shared) :])
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.forked", "serve", *modules],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment(**SERVER_VARIABLES),
    )
    return ForkServer(process, process.stdin)


def fork_of_server(server: ForkServer, modules: tuple[str, ...]) -> ForkServer:
    """Return a fork of a server that imports further modules."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = Path(folder) / "requests"
        os.mkfifo(pipe)
        server.send("serve", pipe, *modules)
        return ForkServer(server.first, open(pipe, "w"))  # waits until the fork opens it, too


def script_of(command: list[str], cwd: Path, env: dict[str, str]) -> str | None:
    """Return the script or module of this repository that a Python command runs, or None."""
    if command[0] != sys.executable or command[1] == "-c":
        return None
    if command[1] == "-m" and command[2] != "torch.distributed.run":
        search_path = [str(cwd), *env.get("PYTHONPATH", "").split(os.pathsep)]
        module = ROOT / command[2].replace(".", "/")
        exists = module.with_suffix(".py").exists() or (module / "__main__.py").exists()
        return command[2] if exists and str(ROOT) in search_path else None
    script = next((word for word in command[1:] if word.endswith(".py")), None)
    if script is None or not (cwd / script).resolve().is_relative_to(ROOT):
        return None
    return script


def modules_of(script: str, command: list[str]) -> tuple[str, ...]:
    """Return the modules that the processes of a command, which runs this script, should share."""
    if USES_MEGATRON.search(" ".join(command)):
        return MEGATRON
    return ROLLOUT if GENERATES.search(script) else TRAINING


def shared_memory_lock(command: list[str]) -> AbstractContextManager:
    """Return a lock for a run whose vLLM may be tensor parallel."""
    text = " ".join(command)
    num_ranks = re.search(r"--nproc-per-node[= ](\d+)", text)
    if num_ranks and int(num_ranks[1]) > 1 and GENERATES.search(text):
        return FileLock(SHARED_MEMORY_LOCK)
    return nullcontext()


def run_to_end(
    command: list, cwd: Path, env: dict[str, str], timeout: float, fresh: bool
) -> subprocess.CompletedProcess:
    """Run a command to its end, forked where that is possible.

    After `timeout` seconds the command is stopped; its return code is then None.

    Asserts that docs/metrics.md has every metric that the command has written.
    """
    command = [str(word) for word in command]
    QuickGuard.check(command)
    with shared_memory_lock(command):
        done = run_now(command, cwd, env, timeout, fresh)
    for word in command:
        key, _, value = word.partition("=")
        if key == "output_dir":
            metric_names.check_run(cwd / value)
    return done


def run_now(
    command: list[str], cwd: Path, env: dict[str, str], timeout: float, fresh: bool
) -> subprocess.CompletedProcess:
    script = script_of(command, cwd, env) if CAN_FORK and not fresh else None
    if script is not None:
        modules = modules_of(script, command)
        return fork_to_end(command, modules, cwd, env, timeout)
    process = subprocess.Popen(
        command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # SIGKILL would leave torchrun's ranks behind
        out, err = process.communicate()
        return subprocess.CompletedProcess(command, None, out, f"{err}\nstopped after {timeout} s")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def fork_to_end(
    command: list[str], modules: tuple[str, ...], cwd: Path, env: dict[str, str], timeout: float
) -> subprocess.CompletedProcess:
    """Run a command to its end in a fork of an interpreter that has imported `modules`."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "stdout").touch()
        (folder / "stderr").touch()
        process = Fork(command, modules, cwd, env, folder)
        ended = True
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            ended = False
        finally:
            if process.poll() is None:
                process.stop()
        out = (folder / "stdout").read_text()
        err = (folder / "stderr").read_text()
        if not ended:
            err += f"\nstopped after {timeout} s"
        return subprocess.CompletedProcess(command, process.poll() if ended else None, out, err)


class Fork:
    """A command in a fork of an interpreter that has imported `modules`, used like a Popen.

    Attributes:
        folder: of the request; see tests/support/forked.py. It holds the files stdout and stderr.
    """

    def __init__(
        self,
        command: list[str],
        modules: tuple[str, ...],
        cwd: Path,
        env: dict[str, str],
        folder: Path,
    ):
        self.args = command
        self.folder = folder
        request = {"command": command[1:], "cwd": str(cwd), "env": env}
        (folder / "request.json").write_text(json.dumps(request))
        self.server = send_request(modules, folder)

    @property
    def pid(self) -> int:
        """The number of the command's process, which exists soon after the request."""
        file = self.folder / "command"
        while not file.exists():
            time.sleep(0.002)
        return int(file.read_text())

    def poll(self) -> int | None:
        """Return the exit code, or None while the command or a process it started is running."""
        file = self.folder / "code"
        if file.exists():
            return int(file.read_text())
        code = self.server.first.poll()
        assert code is None, f"the fork server ended with code {code}"
        return None

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or LIMIT)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.02)
        return self.poll()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        """End the command and all its descendants."""
        watcher_file = self.folder / "watcher"
        if not watcher_file.exists():
            return
        watcher = psutil.Process(int(watcher_file.read_text()))
        descendants = watcher.children(recursive=True)
        if descendants:
            descendants[0].terminate()  # torchrun ends its ranks
        _, alive = psutil.wait_procs(descendants, SECONDS_TO_END)
        for process in alive:
            process.kill()


def send_request(modules: tuple[str, ...], folder: Path) -> ForkServer:
    """Ask the server with these modules to run the request in `folder`; return the server."""
    with SERVER_LOCK:
        server = fork_server(modules)
        server.send("run", folder)
    return server


def launch(
    num_ranks: int,
    script: str,
    *arguments,
    returncode: int = 0,
    timeout: float = LIMIT,
    fresh: bool = False,
) -> subprocess.CompletedProcess:
    """Run a script under torchrun and assert its exit code.

    Args:
        script: path from the root of the repository.
        timeout: seconds; a run that takes longer fails.
        fresh: start a new interpreter instead of forking one.
    """
    ranks = ["--standalone", f"--nproc-per-node={num_ranks}"]
    command = [*TORCHRUN, *ranks, script, *arguments]
    inherited_path = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([str(ROOT), *inherited_path])
    done = run_to_end(command, ROOT, environment(PYTHONPATH=path), timeout, fresh)
    # The first traceback is the cause; the other ranks report its consequences at length.
    cause = max(0, done.stderr.find("Traceback"))
    assert done.returncode == returncode, (
        f"{script} on {num_ranks} ranks: exit code {done.returncode}, not {returncode}\n"
        f"{done.stdout[-2000:]}\n{done.stderr[cause:][:8000]}\n...\n{done.stderr[-4000:]}"
    )
    return done


def run(
    command: list,
    returncode: int = 0,
    cwd: Path = ROOT,
    fresh: bool = False,
    mounts_of: int | None = None,
    **env: str,
) -> subprocess.CompletedProcess:
    """Run a command to its end and assert its exit code.

    With mounts_of, it sees the disks that are mounted in that process's namespace.

    A command with environment variables of its own (other than READ_WHEN_USED) is never forked: the
    imports that it would share may have read them.
    """
    needs_own_imports = bool(env.keys() - READ_WHEN_USED)
    if mounts_of is not None and CAN_FORK:
        env["MOUNTS_OF"] = str(mounts_of)
    elif mounts_of is not None:
        user_namespace = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        command = ["nsenter", f"--target={mounts_of}", *user_namespace, "--mount", *command]
    done = run_to_end(command, cwd, environment(**env), LIMIT, fresh or needs_own_imports)
    assert done.returncode == returncode, (done.stdout + done.stderr)[-9000:]
    return done


def export(checkpoint: Path, directory: Path, *options, returncode=0, fresh=False) -> str:
    """Export a checkpoint offline; return what the command prints to standard error."""
    command = [sys.executable, "-m", "engines.checkpoint", "export", checkpoint, directory]
    return run([*command, *options], returncode, fresh=fresh).stderr


def imported(stderr: str) -> set[str]:
    """Return the modules imported by a process that ran with PYTHONPROFILEIMPORTTIME=1."""
    lines = [line for line in stderr.splitlines() if line.startswith("import time:")]
    return {line.rsplit("|", 1)[1].strip() for line in lines}


def heed_signals() -> None:
    """Restore the signals that nohup, or a shell that starts a job in the background, ignores."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(command: list, log: Path, fresh: bool = False, **env: str) -> subprocess.Popen | Fork:
    """Start a command to which the test sends signals; `log` receives its output.

    It is forked like those of `run`, unless it has environment variables of its own.
    """
    command = [str(word) for word in command]
    QuickGuard.check(command)
    own_environment = environment(**env)
    script = script_of(command, ROOT, own_environment) if CAN_FORK else None
    if script is not None and not fresh and not env.keys() - READ_WHEN_USED:
        folder = log.with_name(f"{log.name}.fork")
        folder.mkdir()
        log.write_text("")
        (folder / "stdout").symlink_to(log)
        (folder / "stderr").symlink_to(log)
        process = Fork(command, modules_of(script, command), ROOT, own_environment, folder)
    else:
        with open(log, "w") as file:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=own_environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=heed_signals,
            )
    process.log = log
    return process


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen | Fork, seconds=LIMIT
) -> None:
    """Wait until `condition()` holds while `process` is alive."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"the run ended too early:\n{output_of(process)}"
        assert time.monotonic() < deadline, "the run is too slow"
        time.sleep(0.002)


def output_of(process: subprocess.Popen | Fork) -> str:
    """Return what a process of start() has printed, and nothing for others."""
    log = getattr(process, "log", None)
    return log.read_text() if log else ""


def kill_all(process: subprocess.Popen | Fork) -> None:
    """Send SIGKILL to every rank and to torchrun at once, as if the node went down."""
    parent = psutil.Process(process.pid)
    for member in [*parent.children(recursive=True), parent]:
        member.kill()
    process.wait()


def metrics(out: Path) -> list[dict]:
    """Return the metrics of every step of a run, and of a validation before the first step.

    The last line, which holds only the time of the last checkpoint, is left out.
    """
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.keys() != {"step", "timing/save"}]


def checkpoints(out: Path) -> list[str]:
    """Return the names of a run's checkpoint directories, in order."""
    return sorted(path.name for path in (out / "checkpoints").iterdir())
