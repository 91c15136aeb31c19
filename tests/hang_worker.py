"""Two ranks, of which one does not come: it sleeps in an earlier stage than the other, or in the same one.

    torchrun --nproc-per-node 2 tests/hang_worker.py DIRECTORY earlier|same
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from engines import device
from heartbeat import Heartbeat

MINUTES = 0.1


def main(directory: Path, where: str) -> None:
    device.init()
    heartbeat = Heartbeat(directory, dist.get_rank(), int(os.environ["LOCAL_RANK"]), MINUTES)
    device.set_timeouts(MINUTES + 0.1)
    heartbeat.enter("reward", 7)
    if dist.get_rank() == 1 and where == "earlier":
        time.sleep(600)
    heartbeat.enter("actor_update", 7)
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
