"""Two ranks, of which one does not come: it sleeps in an earlier stage than the other, or in the same one, or gets a signal while
the other waits for as long as it takes. Or a rank alone, in a long stage.

    torchrun --nproc-per-node 2 tests/job/hang_worker.py OUTPUT_DIR earlier|same|SIGSTOP|SIGKILL|alone
"""

import os
import signal
import sys
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist

from engines.parallel import device
from job import setup as job

MINUTES = 0.1


def main(out: str, where: str) -> None:
    this_device = device.init()
    trainer = SimpleNamespace(timeout_minutes=MINUTES)
    heartbeat = job.start_heartbeat(SimpleNamespace(output_dir=out, trainer=trainer, dry_run=False))
    device.set_timeouts(
        MINUTES + (0.1 if this_device.type == "cpu" else 1)
    )  # NCCL's would end all without a word
    ones = torch.ones(1, device=this_device)
    dist.all_reduce(
        ones
    )  # NCCL connects ranks in their first collective, as any run has before it trains
    if where.startswith("SIG"):
        device.on_rank0(os.kill, os.getpid(), signal.Signals[where])
    heartbeat.enter("reward", 7)
    if where == "alone":
        return time.sleep(2 * 60 * MINUTES)
    if dist.get_rank() == 1 and where == "earlier":
        time.sleep(600)
    heartbeat.enter("actor_update", 7)
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.all_reduce(ones)
    ones.item()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
