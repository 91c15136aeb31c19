"""The device of this rank (cuda, npu or cpu, through torch.accelerator) and the process group."""

import datetime
import os
import pickle
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from config import PARENT, InputError, die_with

# Dense bf16 FLOP/s of one device, from the vendors' data sheets; first match wins. No entry: no MFU is reported.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
}


def init(timeout_minutes: float = 30) -> torch.device:
    """Join the process group that torchrun or srun's environment describes (none: a group of one); return the device.

    Raises InputError when the environment is incomplete or this rank has no device of its own.
    """
    if "RANK" not in os.environ:
        os.environ.update(
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=free_port(),
        )
    for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise InputError(
                f"RANK is set but {name} is not: start with torchrun, or with examples/slurm/rank.sh"
            )
    local_rank = int(os.environ["LOCAL_RANK"])
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    device = torch.device(accelerator.type, local_rank) if accelerator else torch.device("cpu")
    if (
        "TORCHELASTIC_RUN_ID" in os.environ
    ):  # torchrun may be killed, and nobody would end its ranks
        die_with(PARENT)
    if accelerator:
        count = torch.accelerator.device_count()
        if max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", 1))) > count:
            raise InputError(
                f"more processes than devices: start {count} per node, one for each device"
            )
        torch.accelerator.set_device_index(local_rank)
    torch.backends.cudnn.allow_tf32 = (
        False  # fp32 means fp32 in convolutions, too, as it does in matrix products
    )
    # gloo beside the accelerator's backend serves tensors that stay on the host (checkpoints, offloaded parameters).
    backend = {"cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}.get(device.type, "gloo")
    dist.init_process_group(
        backend,
        timeout=datetime.timedelta(minutes=timeout_minutes),
        device_id=device if device.type == "cuda" else None,
    )
    return device


def set_timeouts(minutes: float) -> None:
    """Let no collective of any group that exists wait longer. (A group that a library makes has a limit of its own.)"""
    from torch.distributed.distributed_c10d import _set_pg_timeout, _world

    for group in list(_world.pg_map):
        _set_pg_timeout(datetime.timedelta(minutes=minutes), group)


def seconds_in_collective() -> float:
    """How long ago this rank began the oldest collective of an NVIDIA device that has not ended yet; 0 without one."""
    if not torch.cuda.is_available():
        return 0.0
    from torch._C._distributed_c10d import _dump_nccl_trace

    begun = [
        entry["time_created_ns"]
        for entry in pickle.loads(_dump_nccl_trace(True, False, True)).get("entries", ())
    ]
    return time.time() - min(begun) / 1e9 if begun else 0.0


def on_rank0(work: Callable, *args, group: dist.ProcessGroup | None = None):
    """Run work(*args) on rank 0 alone and return its (pickled) result on every rank. group: of all ranks, of gloo.

    An InputError there is raised on every rank, so that all of them leave with one line and exit code 2.
    """
    if not dist.is_initialized():
        return work(*args)
    # The others wait as long as it takes to tokenize a large file, which an accelerator's group would not allow.
    own_group = (
        None if group else dist.new_group(backend="gloo", timeout=datetime.timedelta(days=7))
    )
    box = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = work(*args)
        except InputError as error:
            box[1] = str(error)
    dist.broadcast_object_list(box, src=0, group=group or own_group)
    if own_group:
        dist.destroy_process_group(own_group)
    if box[1] is not None:
        raise InputError(box[1])
    return box[0]


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copied from pinned memory, so that nobody waits for what the device still has to do."""
    return (
        tensor.contiguous().pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else tensor.contiguous().to(device)
    )


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of the device, None when its name is not known (a CPU, a new card)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def capacity(device: torch.device) -> int:
    """Bytes of memory that an accelerator has; 0 for a CPU."""
    return 0 if device.type == "cpu" else torch.get_device_module().mem_get_info()[1]


def memory() -> dict[str, float]:
    """GiB on this rank since the last reset: the allocator's peak on an accelerator, the process's peak on a CPU."""
    if torch.accelerator.is_available():
        return {
            "perf/memory_peak_gib": torch.accelerator.max_memory_allocated() / 2**30,
            "perf/memory_reserved_gib": torch.accelerator.max_memory_reserved() / 2**30,
        }
    status = Path(
        "/proc/self/status"
    ).read_text()  # getrusage() begins with the peak of the process that started this one
    return {"perf/memory_peak_gib": int(re.search(r"VmHWM:\s*(\d+)", status)[1]) / 2**20}


def synchronize() -> float:
    """Wait for the accelerator, then read the clock [s]."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def shutdown() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def free_port() -> str:
    """A TCP port of this machine that nobody listens on, as the environment wants it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])
