"""A rank's CPUs near its accelerator, the memory of its process, and how it joins the others."""

import os
import resource
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from config import InputError
from engines.parallel import affinity, device as this_device, joining
from tests.support.launch import run


@pytest.fixture
def cpus():
    """The CPUs of this process; afterwards all of its threads get them back."""
    before = os.sched_getaffinity(0)
    yield before
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # a thread may end meanwhile
            os.sched_setaffinity(int(thread), before)


@pytest.fixture
def waiting_thread():
    """A thread that waits until the test ends, like those of torch and NCCL."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield thread
    end.set()
    thread.join()


def test_all_threads_move_to_the_devices_node(tmp_path, cpus, waiting_thread):
    """Otherwise, threads that started before, such as those of torch, would stay far away."""
    if len(cpus) < 2:
        pytest.skip("one CPU leaves nothing to choose")
    here = max(cpus)
    (tmp_path / "local_cpulist").write_text(f"{here},4000-4003\n")
    message = affinity.bind_near(tmp_path)
    assert message == f"bound to 1 of {len(cpus)} CPUs"
    assert os.sched_getaffinity(waiting_thread.native_id) == {here}
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            assert os.sched_getaffinity(int(thread)) == {here}


@pytest.mark.parametrize(
    "cpulist, message",
    [("4000-4003\n", "this process may not use"), ("0-4095\n", "bound to 1 of 1 CPUs")],
)
def test_an_earlier_choice_of_cpus_stays(tmp_path, cpus, cpulist, message):
    (tmp_path / "local_cpulist").write_text(cpulist)
    chosen = {max(cpus)}
    os.sched_setaffinity(0, chosen)
    assert message in affinity.bind_near(tmp_path)
    assert os.sched_getaffinity(0) == chosen


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


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the peak is then the allocator's")
def test_memory_that_was_freed_counts_for_the_peak():
    before = this_device.memory()["perf/memory_peak_gib"]
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident_gib = resident_pages * resource.getpagesize() / 2**30
    num_mib = 1024 * (before - resident_gib) + 256  # more than the process ever had
    held = b"x" * (int(num_mib) << 20)
    del held
    assert this_device.memory()["perf/memory_peak_gib"] > before + 0.1


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


# -- a device that torch does not see --------------------------------------------------------------


@pytest.mark.parametrize(
    "names, hidden, is_warned",
    [
        (["nvidia1", "nvidia0", "nvidiactl"], None, True),
        (["davinci3"], None, True),
        (["nvidia0"], "", False),
        (["nvidiactl", "null"], None, False),
    ],
)
def test_a_device_that_torch_does_not_see_is_named(
    tmp_path, monkeypatch, capsys, names, hidden, is_warned
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    for name in names:
        (tmp_path / name).touch()
    this_device.warn_of_unused_devices(tmp_path)
    printed = capsys.readouterr().out
    expected = f"warning: this machine has {tmp_path / min(names)}, but torch {torch.__version__} "
    assert printed.startswith(expected) if is_warned else printed == ""


@pytest.mark.parametrize("local_rank, num_warnings", [(0, 1), (1, 0)])
def test_one_rank_of_a_node_looks_for_unused_devices(monkeypatch, local_rank, num_warnings):
    warnings = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(this_device, "warn_of_unused_devices", lambda: warnings.append(local_rank))
    assert this_device.select_device(local_rank) == torch.device("cpu")
    assert len(warnings) == num_warnings


# -- an accelerator --------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch) -> list[int]:
    """Let torch see two GPUs; return the numbers of those that are made the current one."""
    chosen = []
    accelerator = torch.accelerator
    monkeypatch.setattr(accelerator, "is_available", lambda: True)
    monkeypatch.setattr(accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(accelerator, "set_device_index", chosen.append)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return chosen


def test_a_rank_has_the_device_of_its_number(two_gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert this_device.select_device(1) == torch.device("cuda", 1)
    assert two_gpus == [1]


@pytest.mark.parametrize("local_rank, num_local", [(2, None), (0, 3)])
def test_every_rank_needs_a_device(two_gpus, monkeypatch, local_rank, num_local):
    """All ranks of a node notice it, not only those without a device."""
    if num_local:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_local))
    with pytest.raises(InputError, match="more processes than devices: start 2 per node"):
        this_device.select_device(local_rank)
    assert two_gpus == []


@pytest.mark.parametrize(
    "name, expected",
    [
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_its_name(monkeypatch, name, expected):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert this_device.peak_flops(torch.device("cuda", 0)) == expected
    assert this_device.peak_flops(torch.device("cpu")) is None


# -- joining the other ranks -----------------------------------------------------------------------

CPU = torch.device("cpu")
SECONDS_TO_JOIN = 1.0
INTERFACES = ["lo", "eth0", "eth1"]


@pytest.fixture
def rank_of_two(monkeypatch) -> socket.socket:
    """Describe a group of two ranks in the environment; return a listener on the port of rank 0."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(listener.getsockname()[1]))
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        yield listener


