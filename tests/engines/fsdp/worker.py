"""Run cases of the FSDP engine's tests on one number of ranks.

    torchrun --nproc-per-node N tests/engines/fsdp/worker.py FOLDER NAME ...

Reads models from FOLDER/{family}, and writes the results of the named cases to FOLDER/{N}.json.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from engines.parallel import device
from tests.engines.fsdp import (  # noqa: F401  they register their cases
    test_adapters,
    test_checkpoints,
    test_experts,
    test_families,
    test_float8,
    test_float8_gather,
    test_freezing,
    test_memory,
    test_optimizers,
    test_storage,
    test_training,
)
from tests.engines.fsdp.cases import REGISTRY


def main(folder: Path, *names: str) -> None:
    this_device = device.init()
    num_ranks = dist.get_world_size()
    # Every rank has generators of its own, so that a resume with another rank's would be noticed.
    torch.manual_seed(dist.get_rank())
    results = {name: REGISTRY[num_ranks, name].function(folder, this_device) for name in names}
    if dist.get_rank() == 0:
        (folder / f"{num_ranks}.json").write_text(json.dumps(results))
    device.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
