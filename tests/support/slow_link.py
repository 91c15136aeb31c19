"""A slow network between two network namespaces: every IP packet is late, and some are lost.

    python -m tests.support.slow_link FIRST SECOND SECONDS_OF_DELAY SHARE_LOST

It is what `tc qdisc add dev ... netem delay 20ms loss 1%` does on kernels with netem, in a process:
it makes a TUN device in each namespace, and passes their packets on. The kernels of both ends do
the rest, so that TCP sends lost packets again. Needs root. It runs until SIGTERM, and then prints
how many packets it has passed on, and how many were lost.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time

DEVICE = "slow0"
CLONE_NEWNET = 0x40000000  # linux/sched.h
TUNSETIFF = 0x400454CA  # linux/if_tun.h
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000
LARGEST_PACKET = 65536
READY = "ready"
SEED = 1


def enter(namespace: int) -> None:
    """Move this process to a network namespace, given as a file descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def open_device(namespace: str) -> int:
    """Make a TUN device in a namespace, and return the descriptor of its packets."""
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    other = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    enter(other)
    try:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI)
        fcntl.ioctl(device, TUNSETIFF, request)
    finally:
        enter(own)
        os.close(own)
        os.close(other)
    return device


def pass_on(
    devices: list[int], delay: float, share_lost: float, stop: list[int]
) -> tuple[int, int]:
    """Pass packets from each device to the other one, until `stop` has an element.

    Args:
        delay: seconds from one end to the other.
        share_lost: the probability that a packet is lost.

    Returns:
        How many packets were passed on, and how many were lost.
    """
    rng = random.Random(SEED)
    under_way: list[tuple[float, int, int, bytes]] = []  # due time, number, device, packet
    number = 0
    num_lost = 0
    while not stop:
        patience = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 1.0
        readable, _, _ = select.select(devices, [], [], patience)
        for device in readable:
            try:
                packet = os.read(device, LARGEST_PACKET)
            except OSError:  # the cable has been pulled
                time.sleep(0.01)
                continue
            if rng.random() < share_lost:
                num_lost += 1
                continue
            other = devices[1 - devices.index(device)]
            heapq.heappush(under_way, (time.monotonic() + delay, number, other, packet))
            number += 1
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, device, packet = heapq.heappop(under_way)
            try:
                os.write(device, packet)
            except OSError:  # the cable has been pulled, or the queue is full: the packet is lost
                num_lost += 1
    return number, num_lost


def start_link(namespaces: list[str], delay: float, share_lost: float) -> subprocess.Popen:
    """Start the link between two namespaces, and wait until its devices exist.

    Raises RuntimeError where TUN devices are forbidden.
    """
    command = [sys.executable, "-m", "tests.support.slow_link", *namespaces]
    process = subprocess.Popen(
        [*command, str(delay), str(share_lost)], stdout=subprocess.PIPE, text=True
    )
    if process.stdout.readline().strip() != READY:
        process.kill()
        process.wait()
        raise RuntimeError("no TUN devices: see the traceback above")
    return process


def main() -> None:
    first, second, delay, share_lost = sys.argv[1:]
    devices = [open_device(namespace) for namespace in (first, second)]
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    print(READY, flush=True)
    print(*pass_on(devices, float(delay), float(share_lost), stop))


if __name__ == "__main__":
    main()
