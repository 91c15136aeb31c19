"""Which 16-bit weights an update can change at all.

A weight that the optimizer updates in bfloat16 has 8 significant bits. An update of less than half
the distance to the next bfloat16 number is lost in rounding.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engines.optimizer import OPTIMIZERS


def report_lost_updates(model: nn.Module, config: DictConfig, device: torch.device) -> None:
    """Print how many of the weights can change, if they are rounded to the nearest 16 bits."""
    if config.optim.rounding == "stochastic" and config.optim.name in OPTIMIZERS:
        return
    trained = [p for p in model.parameters() if p.requires_grad and p.dtype.itemsize == 2]
    # A rank's own part may be empty, but all ranks have the same parameters.
    if not trained:
        return
    lr = config.optim.lr
    share = movable_share(trained, lr, device)
    if dist.get_rank() == 0:
        is_ours = config.optim.name in OPTIMIZERS
        remedy = "optim.rounding=stochastic" if is_ours else "float32"
        key = "model.lora.dtype" if config.model.lora.rank else "engine.param_dtype"
        print(
            f"{key}=bfloat16: an update of optim.lr={lr:g} can change {share:.1%} of the weights; "
            "in the others it is lost in rounding, and they change only where updates are larger. "
            f"{remedy} keeps them",
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
