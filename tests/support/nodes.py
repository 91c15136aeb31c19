"""Two nodes on this machine: each has a network and a host name of its own, and a cable (a veth pair) between them.

Needs root, ip (iproute2) and unshare (util-linux).
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from tests.support.launch import start

ADDRESSES = ("10.77.0.1", "10.77.0.2")


class Nodes:
    def __init__(self):
        """Raises RuntimeError with what was refused where namespaces or veth pairs are not allowed."""
        self.names = [f"soak{os.getpid()}n{i}" for i in range(2)]
        self.cables = [f"v{os.getpid()}n{i}" for i in range(2)]  # at most 15 characters
        try:
            for name in self.names:
                ip("netns", "add", name)
            ip(
                "link",
                "add",
                self.cables[0],
                "netns",
                self.names[0],
                "type",
                "veth",
                "peer",
                "name",
                self.cables[1],
                "netns",
                self.names[1],
            )
            for name, cable, address in zip(self.names, self.cables, ADDRESSES):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", cable, "up")
        except RuntimeError:
            self.close()
            raise

    def torchrun(
        self, node: int, log: Path, rendezvous: str, script: str, *arguments, before: str = "true"
    ) -> subprocess.Popen:
        """One rank of a script on a node. rendezvous: c10d | static. before: a shell command that the node runs first, in a mount
        namespace of its own."""
        how = {
            "c10d": [
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                f"{ADDRESSES[0]}:29400",
                "--rdzv-id",
                "soak",
                "--rdzv-conf",
                f"is_host={int(node == 0)}",
            ],
            "static": [
                "--node-rank",
                str(node),
                "--master-addr",
                ADDRESSES[0],
                "--master-port",
                "29400",
            ],
        }[rendezvous]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
            *how,
            "--local-addr",
            ADDRESSES[node],
            script,
            *map(str, arguments),
        ]
        shell = f"echo node{node} > /proc/sys/kernel/hostname; {before}; exec {shlex.join(command)}"
        return start(
            [
                "ip",
                "netns",
                "exec",
                self.names[node],
                "unshare",
                "--uts",
                "--mount",
                "sh",
                "-ec",
                shell,
            ],
            log,
            GLOO_SOCKET_IFNAME=self.cables[node],
        )

    def pull(self, node: int) -> None:
        """The node's cable."""
        ip("-n", self.names[node], "link", "set", self.cables[node], "down")

    def plug(self) -> None:
        for name, cable in zip(self.names, self.cables):
            ip("-n", name, "link", "set", cable, "up")

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)  # it may not be there


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
