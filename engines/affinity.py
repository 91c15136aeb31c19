"""Keep a rank on the CPUs next to its accelerator: from another socket, copies and launches take longer."""

import os
from contextlib import suppress
from pathlib import Path

import torch


def bind(device: torch.device, sysfs: Path = Path("/sys")) -> str:
    """Bind all threads of this process to the CPUs of the device's NUMA node, leaving out those that slurm, taskset or a
    container does not allow. Returns what was done, in one line; never raises."""
    try:
        address = pci_address(device)
        if address is None:
            return f"NUMA affinity: the PCI address of {device} is not known, CPUs stay as they are"
        return f"NUMA affinity: {device} ({address}) {bind_near(address, sysfs)}"
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        return f"NUMA affinity: CPUs stay as they are, {type(error).__name__}: {error}"


def bind_near(address: str, sysfs: Path) -> str:
    """Bind to the CPUs of the node of the PCI device at `address`, e.g. 0000:3b:00.0; return what was done."""
    node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
    if node < 0:
        return "belongs to no NUMA node, CPUs stay as they are"
    near = parse_cpulist((sysfs / f"devices/system/node/node{node}/cpulist").read_text())
    allowed = os.sched_getaffinity(0)
    if not near & allowed:
        return f"is on NUMA node {node}, whose CPUs this process may not use: CPUs stay as they are"
    if near >= allowed:
        return f"is on NUMA node {node}, where this process already is"
    for thread in os.listdir("/proc/self/task"):            # threads started later inherit it
        with suppress(ProcessLookupError):                  # some end meanwhile
            os.sched_setaffinity(int(thread), near & allowed)
    return f"is on NUMA node {node}: bound to its {len(near & allowed)} of {len(allowed)} CPUs"


def pci_address(device: torch.device) -> str | None:
    """Asked of the device itself, since CUDA_VISIBLE_DEVICES changes its number. None if it is not known."""
    if device.type == "cpu":
        return None
    found = torch.get_device_module(device).get_device_properties(device)
    if not hasattr(found, "pci_bus_id"):                    # NPU: torch_npu before it had these
        return None
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def parse_cpulist(text: str) -> set[int]:
    """The kernel's notation: "0-2,8" is {0, 1, 2, 8}."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)}
