"""Two ranks, one of which never arrives; or one rank in a long stage.

torchrun --nproc-per-node 2 tests/job/hang_worker.py OUTPUT_DIR CASE

earlier           rank 1 sleeps in an earlier stage than rank 0
same              rank 1 sleeps in the same stage
SIGSTOP, SIGKILL  rank 0 gets this signal while rank 1 waits
alone             a single rank stays in a stage for longer than the limit
"""

import os
import signal
import sys
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist

from engines.parallel import device
from job.setup import start_heartbeat

MINUTES = 0.1
FOREVER = 600  # seconds; the test fails long before


def main(out: str, case: str) -> None:
    this_device = device.init()
    trainer = SimpleNamespace(timeout_minutes=MINUTES)
    heartbeat = start_heartbeat(SimpleNamespace(output_dir=out, trainer=trainer, dry_run=False))
    # NCCL's own timeout would end all ranks without a message: it has to come later.
    margin = 0.1 if this_device.type == "cpu" else 1
    device.set_timeouts(MINUTES + margin)
    # NCCL connects ranks in their first collective; any run has one before it trains.
    ones = torch.ones(1, device=this_device)
    dist.all_reduce(ones)
    if case.startswith("SIG"):
        device.on_rank0(os.kill, os.getpid(), signal.Signals[case])
    heartbeat.enter("reward", 7)
    if case == "alone":
        time.sleep(2 * 60 * MINUTES)
        return
    if dist.get_rank() == 1 and case == "earlier":
        time.sleep(FOREVER)
    heartbeat.enter("actor_update", 7)
    if dist.get_rank() == 1:
        time.sleep(FOREVER)
    dist.all_reduce(ones)
    ones.item()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
