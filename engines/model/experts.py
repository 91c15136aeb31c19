"""Mixtures of experts in transformers, which stacks a layer's experts in one parameter."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from config import InputError
from engines.model.hf import read_hf_config
from engines.model.quirks import EXPERTS_PER_TOKEN_KEYS


def expert_weights(hf: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter [num_experts, ...]) for all expert weights, without biases."""
    return [
        (name, parameter)
        for name, parameter in hf.named_parameters()
        if ".experts." in name and parameter.ndim == 3
    ]


def experts_per_token(hf_config) -> int:
    """Return the number of experts per token, or 0 if config.json has no single number."""
    for key in EXPERTS_PER_TOKEN_KEYS:
        value = getattr(hf_config, key, None)
        if isinstance(value, int):
            return value
    return 0


def with_own_experts(config: DictConfig) -> DictConfig:
    """Return the configuration of a model other than the trained one, without unusable settings.

    A model without experts has nothing to divide over ranks and no loss of routers, whatever the
    trained model has.

    Args:
        config: the configuration of this model, with the settings for the trained one's experts.
    """
    engine = config.engine
    divides_experts = engine.get("expert_model_parallel_size", 1) > 1
    has_loss = engine.router_aux_loss_coef is not None
    if not divides_experts and not has_loss:
        return config
    try:
        hf_config = read_hf_config(config.model.path).get_text_config()
    except InputError:
        return config  # the check of the model reports it, with the key of its path
    is_dense = experts_per_token(hf_config) == 0
    changes: dict[str, Any] = {}
    if has_loss and (is_dense or getattr(hf_config, "router_aux_loss_coef", None) is None):
        changes["router_aux_loss_coef"] = None
    if divides_experts and is_dense:
        changes["expert_model_parallel_size"] = 1
    return OmegaConf.merge(config, {"engine": changes})


def check_experts_per_token(hf: nn.Module, hf_config, path: str) -> None:
    """Raise InputError for a mixture of experts without a number of experts per token."""
    if expert_weights(hf) and not experts_per_token(hf_config):
        raise InputError(
            f"model.path={path}: {type(hf).__name__} needs one number of experts per token for all "
            "layers, and config.json has none (num_experts_per_tok)"
        )


def leave_uncompiled(hf: nn.Module) -> None:
    """Exclude experts from compilation, since the number of tokens per expert changes.

    Call this before layers are compiled.
    """
    module_names = {name.rpartition(".")[0] for name, _ in expert_weights(hf)}
    for name in sorted(module_names):
        module = hf.get_submodule(name)
        module.forward = torch.compiler.disable(module.forward)


def router_modules(hf: nn.Module) -> list[nn.Module]:
    """Return the modules that choose experts, if transformers can record them in this family."""
    recorders = (getattr(hf, "_can_record_outputs", None) or {}).get("router_logits", [])
    routers = []
    for recorder in recorders if isinstance(recorders, list) else [recorders]:
        router_class = getattr(recorder, "target_class", recorder)
        part_of_name = getattr(recorder, "layer_name", None) or ""
        routers += [
            module
            for name, module in hf.named_modules()
            if isinstance(module, router_class) and part_of_name in name
        ]
    return routers


# -- the auxiliary loss --------------------------------------------------------------------------


def aux_loss_coef(coefficient: float | None, hf_config) -> float:
    """Return the coefficient of the routers' auxiliary loss.

    Args:
        coefficient: engine.router_aux_loss_coef. If None, the coefficient in config.json applies
            when output_router_logits is true there, as in transformers.

    Raises:
        InputError: if a coefficient is set but the model has no auxiliary loss.
    """
    model_coef = getattr(hf_config, "router_aux_loss_coef", None)
    if coefficient is not None and model_coef is None:
        raise InputError(
            f"engine.router_aux_loss_coef={coefficient} needs a mixture of experts whose routers "
            f"have an auxiliary loss in transformers; model_type={hf_config.model_type} has none"
        )
    if coefficient is not None:
        return coefficient
    if model_coef and hf_config.output_router_logits:
        return model_coef
    return 0.0


