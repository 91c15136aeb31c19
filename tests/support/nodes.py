"""Two nodes on this machine, each with its own network and host name, joined by a veth pair or by a
slow link.

Needs root, ip (iproute2) and unshare (util-linux).
"""

import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.launch import TORCHRUN, start
from tests.support.slow_link import DEVICE, start_link

ADDRESSES = ("10.77.0.1", "10.77.0.2")
RENDEZVOUS_PORT = 29400


@dataclass(frozen=True)
class Slow:
    """A slow link: seconds of delay in each direction, and the share of packets that are lost."""

    delay: float = 0.02
    share_lost: float = 0.01


class Nodes:
    """Two network namespaces. Raises RuntimeError where namespaces or veth pairs are forbidden.

    names   of the namespaces; the host names are node0 and node1
    cables  the name of each node's network device
    link    the process that passes packets on; None for a veth pair. After close(), num_packets and
            num_lost have its counts
    """

    def __init__(self, slow: Slow | None = None):
        """slow: the link between the nodes (tests/support/slow_link.py); None: a veth pair."""
        self.names = [f"soak{os.getpid()}n{i}" for i in range(2)]
        self.cables = [f"v{os.getpid()}n{i}" for i in range(2)]  # at most 15 characters
        self.link = None
        try:
            self._connect(slow)
        except RuntimeError:
            self.close()
            raise

    def _connect(self, slow: Slow | None) -> None:
        for name in self.names:
            ip("netns", "add", name)
        if slow is not None:
            self.cables = [DEVICE, DEVICE]
            self.link = start_link(self.names, slow.delay, slow.share_lost)
        else:
            first_end = [self.cables[0], "netns", self.names[0]]
            second_end = [self.cables[1], "netns", self.names[1]]
            ip("link", "add", *first_end, "type", "veth", "peer", "name", *second_end)
        for name, cable, address in zip(self.names, self.cables, ADDRESSES):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", cable, "up")

    def torchrun(
        self, node: int, log: Path, rendezvous: str, script: str, *arguments, before: str = "true"
    ) -> subprocess.Popen:
        """Start one rank of a script on a node.

        Args:
            rendezvous: "c10d" or "static", as torchrun calls them.
            before: a shell command that the node runs first, in a mount namespace of its own.
        """
        layout = ["--nnodes", "2", "--nproc-per-node", "1", "--local-addr", ADDRESSES[node]]
        command = [*TORCHRUN, *layout, *rendezvous_options(node, rendezvous)]
        command += [script, *(str(argument) for argument in arguments)]
        shell = f"echo node{node} > /proc/sys/kernel/hostname; {before}; exec {shlex.join(command)}"
        enter = ["ip", "netns", "exec", self.names[node], "unshare", "--uts", "--mount"]
        return start([*enter, "sh", "-ec", shell], log)

    def pull(self, node: int) -> None:
        """Pull out a node's cable."""
        ip("-n", self.names[node], "link", "set", self.cables[node], "down")

    def plug(self) -> None:
        """Plug in both cables."""
        for name, cable in zip(self.names, self.cables):
            ip("-n", name, "link", "set", cable, "up")

    def close(self) -> None:
        """Remove the namespaces that exist, and the cables with them."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        if self.link is not None:
            self.link.terminate()
            counts, _ = self.link.communicate()
            if counts:  # otherwise the link has ended with an error of its own
                self.num_packets, self.num_lost = map(int, counts.split())


def rendezvous_options(node: int, rendezvous: str) -> list[str]:
    """Return torchrun's options for a rendezvous on the first node."""
    if rendezvous == "c10d":
        endpoint = f"{ADDRESSES[0]}:{RENDEZVOUS_PORT}"
        is_host = int(node == 0)
        options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "soak"]
        return [*options, "--rdzv-conf", f"is_host={is_host}"]
    master = ["--master-addr", ADDRESSES[0], "--master-port", str(RENDEZVOUS_PORT)]
    return ["--node-rank", str(node), *master]


def ip(*arguments: str) -> None:
    """Run `ip`; raises RuntimeError with its message if it fails."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
