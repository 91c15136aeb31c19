"""Run a function on several ranks in milliseconds: forks of this process with a gloo group.

For tests of a few collectives that need no torchrun. What the function returns must be picklable.
"""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

SECONDS = 300  # for one function on all ranks, on a busy machine
SECONDS_UNTIL_STACKS = 280  # then a rank prints where it is


def on_ranks(num_ranks: int, folder: Path, function: Callable, *arguments) -> list:
    """Return what function(*arguments) returns on each rank.

    folder: a directory, for the file in which the ranks meet. The file is a new one in each call:
        torch removes it when the last rank ends, but not always, and a later group would then read
        addresses at which nobody listens.
    """
    context = multiprocessing.get_context("fork")
    store_folder = Path(tempfile.mkdtemp(prefix="store-", dir=folder))
    receivers = []
    processes = []
    for rank in range(num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        arguments_of_rank = (sender, rank, num_ranks, store_folder / "store", function, arguments)
        process = context.Process(target=run_rank, args=arguments_of_rank, daemon=True)
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    results = []
    for rank, receiver in enumerate(receivers):
        assert receiver.poll(SECONDS), f"rank {rank} has not ended after {SECONDS} seconds"
        results.append(pickle.loads(receiver.recv_bytes()))
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return results


def group_beside_rank0() -> dist.ProcessGroup:
    """Return this rank's group: rank 0 is alone, and all other ranks share a group.

    A test whose ranks work in these groups notices a collective, or a rank, of another group.
    """
    others = range(1, dist.get_world_size())
    groups = [dist.new_group([0]), dist.new_group([*others])]
    return groups[dist.get_rank() > 0]


def run_rank(
    sender: Connection, rank: int, num_ranks: int, path: Path, function: Callable, arguments: tuple
) -> None:
    """Call the function in a process group, and send its result."""
    # A process group of an earlier test may wait for the garbage collector. Its threads do not
    # exist in a fork, so to delete it here would wait for them forever.
    gc.freeze()
    faulthandler.dump_traceback_later(SECONDS_UNTIL_STACKS)
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)  # a fork has no other threads
    store = dist.FileStore(str(path), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    sender.send_bytes(pickle.dumps(function(*arguments)))
    # A rank that left now could cut off a slower one that is still connecting to it.
    dist.barrier()
    dist.destroy_process_group()
