"""Keep a rank on the CPUs next to its accelerator.

From another socket, copies and kernel launches take longer.
"""

import os
from contextlib import suppress
from pathlib import Path

import torch


def bind(device: torch.device) -> str:
    """Bind all threads of this process to the CPUs of the device's NUMA node.

    CPUs that slurm, taskset or a container does not allow are left out. Never raises.

    Returns:
        A line for the log that describes the result.
    """
    try:
        # Read the address from the device, because CUDA_VISIBLE_DEVICES changes its index.
        properties = torch.get_device_module(device).get_device_properties(device)
        domain = properties.pci_domain_id
        bus = properties.pci_bus_id
        address = f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"
        result = bind_near(Path("/sys/bus/pci/devices", address))
        return f"NUMA affinity for {device} ({address}): {result}"
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        # For example, some versions of torch_npu do not report the PCI address.
        return f"NUMA affinity for {device}: not bound, because of {type(error).__name__}: {error}"


def bind_near(pci_device: Path) -> str:
    """Bind this process to the CPUs near a device in /sys/bus/pci/devices.

    A device that belongs to no NUMA node is near all CPUs. Returns the result, for a log line.
    """
    near = parse_cpulist((pci_device / "local_cpulist").read_text())
    allowed = os.sched_getaffinity(0)
    cpus = near & allowed
    if not cpus:
        return "not bound, because this process may not use the CPUs near the device"
    for thread in os.listdir("/proc/self/task"):  # threads that start later inherit the CPUs
        with suppress(ProcessLookupError):  # a thread may end meanwhile
            os.sched_setaffinity(int(thread), cpus)
    return f"bound to {len(cpus)} of {len(allowed)} CPUs"


def parse_cpulist(text: str) -> set[int]:
    """Parse the kernel's notation: "0-2,8" is {0, 1, 2, 8}."""
    cpus = set()
    for part in text.strip().split(","):
        if part:
            ends = part.split("-")
            cpus |= set(range(int(ends[0]), int(ends[-1]) + 1))
    return cpus
