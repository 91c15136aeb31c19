"""Choose the network over which the nodes of a run talk to each other, and try it.

By itself, gloo takes the address that the node's own name resolves to. On many machines this is
127.0.0.1, where no other node can connect. So each node uses the interface that reaches the others,
unless the user has named one in GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME or HCCL_SOCKET_IFNAME.
"""

import datetime
import ipaddress
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch.distributed as dist

from config import InputError

SECONDS_TO_CONNECT = 20
SECONDS_TO_REPORT = 60
# Variable -> its notation for exactly one interface.
VARIABLES = {
    "GLOO_SOCKET_IFNAME": "{}",
    "NCCL_SOCKET_IFNAME": "={}",
    "HCCL_SOCKET_IFNAME": "={}",
}
ANY_PORT = 9  # connecting a UDP socket sends nothing, so the port does not matter


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        machine: the same text for all ranks that share a network stack, and only for these.
        name: the host name.
        address: this node's address on the way to the rendezvous. On the node of the rendezvous it
            is often a loopback address.
    """

    machine: str
    name: str
    address: str

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def connect_nodes(store: dist.Store, rank: int, num_ranks: int) -> None:
    """Choose this node's interface, and check that the nodes reach each other.

    Called by all ranks before they join a process group. Does nothing if all are on one node.

    Args:
        store: a store that all ranks share.

    Raises:
        InputError: on all ranks, if a node cannot reach another one.
    """
    own = Place(machine_id(), socket.gethostname(), address_towards(os.environ["MASTER_ADDR"]))
    places = [Place(**values) for values in share(store, "place", rank, num_ranks, asdict(own))]
    first_ranks = {place.machine: r for r, place in reversed(list(enumerate(places)))}
    if len(first_ranks) == 1:
        return
    address = choose_interface(own, places, is_reported=rank == 0)
    is_first = first_ranks[own.machine] == rank
    listener = socket.create_server((address, 0), family=family_of(address)) if is_first else None
    port = listener.getsockname()[1] if listener else 0
    endpoints = share(store, "endpoint", rank, num_ranks, [address, port])
    ranks_to_reach = [r for r in first_ranks.values() if r != rank] if is_first else []
    problem = first_problem(own, places, endpoints, ranks_to_reach)
    problems = share(store, "problem", rank, num_ranks, problem, SECONDS_TO_REPORT)
    if listener:
        listener.close()
    for text in filter(None, problems):
        raise InputError(text)


def share(
    store: dist.Store, name: str, rank: int, num_ranks: int, value, seconds: float | None = None
) -> list:
    """Return the `value` of every rank, which must be representable in JSON.

    seconds: how long to wait for the other ranks; None for the store's own limit.
    """
    keys = [f"network/{name}/{r}" for r in range(num_ranks)]
    store.set(keys[rank], json.dumps(value))
    if seconds is not None:
        store.wait(keys, datetime.timedelta(seconds=seconds))
    return [json.loads(store.get(key)) for key in keys]


def machine_id() -> str:
    """Return a text that only processes with the same network stack share."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network = os.stat("/proc/self/ns/net").st_ino
    return f"{boot} {network}"


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def address_towards(host: str) -> str:
    """Return this node's own address on the way to a host. Sends nothing.

    Raises:
        InputError: the host has no address, or no route leads to it.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    except OSError as error:
        raise InputError(
            f"MASTER_ADDR={host} cannot be reached from {socket.gethostname()}: {error}; set it to "
            "a name or an address of the first node that all nodes know"
        ) from None


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this address, or None."""
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            # An IPv6 address may end with the name of its interface, such as fe80::1%eth0.
            if entry.address.partition("%")[0] == address.partition("%")[0]:
                return name
    return None


def variables_for(interface: str) -> dict[str, str]:
    """Return the variables that choose an interface, without those that the user has set."""
    unset = [name for name in VARIABLES if not os.environ.get(name)]
    return {name: VARIABLES[name].format(interface) for name in unset}


def choose_interface(own: Place, places: list[Place], is_reported: bool) -> str:
    """Choose the interface that reaches the other nodes, and return its address.

    The node of the rendezvous may know itself only by a loopback address. It chooses the interface
    that leads to the first other node whose address is not loopback.

    Args:
        own: the place of this rank.
        places: the places of all ranks.
        is_reported: whether to print the choice.
    """
    address = own.address
    if own.is_loopback:
        outside = [p for p in places if p.machine != own.machine and not p.is_loopback]
        if outside:
            address = address_towards(outside[0].address)
    interface = interface_of(address)
    if interface is None or ipaddress.ip_address(address).is_loopback:
        return address
    variables = variables_for(interface)
    os.environ.update(variables)
    if is_reported and "GLOO_SOCKET_IFNAME" in variables:
        print(
            f"network: {own.name} reaches the other nodes over {interface} ({address}); "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose another interface",
            flush=True,
        )
    return address


def first_problem(
    own: Place, places: list[Place], endpoints: list[list], ranks: list[int]
) -> str | None:
    """Try to connect to the first rank of each other node; return what went wrong, or None.

    Args:
        endpoints: for each rank, the address and the port where it listens.
        ranks: the ranks to connect to.
    """
    for rank in ranks:
        address, port = endpoints[rank]
        try:
            socket.create_connection((address, port), SECONDS_TO_CONNECT).close()
        except OSError as error:
            return (
                f"node {own.name} cannot reach node {places[rank].name} at {address}: {error}; "
                "check firewalls between the nodes, or name another network on every node with "
                "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
            )
    return None
