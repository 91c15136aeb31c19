"""The auxiliary loss that balances a mixture of experts."""

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn

from engines.microbatch import MicroBatch
from engines.model import experts


class RouterLoss:
    """The routers' loss over the micro-batches of a step: see experts.aux_loss().

    total  sum over this step's micro-batches of this rank's part, per router, unweighted
    """

    def __init__(self, hf: nn.Module, hf_config, coefficient: float | None):
        """Watch the routers of a model, before its layers are compiled.

        coefficient: engine.router_aux_loss_coef; None: config.json's.
        """
        self.routers = experts.Routers(hf.get_decoder())
        num_routers = len(self.routers.modules)
        self.weight = experts.aux_loss_weight(coefficient, hf_config, num_routers)
        self.num_chosen = experts.experts_per_token(hf_config)
        self.num_tokens = 1.0
        self.total = torch.zeros(())

    @staticmethod
    def of(hf: nn.Module, hf_config, engine: DictConfig) -> "RouterLoss | None":
        """Return the loss of a model, or None if it has no experts or its loss has no weight."""
        coefficient = engine.router_aux_loss_coef
        if not experts.aux_loss_coef(coefficient, hf_config):
            return None
        return RouterLoss(hf, hf_config, coefficient)

    def begin_step(self, num_tokens: float, device: torch.device) -> None:
        """num_tokens: of the batch on all data-parallel ranks."""
        self.num_tokens = num_tokens
        self.total = torch.zeros((), device=device)

    def record(self) -> AbstractContextManager[list[Tensor]]:
        """Collect the routers' logits of a forward pass."""
        return self.routers.recording()

    def weighted(self, router_logits: list[Tensor], micro_batch: MicroBatch) -> Tensor:
        """Return this rank's part of a micro-batch's loss, weighted, and add it to the total."""
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
        """Return the loss of the step's batch."""
        dist.all_reduce(self.total)
        return self.total.item()