def error_of_joining(backend: str = "gloo") -> str:
    with pytest.raises(InputError) as error:
        joining.join(backend, CPU, SECONDS_TO_JOIN / 60)
    assert not torch.distributed.is_initialized()
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.slow
@pytest.mark.parametrize(
    "rank, reason",
    [
        ("0", "1/2 clients joined; check that every rank has been started"),
        ("1", "timed out"),
    ],
    ids=["rank 1 is missing", "rank 0 cannot be reached"],
)
def test_a_rank_that_cannot_join_names_the_address(rank_of_two, monkeypatch, rank, reason):
    port = rank_of_two.getsockname()[1]
    rank_of_two.close()
    monkeypatch.setenv("RANK", rank)
    message = error_of_joining()
    assert message.startswith(f"rank {rank} of 2 cannot join the other ranks at 127.0.0.1:{port}: ")
    assert reason in message


def test_a_rank_that_cannot_join_says_why_and_what_to_do(rank_of_two, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    port = rank_of_two.getsockname()[1]
    error = RuntimeError("Timed out after 3 seconds. \nException raised from listen at a.cpp:5")
    where = f"rank 1 of 2 cannot join the other ranks at 127.0.0.1:{port}"
    advice = "check that every rank has been started, that this node reaches that address and port,"
    assert joining.explain(error).startswith(f"{where}: Timed out after 3 seconds; {advice}")


def test_a_port_in_use_is_named(rank_of_two, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    port = rank_of_two.getsockname()[1]
    message = error_of_joining()
    assert f"another process uses port {port}: end it, or choose another port" in message


def test_an_unknown_interface_of_gloo_is_named(rank_of_two, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth99")
    message = error_of_joining()
    assert "GLOO_SOCKET_IFNAME=lo,eth99 names no network interface of this node" in message
    assert "which has lo" in message


def test_an_unknown_interface_of_nccl_is_named_by_runs_that_use_it(rank_of_two, monkeypatch):
    """A run without NVIDIA GPUs does not read the variable."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth99")
    message = error_of_joining("cpu:gloo,cuda:nccl")
    assert "NCCL_SOCKET_IFNAME==eth99 names no network interface of this node" in message
    assert "another process uses port" in error_of_joining("gloo")


@pytest.mark.parametrize("names", ["", "lo", "eth1,lo", "eth0,"])
def test_gloo_finds_its_interfaces(names):
    joining.check_gloo_interfaces(names, INTERFACES)


@pytest.mark.parametrize("names", ["eth", "eth0,eth2"])
def test_gloo_needs_whole_names(names):
    with pytest.raises(InputError, match=f"GLOO_SOCKET_IFNAME={names} names no network interface"):
        joining.check_gloo_interfaces(names, INTERFACES)


def test_a_free_port_can_be_listened_on():
    port = int(this_device.free_port())
    with socket.create_server(("127.0.0.1", port)) as listener:
        assert listener.getsockname()[1] == port


@pytest.mark.parametrize("names", ["", "eth", "eth0", "ib,eth1", "=eth0", "=ib,eth1", "^docker"])
def test_nccl_finds_an_interface(names):
    joining.check_nccl_interfaces(names, INTERFACES)


@pytest.mark.parametrize("names", ["ib", "=eth", "eth00", "ens,ib"])
def test_nccl_finds_no_interface(names):
    with pytest.raises(InputError, match="which has lo, eth0, eth1: set it to one of these"):
        joining.check_nccl_interfaces(names, INTERFACES)
