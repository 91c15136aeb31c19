"""Mixtures of experts as transformers has them: each layer's experts in stacked parameters, [n, ...] with n experts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import InputError


def stacks(hf: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The weights of all experts, without their biases: (name, [n, ...])."""
    return [(name, p) for name, p in hf.named_parameters() if ".experts." in name and p.ndim == 3]


def num_chosen(hf_config) -> int:
    """How many experts a token goes to; 0 for a configuration that does not say it, in one number for all layers."""
    values = (
        getattr(hf_config, key, None)
        for key in ("num_experts_per_tok", "top_k_experts", "moe_topk")
    )
    return next((value for value in values if isinstance(value, int)), 0)


def check(hf: nn.Module, hf_config, path: str) -> None:
    """Raise InputError for a mixture of experts that does not say how many a token goes to."""
    if stacks(hf) and not num_chosen(hf_config):
        raise InputError(
            f"model.path={path}: config.json does not say how many experts a token goes to (num_experts_per_tok), "
            f"in one number for all layers, which {type(hf).__name__} needs"
        )


def leave_uncompiled(hf: nn.Module) -> None:
    """Before layers are compiled: experts, whose numbers of tokens a graph does not know."""
    for name in sorted({name.rpartition(".")[0] for name, _ in stacks(hf)}):
        module = hf.get_submodule(name)
        module.forward = torch.compiler.disable(module.forward)


def aux_loss_coef(coefficient: float | None, hf_config) -> float:
    """The weight of the routers' auxiliary loss: engine.router_aux_loss_coef or, where that is null, config.json's if its
    output_router_logits is true, as in transformers. Raises InputError for a model without such a loss."""
    own = getattr(hf_config, "router_aux_loss_coef", None)
    if coefficient is not None and own is None:
        raise InputError(
            f"engine.router_aux_loss_coef={coefficient} needs a mixture of experts whose routers have an auxiliary "
            f"loss in transformers; model_type={hf_config.model_type} has none"
        )
    if coefficient is None:
        coefficient = own if own and hf_config.output_router_logits else 0.0
    return coefficient


def aux_loss_weight(coefficient: float | None, hf_config, num_routers: int) -> float:
    """What aux_loss(), which is the number of routers if experts are chosen alike, is multiplied by. For the same routers the loss
    that config.json's coefficient is meant for is the number of experts that a token goes to."""
    weight = aux_loss_coef(coefficient, hf_config)
    return weight * num_chosen(hf_config) / num_routers if coefficient is None else weight


class Routers:
    """Notes what a model's routers say. transformers could, too, but notes nothing inside compiled layers with torch 2.11: so
    routers are left out of compilation here."""

    def __init__(self, hf: nn.Module):
        """Before layers are compiled."""
        self.logits: list[Tensor] | None = None
        recorder = hf._can_record_outputs["router_logits"]
        self.modules = [
            module
            for name, module in hf.named_modules()
            if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name
        ]
        for module in self.modules:
            module.forward = torch.compiler.disable(
                partial(self._forward, module.forward, recorder.index)
            )

    def _forward(self, forward: Callable, index: int, *args) -> Tensor | tuple[Tensor, ...]:
        output = forward(*args)
        if self.logits is not None:  # and not while a layer is computed once more
            self.logits.append(output[index] if isinstance(output, tuple) else output)
        return output

    @contextmanager
    def noted(self) -> Iterator[list[Tensor]]:
        """Around a forward pass: [t, n] of each layer, t tokens and n experts."""
        self.logits = logits = []
        try:
            yield logits
        finally:
            self.logits = None
        if len(logits) != len(self.modules):
            raise RuntimeError(
                f"{len(self.modules)} routers told {len(logits)} times what they choose"
            )


def aux_loss(
    router_logits: list[Tensor],
    padding: Tensor,
    num_chosen: int,
    num_tokens: float,
    group: dist.ProcessGroup,
) -> Tensor:
    """This rank's part of the auxiliary loss (Switch Transformer, Fedus et al. 2021), a scalar with a gradient: of a
    micro-batch num_experts * sum over experts of (share of choices) * (mean probability), which is 1 if experts are chosen alike;
    added up over layers. A batch of num_tokens has the mean over its micro-batches, by tokens.

    router_logits: [t, n] of each layer; padding [t] bool; group: the ranks that divide the micro-batch's tokens
    """
    real = (~padding).float()[:, None]
    probs = [logits.softmax(-1, dtype=torch.float32) for logits in router_logits]
    choices = torch.stack(
        [
            (torch.zeros_like(p).scatter(1, p.topk(num_chosen).indices, 1.0) * real).sum(0)
            for p in probs
        ]
    )
    dist.all_reduce(choices, group=group)
    share = choices / choices.sum(1, keepdim=True).clamp(min=1)
    return (
        share.shape[1]
        * (share * torch.stack([(p * real).sum(0) for p in probs])).sum()
        / num_tokens
    )
