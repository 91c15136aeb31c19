"""Join the process group of a run; report a rank that cannot reach the others in one line."""

import datetime
import os
import socket

import torch
import torch.distributed as dist

from config import InputError
from engines.parallel.network import connect_nodes


def join(backend: str, device: torch.device, timeout_minutes: float) -> None:
    """Join the process group that the environment variables describe.

    Args:
        backend: as for init_process_group(), e.g. "gloo" or "cpu:gloo,cuda:nccl".
        timeout_minutes: how long to wait for the other ranks, and how long collectives wait.

    Raises:
        InputError: the other ranks or nodes cannot be reached, the port of rank 0 is in use, or an
            environment variable names a network interface that this node does not have.
    """
    interfaces = [name for _, name in socket.if_nameindex()]
    check_gloo_interfaces(os.environ.get("GLOO_SOCKET_IFNAME", ""), interfaces)
    if "nccl" in backend:
        check_nccl_interfaces(os.environ.get("NCCL_SOCKET_IFNAME", ""), interfaces)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    try:
        store, rank, num_ranks = next(dist.rendezvous("env://", timeout=timeout))
        connect_nodes(store, rank, num_ranks)
        dist.init_process_group(
            backend,
            timeout=timeout,
            store=dist.PrefixStore("default_pg", store),
            rank=rank,
            world_size=num_ranks,
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as error:  # like all errors of torch.distributed
        raise InputError(explain(error)) from None


def explain(error: RuntimeError) -> str:
    """Return the message for a rank that cannot join: which one, where, why, and what to do."""
    # The rest is a trace of C++ functions.
    reason = str(error).partition("\nException raised from")[0].strip().rstrip(".")
    port = os.environ["MASTER_PORT"]
    if "address already in use" in reason.lower():
        advice = (
            f"another process uses port {port}: end it, or choose another port with torchrun "
            "--standalone, torchrun --master-port, or MASTER_PORT"
        )
    else:
        advice = (
            "check that every rank has been started, that this node reaches that address and port, "
            "and that GLOO_SOCKET_IFNAME (with NVIDIA GPUs also NCCL_SOCKET_IFNAME) names the "
            "network between the nodes"
        )
    return (
        f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} cannot join the other ranks at "
        f"{os.environ['MASTER_ADDR']}:{port}: {reason}; {advice}"
    )


def check_gloo_interfaces(names: str, interfaces: list[str]) -> None:
    """Raise InputError if GLOO_SOCKET_IFNAME, a list of names, has one that does not exist."""
    for name in filter(None, names.split(",")):
        if name not in interfaces:
            raise InputError(missing_interface("GLOO_SOCKET_IFNAME", names, interfaces))


def check_nccl_interfaces(names: str, interfaces: list[str]) -> None:
    """Raise InputError if no interface fits NCCL_SOCKET_IFNAME.

    Args:
        names: a list of prefixes; after "=", of whole names; after "^", of prefixes to leave out.
    """
    prefixes = tuple(names.lstrip("=").split(","))
    if names.startswith("="):
        fits = any(interface in prefixes for interface in interfaces)
    else:
        fits = any(interface.startswith(prefixes) for interface in interfaces)
    if names and not names.startswith("^") and not fits:
        raise InputError(missing_interface("NCCL_SOCKET_IFNAME", names, interfaces))


def missing_interface(variable: str, names: str, interfaces: list[str]) -> str:
    return (
        f"the environment variable {variable}={names} names no network interface of this node, "
        f"which has {', '.join(interfaces)}: set it to one of these, or unset it"
    )
