"""Keep a rank on the CPUs next to its accelerator: from another socket, copies and launches take longer."""

import os
from contextlib import suppress
from pathlib import Path

import torch


def bind(device: torch.device) -> str:
    """Bind all threads of this process to the CPUs of the device's NUMA node, leaving out those that slurm, taskset or a
    container does not allow. Returns what was done, in one line; never raises."""
    try:
        # Asked of the device itself, since CUDA_VISIBLE_DEVICES changes its number.
        found = torch.get_device_module(device).get_device_properties(device)
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        return f"NUMA affinity: {device} ({address}) {bind_near(Path('/sys/bus/pci/devices', address))}"
    except (
        OSError,
        ValueError,
        RuntimeError,
        AttributeError,
    ) as error:  # e.g. a torch_npu that does not say where it is
        return f"NUMA affinity: CPUs stay as they are, {type(error).__name__}: {error}"


def bind_near(pci_device: Path) -> str:
    """Bind to the CPUs of the node of a device in /sys/bus/pci/devices; those of all nodes if it belongs to none."""
    near, allowed = (
        parse_cpulist((pci_device / "local_cpulist").read_text()),
        os.sched_getaffinity(0),
    )
    if not near & allowed:
        return "is near CPUs that this process may not use: CPUs stay as they are"
    for thread in os.listdir("/proc/self/task"):  # threads started later inherit it
        with suppress(ProcessLookupError):  # some end meanwhile
            os.sched_setaffinity(int(thread), near & allowed)
    return f"is near {len(near & allowed)} of {len(allowed)} CPUs, to which this process is bound"


def parse_cpulist(text: str) -> set[int]:
    """The kernel's notation: "0-2,8" is {0, 1, 2, 8}."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)}
