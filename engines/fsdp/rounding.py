"""How many bfloat16 weights an update can change, if it is rounded to nearest.

A bfloat16 number has 8 significant bits. Rounding to nearest loses an update smaller than half the
distance to the next bfloat16 number.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engines.optimizer import OPTIMIZERS


def report_lost_updates(model: nn.Module, config: DictConfig, device: torch.device) -> None:
    """Print the share of the weights that can change, if they are rounded to nearest bfloat16."""
    if config.optim.rounding == "stochastic" and config.optim.name in OPTIMIZERS:
        return
    trained = [p for p in model.parameters() if p.requires_grad and p.dtype.itemsize == 2]
    # A rank's own part may be empty, but all ranks have the same parameters.
    if not trained:
        return
    lr = config.optim.lr
    share = movable_share(trained, lr, device)
    if dist.get_rank() == 0:
        key = "model.lora.dtype" if config.model.lora.rank else "engine.param_dtype"
        is_built_in = config.optim.name in OPTIMIZERS
        remedy = "optim.rounding=stochastic" if is_built_in else f"{key}=float32"
        print(
            f"{key}=bfloat16: an update of optim.lr={lr:g} can change {share:.1%} of the weights; "
            "the others round it away, and change only if an update is larger. To keep all "
            f"updates, set {remedy}",
            flush=True,
        )


@torch.no_grad()
def movable_share(parameters: Iterable[nn.Parameter], lr: float, device: torch.device) -> float:
    """Return the share of the weights that an update of +lr or -lr changes, over all ranks.

    AdamW's updates are about as large as the learning rate, and rarely larger.

    Args:
        parameters: trained parameters of this rank. All ranks call this together.
        lr: the peak learning rate.
    """
    num_movable = 0
    num_weights = 0
    for parameter in parameters:
        weights = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        num_movable += count_movable(weights, lr)
        num_weights += weights.numel()
    counts = torch.tensor([num_movable, num_weights], device=device)
    dist.all_reduce(counts)
    num_movable, num_weights = counts.tolist()
    return num_movable / max(num_weights, 1)


def count_movable(weights: Tensor, lr: float) -> int:
    """Return how many numbers change, in their own dtype, when lr is added or subtracted."""
    is_movable = (weights + lr != weights) | (weights - lr != weights)
    return int(is_movable.sum())
