"""Mixtures of experts as transformers has them: each layer's experts in stacked parameters, [n, ...] with n experts."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import InputError


def stacks(hf: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The weights of all experts, without their biases: (name, [n, ...])."""
    return [(name, p) for name, p in hf.named_parameters() if ".experts." in name and p.ndim == 3]


def aux_loss_coef(coefficient: float | None, hf_config) -> float:
    """The weight of the routers' auxiliary loss: engine.router_aux_loss_coef or, where that is null, config.json's if its
    output_router_logits is true, as in transformers. Raises InputError for a model without such a loss."""
    own = getattr(hf_config, "router_aux_loss_coef", None)
    if coefficient is not None and own is None:
        raise InputError(f"engine.router_aux_loss_coef={coefficient} needs a mixture of experts whose routers have an auxiliary "
                         f"loss in transformers; model_type={hf_config.model_type} has none")
    if coefficient is None:
        coefficient = own if own and hf_config.output_router_logits else 0.0
    return coefficient


def aux_loss(router_logits: tuple[Tensor, ...], padding: Tensor, num_chosen: int, num_tokens: float,
             group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the auxiliary loss (Switch Transformer, Fedus et al. 2021), a scalar with a gradient: of a
    micro-batch num_experts * sum over experts of (share of choices) * (mean probability), which is 1 if experts are chosen alike;
    added up over layers. A batch of num_tokens has the mean over its micro-batches, by tokens.

    router_logits: [t, n] of each layer; padding [t] bool; group: the ranks that divide the micro-batch's tokens
    """
    real = (~padding).float()[:, None]
    probs = [logits.softmax(-1, dtype=torch.float32) for logits in router_logits]
    choices = torch.stack([(torch.zeros_like(p).scatter(1, p.topk(num_chosen).indices, 1.0) * real).sum(0) for p in probs])
    dist.all_reduce(choices, group=group)
    share = choices / choices.sum(1, keepdim=True).clamp(min=1)
    return share.shape[1] * (share * torch.stack([(p * real).sum(0) for p in probs])).sum() / num_tokens