def aux_loss_weight(coefficient: float | None, hf_config, num_routers: int) -> float:
    """Return the factor by which to multiply aux_loss().

    The coefficient in config.json is for transformers' loss, which is scaled differently. If
    experts are chosen evenly, that loss is the number of experts per token, and aux_loss() is
    num_routers. So the coefficient in config.json is converted; the user's own is not. The result
    is the mean of the losses that transformers would compute for each layer alone. transformers
    itself pools the tokens of all layers, so layers with opposite preferences compensate for each
    other.
    """
    weight = aux_loss_coef(coefficient, hf_config)
    if coefficient is not None:
        return weight
    return weight * experts_per_token(hf_config) / num_routers


class Routers:
    """Records the outputs of a model's routers.

    transformers can record them too, but with torch 2.11 it records nothing inside compiled layers.
    So this class excludes routers from compilation.

    Args:
        hf: the model, before its layers are compiled.
    """

    def __init__(self, hf: nn.Module):
        self.logits: list[Tensor] | None = None
        recorder = hf._can_record_outputs["router_logits"]
        self.modules = router_modules(hf)
        for module in self.modules:
            module.forward = torch.compiler.disable(
                partial(self._forward, module.forward, recorder.index)
            )

    def _forward(self, forward: Callable, index: int, *args) -> Tensor | tuple[Tensor, ...]:
        output = forward(*args)
        # Outside recording(), a layer is being recomputed for the backward pass.
        if self.logits is not None:
            self.logits.append(output[index] if isinstance(output, tuple) else output)
        return output

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Record the router logits of one forward pass: [num_tokens, num_experts] per layer."""
        logits: list[Tensor] = []
        self.logits = logits
        try:
            yield logits
        finally:
            self.logits = None
        if len(logits) != len(self.modules):
            raise RuntimeError(
                f"recorded {len(logits)} router outputs, but the model has {len(self.modules)} "
                "routers"
            )


def aux_loss(
    router_logits: list[Tensor],
    padding: Tensor,
    num_chosen: int,
    num_tokens: float,
    group: dist.ProcessGroup,
) -> Tensor:
    """Compute this rank's part of the auxiliary loss (Switch Transformer, Fedus et al. 2021).

    Within a micro-batch, a layer's loss is

        num_experts * sum over experts of (share of choices) * (mean probability),

    which is 1 if experts are chosen evenly. The layers' losses are summed. A batch's loss is the
    mean over its micro-batches, weighted by their numbers of tokens.

    Args:
        router_logits: [t, num_experts] per layer.
        padding: [t] bool.
        num_chosen: experts per token.
        num_tokens: the number of tokens of the whole batch.
        group: the ranks that share the micro-batch's tokens.

    Returns:
        A differentiable scalar.
    """
    real = (~padding).float()[:, None]
    probs = [logits.softmax(-1, dtype=torch.float32) for logits in router_logits]
    choices = torch.stack([count_choices(p, num_chosen, real) for p in probs])
    dist.all_reduce(choices, group=group)
    share = choices / choices.sum(1, keepdim=True).clamp(min=1)
    num_experts = share.shape[1]
    sums_of_probs = torch.stack([(p * real).sum(0) for p in probs])
    return num_experts * (share * sums_of_probs).sum() / num_tokens


def count_choices(probs: Tensor, num_chosen: int, real: Tensor) -> Tensor:
    """Return how many tokens choose each expert, [num_experts].

    A token chooses the num_chosen experts with the highest probabilities.

    Args:
        probs: [t, num_experts].
        real: [t, 1] fp32, 0 for padding.
    """
    is_chosen = torch.zeros_like(probs).scatter(1, probs.topk(num_chosen).indices, 1.0)
    return (is_chosen * real).sum(0)
