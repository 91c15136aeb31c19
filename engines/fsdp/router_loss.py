"""The auxiliary loss that makes routers use all experts equally."""

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn

from engines.microbatch import MicroBatch
from engines.model import experts


class RouterLoss:
    """Adds up the routers' auxiliary loss over the micro-batches of a step: see experts.aux_loss().

    total  this rank's part of the unweighted loss so far, as a mean over routers
    """

    def __init__(self, hf: nn.Module, hf_config, coefficient: float | None):
        """Start recording a model's routers. Call this before layers are compiled.

        Args:
            coefficient: engine.router_aux_loss_coef. None: the coefficient in config.json.
        """
        self.routers = experts.Routers(hf.get_decoder())
        num_routers = len(self.routers.modules)
        self.weight = experts.aux_loss_weight(coefficient, hf_config, num_routers)
        self.num_chosen = experts.experts_per_token(hf_config)
        self.num_tokens = 1.0
        self.total = torch.zeros(())

    @staticmethod
    def of(hf: nn.Module, hf_config, engine: DictConfig) -> "RouterLoss | None":
        """Return a model's router loss, or None if the loss's coefficient is zero or not set."""
        coefficient = engine.router_aux_loss_coef
        if not experts.aux_loss_coef(coefficient, hf_config):
            return None
        return RouterLoss(hf, hf_config, coefficient)

    def begin_step(self, num_tokens: float, device: torch.device) -> None:
        """Reset the total before a step.

        Args:
            num_tokens: the number of tokens in the batch, over all data-parallel ranks.
        """
        self.num_tokens = num_tokens
        self.total = torch.zeros((), device=device)

    def record(self) -> AbstractContextManager[list[Tensor]]:
        """Return a context manager that collects the routers' logits of one forward pass."""
        return self.routers.recording()

    def weighted(self, router_logits: list[Tensor], micro_batch: MicroBatch) -> Tensor:
        """Add this rank's part of a micro-batch's loss to the total, and return it weighted."""
        loss = experts.aux_loss(
            router_logits,
            micro_batch.padding.flatten(),
            self.num_chosen,
            self.num_tokens,
            micro_batch.group,
        )
        self.total += loss.detach() / len(router_logits)
        return self.weight * loss

    def sum_over_ranks(self) -> float:
        """Return the unweighted loss of the step's batch, as a mean over routers."""
        dist.all_reduce(self.total)
        return self.total.item()
