"""Optimizers of the FSDP engine, and the check of their keys for both.

Every function takes, by name, what it reads of params, parameter groups with their weight_decay, in this order: the
hidden matrices (those of the decoder layers), embeddings, output matrix and experts, norms and biases (not decayed); lr, the peak
learning rate; betas and eps. It returns a torch optimizer or a list of them. In every step the engine sets the learning
rate of all groups to the schedule's; a group that was made with another lr than the peak keeps its ratio to it.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from common import plugins
from config import InputError


def adamw(
    params: list[dict], lr: float, *, betas: tuple[float, float], eps: float, **_
) -> Optimizer:
    """AdamW (Loshchilov and Hutter 2019)"""
    return torch.optim.AdamW(params, lr=lr, betas=betas, eps=eps, fused=True)


def muon(
    params: list[dict],
    lr: float,
    *,
    betas: tuple[float, float],
    eps: float,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    **_,
) -> list[Optimizer]:
    """Muon (Jordan 2024) on the hidden matrices, AdamW on the rest. Muon's updates are scaled to the size of AdamW's (Liu
    2025), so that one learning rate serves both."""
    hidden, rest = params[0], params[1:]
    kind = ShardedMuon if isinstance(hidden["params"][0], DTensor) else torch.optim.Muon
    return [
        kind(
            [hidden],
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            adjust_lr_fn="match_rms_adamw",
        ),
        *([adamw(rest, lr, betas=betas, eps=eps)] if rest else []),
    ]  # of adapters nothing is left


OPTIMIZERS = {"adamw": adamw, "muon": muon}


class ShardedMuon(torch.optim.Muon):
    """torch's Muon on DTensors. The momentum is divided as the parameters are; a matrix is gathered to be orthogonalized as
    a whole, each by another of the ranks that share it. (DTensor's own products of matrices of which rows are divided would
    add up partial sums in bfloat16.)"""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            mesh = parameters[0].device_mesh
            shards = mesh.get_group(mesh.ndim - 1)
            for start in range(0, len(parameters), shards.size()):
                turn = parameters[start : start + shards.size()]
                wholes = [self._gather_update(p, group) for p in turn]
                if shards.rank() < len(turn):
                    orthogonalize(wholes[shards.rank()], group)
                for owner, (p, whole) in enumerate(zip(turn, wholes)):
                    dist.broadcast(whole, group=shards, group_src=owner)
                    mine = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim).redistribute(
                        placements=p.placements
                    )
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(mine.to(p.device))

    def _gather_update(self, p: Tensor, group: dict) -> Tensor:
        """The whole matrix that is to be orthogonalized, fp32 on the device of the ranks' group."""
        momentum, state = group["momentum"], self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        buffer = state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
        update = p.grad.lerp(buffer, momentum) if group["nesterov"] else buffer
        return update.to(p.device_mesh.device_type).full_tensor().float()


def orthogonalize(matrix: Tensor, group: dict) -> None:
    """Replace a matrix by the step of torch's Muon in its direction: the momentum is in it already."""
    step = nn.Parameter(torch.zeros_like(matrix))
    step.grad = matrix
    torch.optim.Muon(
        [step],
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        **{key: group[key] for key in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")},
    ).step()
    matrix.copy_(step)


def build(model: nn.Module, layers: list[nn.Module], optim: DictConfig) -> list[Optimizer]:
    """The optimizers of a model's parameters; layers: its decoder layers. Groups without a parameter are left out."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    in_layers = {id(p) for layer in layers for p in layer.parameters()}
    # Experts' biases are stacked, too.
    spared = {id(p) for name, p in model.named_parameters() if p.ndim <= 1 or name.endswith("bias")}
    hidden = {id(p) for p in parameters if p.ndim == 2 and id(p) in in_layers - spared}
    groups = [
        {"params": [p for p in parameters if id(p) in hidden], "weight_decay": optim.weight_decay},
        {
            "params": [p for p in parameters if id(p) not in hidden | spared],
            "weight_decay": optim.weight_decay,
        },
        {"params": [p for p in parameters if id(p) in spared], "weight_decay": 0.0},
    ]
    make = (
        named(optim) if hidden or optim.name != "muon" else adamw
    )  # model.freeze may leave nothing for Muon
    found = make(
        params=[g for g in groups if g["params"]],
        lr=optim.lr,
        betas=tuple(optim.betas),
        eps=optim.eps,
    )
    found = found if isinstance(found, list) else [found]
    for optimizer in found:
        if not isinstance(optimizer, Optimizer):
            raise InputError(
                f"optim.name={optim.name} must return a torch.optim.Optimizer or a list of them, not "
                f"{type(optimizer).__name__}"
            )
    return found


def named(optim: DictConfig) -> Callable:
    return plugins.find(
        "optim.name",
        optim.name,
        OPTIMIZERS,
        ("params", "lr", "betas", "eps"),
        "optim.kwargs",
        optim.kwargs,
    )


def check(config: DictConfig) -> None:
    """Raise InputError for an optimizer that cannot be found, and for keys that it does not read."""
    optim, read = config.optim, plugins.parameters(named(config.optim))
    if config.model_engine == "megatron" and optim.name != "adamw":
        raise InputError(
            f"optim.name={optim.name} needs model_engine=fsdp: model_engine=megatron has AdamW alone"
        )
    for key, default in (("betas", [0.9, 0.95]), ("eps", 1e-8)):
        if key not in read and optim[key] != default:
            raise InputError(
                f"optim.{key}={optim[key]} does nothing with optim.name={optim.name}: leave it out"
            )
