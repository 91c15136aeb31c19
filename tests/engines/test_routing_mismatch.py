"""The share of choices of experts in which the trainer and the rollout differ."""

import torch
import torch.distributed as dist

from engines.model.routes import Mismatch
from tests.support.ranks import on_ranks


def metrics_of_rank() -> dict[str, float]:
    """Count one of the four choices as different on rank 0, and none of the two on rank 1."""
    mismatch = Mismatch(torch.device("cpu"))
    own = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
    routes = own.clone()
    routes[0, 0] = 9
    if dist.get_rank() == 0:
        mismatch.add(own, routes)
    else:
        mismatch.add(own[2:], routes[2:])
    return mismatch.metrics()


def test_the_share_of_mismatches_is_over_all_ranks(tmp_path):
    assert on_ranks(2, tmp_path, metrics_of_rank) == [{"routing_mismatch": 1 / 6}] * 2
