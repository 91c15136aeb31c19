"""A real Slurm of two nodes on this machine.

Needs root, and slurmctld, slurmd and munged (Debian: slurm-wlm, munge).
"""

import os
import re
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

DAEMONS = ("slurmctld", "slurmd", "munged")
NODES = ("soak1", "soak2")
CONTROLLER_PORT = 16917
NODE_PORTS = (16918, 16919)
SECONDS_TO_START = 60
SECONDS_UNTIL_LOST = 20  # without a sign of life from a node's daemon
CONFIG = """\
ClusterName=soak
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n
SlurmdTimeout={timeout}
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=5
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PartitionName=all Nodes={nodes} Default=YES State=UP OverSubscribe=YES MaxTime=INFINITE
"""


class Slurm:
    """The daemons. Raises RuntimeError where they are missing or do not start."""

    def __init__(self, folder: Path):
        """folder: for configuration, state and logs; made if it does not exist."""
        missing = [name for name in DAEMONS if shutil.which(name, path=search_path()) is None]
        if missing:
            raise RuntimeError(f"no {', '.join(missing)}: apt-get install slurm-wlm munge")
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.environment = {
            **os.environ,
            "PATH": search_path(),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }
        self.names_added = self._add_host_names()
        try:
            self._start()
        except (RuntimeError, subprocess.CalledProcessError):
            self.close()
            raise

    def _add_host_names(self) -> str:
        """Let the nodes' names resolve, since MASTER_ADDR is one; return the line added."""
        line = f"127.0.0.1 {' '.join(NODES)}\n"
        hosts = Path("/etc/hosts")
        if line in hosts.read_text():
            return ""
        with hosts.open("a") as file:
            file.write(line)
        return line

    def _start(self) -> None:
        config = CONFIG.format(
            host=socket.gethostname(),
            port=CONTROLLER_PORT,
            folder=self.folder,
            timeout=SECONDS_UNTIL_LOST,
            nodes=",".join(NODES),
        )
        for name, port in zip(NODES, NODE_PORTS):
            config += (
                f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 "
                f"Port={port} CPUs={os.cpu_count()}\n"
            )
        (self.folder / "slurm.conf").write_text(config)
        (self.folder / "state").mkdir()
        self._start_munge()
        self.run("slurmctld", "-f", self.folder / "slurm.conf")
        for node in range(len(NODES)):
            self.start_node(node)
        deadline = time.monotonic() + SECONDS_TO_START
        while self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() != str(len(NODES)):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the nodes are not idle, see {self.folder}/*.log")
            time.sleep(0.5)

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {
            "--key-file": key,
            "--socket": self.folder / "munge.socket",
            "--pid-file": self.folder / "munged.pid",
            "--log-file": self.folder / "munged.log",
            "--seed-file": self.folder / "munge.seed",
        }
        words = [str(word) for option in files.items() for word in option]
        self.run("munged", "--force", *words)

    def run(self, *command) -> str:
        """Run one of Slurm's programs and return what it prints."""
        words = [str(word) for word in command]
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=120
        )
        if done.returncode:
            raise RuntimeError(f"{words[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    # ---- nodes ----

    def start_node(self, node: int) -> None:
        self.run("slurmd", "-f", self.folder / "slurm.conf", "-N", NODES[node])

    def lose_node(self, node: int) -> None:
        """Kill a node's daemon and everything that runs on it."""
        pid = int((self.folder / f"{NODES[node]}.pid").read_text())
        psutil.Process(pid).kill()
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get("SLURMD_NODENAME") == NODES[node]:
                    process.kill()

    # ---- jobs ----

    def submit(self, script: Path, log: Path, options: list[str], arguments: list[str]) -> int:
        """Submit a batch script and return the number of the job. log: appended to."""
        words = ["sbatch", "--parsable", f"--output={log}", *options, script, *arguments]
        return int(self.run(*words).strip())

    def state(self, job: int) -> str:
        """Return a job's state, such as RUNNING or COMPLETED."""
        shown = self.run("scontrol", "show", "job", job)
        return re.search(r"JobState=(\w+)", shown)[1]

    def start_now(self, job: int) -> None:
        """Start a requeued job at once: Slurm lets it wait for two minutes."""
        with suppress(RuntimeError):  # it may have begun
            self.run("scontrol", "update", f"jobid={job}", "StartTime=now")

    def close(self) -> None:
        """End the daemons and all jobs."""
        for node in range(len(NODES)):
            with suppress(OSError, ValueError, psutil.NoSuchProcess):
                self.lose_node(node)
        for name in ("slurmctld", "munged"):
            with suppress(OSError, ValueError, psutil.NoSuchProcess):
                psutil.Process(int((self.folder / f"{name}.pid").read_text())).kill()
        if self.names_added:
            hosts = Path("/etc/hosts")
            hosts.write_text(hosts.read_text().replace(self.names_added, ""))


def search_path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"
