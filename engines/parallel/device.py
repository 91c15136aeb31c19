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
from engines.parallel.joining import join

# Dense bf16 FLOP/s of one device, from the vendors' data sheets; the first match counts. MFU is not
# reported for other devices.
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
# Use gloo for tensors in host memory, which checkpoints and offloaded parameters need.
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
# With these values, the user hides all devices.
HIDING_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
HIDING_VALUES = ("", "-1")
REQUIRED_VARIABLES = ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init(timeout_minutes: float = 30) -> torch.device:
    """Join the process group that the environment describes, and return this rank's device.

    torchrun or srun sets the environment variables. If RANK is not set, the group has one rank.

    Args:
        timeout_minutes: how long collectives wait.

    Raises:
        InputError: the environment is incomplete, this rank has no device of its own, or it cannot
            reach the other ranks.
    """
    if "RANK" not in os.environ:
        os.environ.update(
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=free_port(),
        )
    for name in REQUIRED_VARIABLES:
        if name not in os.environ:
            raise InputError(
                f"RANK is set but {name} is not: start with torchrun, or with "
                "examples/slurm/rank.sh"
            )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(PARENT)  # otherwise the ranks would outlive a killed torchrun
    device = select_device(int(os.environ["LOCAL_RANK"]))
    # Do not use TF32 in convolutions either: matrix products do not use it by default.
    torch.backends.cudnn.allow_tf32 = False
    join(BACKENDS.get(device.type, "gloo"), device, timeout_minutes)
    return device


def select_device(local_rank: int) -> torch.device:
    """Make the accelerator with this number the current one; without accelerators, use the CPU."""
    if not torch.accelerator.is_available():
        if local_rank == 0:
            warn_of_unused_devices()
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    if max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", 1))) > count:
        raise InputError(
            f"there are more processes than devices: start {count} per node, one for each device"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def warn_of_unused_devices(directory: Path = Path("/dev")) -> None:
    """Warn that the CPU is used on a machine with accelerators, unless they have been hidden.

    Args:
        directory: where the operating system lists devices.
    """
    names = sorted(path.name for path in directory.iterdir())
    devices = [name for name in names if re.fullmatch(r"(nvidia|davinci)\d+", name)]
    hiding = [name for name in HIDING_VARIABLES if os.environ.get(name) in HIDING_VALUES]
    if devices and not hiding:
        print(
            f"warning: this machine has {directory / devices[0]}, but torch {torch.__version__} "
            "sees no accelerator, so the CPU is used: install the torch of requirements.txt "
            "(NVIDIA) or requirements-npu.txt (Ascend), and see whether nvidia-smi or npu-smi "
            "works",
            flush=True,
        )


def set_timeouts(minutes: float) -> None:
    """Limit how long collectives wait, in all groups that exist.

    Groups that a library creates later have their own limit.
    """
    from torch.distributed.distributed_c10d import _set_pg_timeout, _world

    for group in list(_world.pg_map):
        _set_pg_timeout(datetime.timedelta(minutes=minutes), group)


def seconds_in_collective() -> float:
    """Return how long ago the oldest unfinished collective began on an NVIDIA device; 0 if none."""
    if not torch.cuda.is_available():
        return 0.0
    from torch._C._distributed_c10d import _dump_nccl_trace

    trace = pickle.loads(_dump_nccl_trace(True, False, True))
    start_times_ns = [entry["time_created_ns"] for entry in trace.get("entries", ())]
    if not start_times_ns:
        return 0.0
    return time.time() - min(start_times_ns) / 1e9


def on_rank0(work: Callable, *args, group: dist.ProcessGroup | None = None):
    """Run work(*args) on rank 0 alone, and return its (pickled) result on every rank.

    If work() raises an InputError, it is raised on every rank, so that all ranks exit with one line
    and code 2.

    group: a gloo group of all ranks. None: create one for this call.
    """
    if not dist.is_initialized():
        return work(*args)
    own_group = None
    if not group:
        # The other ranks may wait until rank 0 has tokenized a large file. In an accelerator's
        # group, that would exceed the timeout.
        own_group = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=7))
    result_and_error = [None, None]
    if dist.get_rank() == 0:
        try:
            result_and_error[0] = work(*args)
        except InputError as error:
            result_and_error[1] = str(error)
    dist.broadcast_object_list(result_and_error, src=0, group=group or own_group)
    if own_group:
        dist.destroy_process_group(own_group)
    result, error = result_and_error
    if error is not None:
        raise InputError(error)
    return result


def on_all_ranks(work: Callable, *args):
    """Return work(*args) of this rank. Called by all ranks.

    If work() raises an InputError on any rank, the first such error is raised on every rank.
    """
    result = None
    problem = None
    try:
        result = work(*args)
    except InputError as error:
        problem = str(error)
    problems = [text for text in gather_values(problem) if text is not None]
    if problems:
        raise InputError(problems[0])
    return result


def gather_values(value, group: dist.ProcessGroup | None = None) -> list:
    """Return the (pickled) value of every rank of a group, on each of them. For small values.

    group: None: all ranks.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to the device, through pinned memory so that the host does not wait."""
    if device.type == "cuda":
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor.contiguous().to(device)


def peak_flops(device: torch.device) -> float | None:
    """Return the device's dense bf16 FLOP/s, or None if it is not known (a CPU, a new card)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for part, flops in PEAK_FLOPS.items():
        if part in name:
            return flops
    return None


def capacity(device: torch.device) -> int:
    """Return the total memory of an accelerator in bytes; 0 for a CPU."""
    if device.type == "cpu":
        return 0
    return torch.get_device_module().mem_get_info()[1]


def memory() -> dict[str, float]:
    """Return this rank's peak memory in GiB since the last reset, as metrics.

    On an accelerator, peaks are the allocator's. On a CPU, the peak is the whole process's.
    """
    if torch.accelerator.is_available():
        return {
            "perf/memory_peak_gib": torch.accelerator.max_memory_allocated() / 2**30,
            "perf/memory_reserved_gib": torch.accelerator.max_memory_reserved() / 2**30,
        }
    # getrusage() would not do: its peak starts at the peak of the parent process.
    status = Path("/proc/self/status").read_text()
    peak_kib = int(re.search(r"VmHWM:\s*(\d+)", status)[1])
    return {"perf/memory_peak_gib": peak_kib / 2**20}


def synchronize() -> float:
    """Wait for the accelerator, then return the clock in seconds."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def shutdown() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def free_port() -> str:
    """Return an unused TCP port of this machine, as a string for MASTER_PORT."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])
