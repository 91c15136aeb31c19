"""A rank's CPUs near its accelerator, and the memory of its process."""

import os
import resource
import sys
from pathlib import Path

import pytest
import torch

from engines.parallel import affinity, device as this_device
from tests.support.launch import run


@pytest.fixture
def cpus():
    """The CPUs of this process; afterwards all of its threads get them back."""
    before = os.sched_getaffinity(0)
    yield before
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), before)


def test_all_threads_move_to_the_devices_node(tmp_path, cpus):
    if len(cpus) < 2:
        pytest.skip("one CPU leaves nothing to choose")
    here = max(cpus)
    (tmp_path / "local_cpulist").write_text(f"{here},4000-4003\n")
    message = affinity.bind_near(tmp_path)
    assert message == f"bound to 1 of {len(cpus)} CPUs"
    for thread in os.listdir("/proc/self/task"):
        assert os.sched_getaffinity(int(thread)) == {here}


@pytest.mark.parametrize(
    "cpulist, message", [("4000-4003\n", "this process may not use"), ("0-4095\n", "bound to ")]
)
def test_an_earlier_choice_of_cpus_stays(tmp_path, cpus, cpulist, message):
    (tmp_path / "local_cpulist").write_text(cpulist)
    assert message in affinity.bind_near(tmp_path)
    assert os.sched_getaffinity(0) == cpus


def test_on_the_real_machine(cpus):
    assert affinity.parse_cpulist("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}
    assert affinity.parse_cpulist("\n") == set()
    line = affinity.bind(torch.device(torch.accelerator.current_accelerator() or "cpu"))
    assert line.startswith("NUMA affinity for ")
    assert os.sched_getaffinity(0) <= cpus
    assert "not bound, because of " in affinity.bind(torch.device("meta")), "never fatal"
    for device in Path("/sys/bus/pci/devices").glob("*"):
        assert affinity.bind_near(device).startswith("bound to ")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the peak is then the allocator's")
def test_the_peak_on_a_cpu_is_in_gib():
    """It lies between the memory in use now and the peak with the parent process's included."""
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident_gib = resident_pages * resource.getpagesize() / 2**30
    peak = this_device.memory()["perf/memory_peak_gib"]
    peak_with_parent = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert resident_gib <= peak + 0.01
    assert peak <= peak_with_parent + 0.01


@pytest.mark.slow
def test_a_process_does_not_count_the_memory_of_its_parent(tmp_path):
    child = "from engines.parallel import device; print(device.memory()['perf/memory_peak_gib'])"
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys\n"
        "held = b'x' * (1 << 30)\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)\n"
    )
    alone = float(run([sys.executable, "-c", child]).stdout)
    with_parent = float(run([sys.executable, tmp_path / "parent.py"]).stdout)
    assert 0.1 < alone < 0.8
    assert with_parent == pytest.approx(alone, abs=0.2)
