"""Optimizers of the FSDP engine, and the check of their configuration keys for both engines.

Every optimizer is a function that is called with these inputs by name. It may accept inputs that it
does not use as **_.

    params  parameter groups with their weight_decay, in this order: hidden matrices (the matrices
            in decoder layers); embeddings, output matrix and experts; norms and biases (without
            weight decay). Groups without a parameter are left out.
    lr      the peak learning rate
    betas   optim.betas
    eps     optim.eps

It returns a torch optimizer or a list of them. In every step, the engine sets the learning rate of
all groups from the schedule. A group that was created with a learning rate other than the peak
keeps its ratio to the peak.
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
from configs.rules import at_least, rule

INPUTS = ("params", "lr", "betas", "eps")
MUON_RULES = {
    "momentum": rule("must be at least 0 and less than 1", lambda v: 0 <= v < 1),
    "ns_steps": at_least(1),
}
DEFAULTS = {"betas": [0.9, 0.95], "eps": 1e-8}


def adamw(
    params: list[dict], lr: float, *, betas: tuple[float, float], eps: float, **_
) -> Optimizer:
    """AdamW (Loshchilov and Hutter 2019)."""
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
    """Muon (Jordan 2024) on the hidden matrices, AdamW on the rest.

    Muon's updates are scaled to the size of AdamW's (Liu 2025), so one learning rate serves both.
    """
    hidden = params[0]
    rest = params[1:]
    kind = ShardedMuon if isinstance(hidden["params"][0], DTensor) else torch.optim.Muon
    on_hidden = kind(
        [hidden],
        lr=lr,
        momentum=momentum,
        nesterov=nesterov,
        ns_steps=ns_steps,
        adjust_lr_fn="match_rms_adamw",
    )
    if not rest:  # adapters consist of hidden matrices only
        return [on_hidden]
    return [on_hidden, adamw(rest, lr, betas=betas, eps=eps)]


OPTIMIZERS = {"adamw": adamw, "muon": muon}


class ShardedMuon(torch.optim.Muon):
    """torch's Muon for DTensors.

    The momentum is sharded like the parameters. Each matrix is gathered, and one of the ranks that
    share it orthogonalizes it; the ranks work on different matrices. (If rows are sharded,
    DTensor's own matrix products would sum partial results in bfloat16.)
    """

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            mesh = parameters[0].device_mesh
            shard_group = mesh.get_group(mesh.ndim - 1)
            for start in range(0, len(parameters), shard_group.size()):
                self._step_one_per_rank(parameters[start : start + shard_group.size()], group)

    def _step_one_per_rank(self, parameters: list[DTensor], group: dict) -> None:
        """Update at most one matrix per rank of the group; each rank orthogonalizes one."""
        mesh = parameters[0].device_mesh
        shard_group = mesh.get_group(mesh.ndim - 1)
        updates = [self._gather_update(parameter, group) for parameter in parameters]
        if shard_group.rank() < len(parameters):
            orthogonalize(updates[shard_group.rank()], group)
        for owner, (parameter, update) in enumerate(zip(parameters, updates)):
            dist.broadcast(update, group=shard_group, group_src=owner)
            whole = DTensor.from_local(update, mesh, [Replicate()] * mesh.ndim)
            own_part = whole.redistribute(placements=parameter.placements)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(own_part.to(parameter.device))

    def _gather_update(self, parameter: DTensor, group: dict) -> Tensor:
        """Return the whole matrix to orthogonalize, fp32, on the accelerator if there is one."""
        momentum = group["momentum"]
        gradient = parameter.grad
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        return update.to(parameter.device_mesh.device_type).full_tensor().float()


def orthogonalize(matrix: Tensor, group: dict) -> None:
    """Replace a matrix in place by torch's Muon step for it. Momentum is already included."""
    step = nn.Parameter(torch.zeros_like(matrix))
    step.grad = matrix
    keys = ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
    settings = {key: group[key] for key in keys}
    torch.optim.Muon([step], weight_decay=0.0, momentum=0.0, nesterov=False, **settings).step()
    matrix.copy_(step)


def build(model: nn.Module, layers: list[nn.Module], optim: DictConfig) -> list[Optimizer]:
    """Build the optimizers of a model's trained parameters.

    Args:
        model: the sharded model.
        layers: its decoder layers.
        optim: the group `optim` of the configuration.

    Raises:
        InputError: the user's own optimizer function does not return torch optimizers.
    """
    groups = parameter_groups(model, layers, optim.weight_decay)
    has_hidden = bool(groups[0]["params"])
    make = find_optimizer(optim)
    if optim.name == "muon" and not has_hidden:
        make = adamw  # model.freeze has left nothing for Muon
    optimizers = make(
        params=[group for group in groups if group["params"]],
        lr=optim.lr,
        betas=tuple(optim.betas),
        eps=optim.eps,
    )
    if not isinstance(optimizers, list):
        optimizers = [optimizers]
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise InputError(
                f"optim.name={optim.name} returned {type(optimizer).__name__}: it must return a "
                "torch.optim.Optimizer or a list of them"
            )
    return optimizers


def group_settings(optimizers: list[Optimizer], optim: DictConfig) -> list[dict]:
    """Return the settings of each parameter group that the configuration determines.

    Of torch's own optimizers, these are all but the parameters. The user's own may also keep state
    in a group, such as a counter, so only those named like an input of its function count.
    """
    configured = plugins.parameters(find_optimizer(optim)) | {"weight_decay", *optim.kwargs}
    settings = []
    for optimizer in optimizers:
        is_from_torch = type(optimizer).__module__.startswith("torch.optim")
        changes_no_group = is_from_torch or isinstance(optimizer, ShardedMuon)
        for group in optimizer.param_groups:
            names = group.keys() if changes_no_group else group.keys() & configured
            settings.append({name: group[name] for name in names if name != "params"})
    return settings


def parameter_groups(model: nn.Module, layers: list[nn.Module], weight_decay: float) -> list[dict]:
    """Group the trained parameters: hidden matrices, other matrices, and without weight decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    in_layers = set()
    for layer in layers:
        in_layers |= {id(p) for p in layer.parameters()}
    not_decayed = set()
    for name, p in model.named_parameters():
        # Check the name too, because the biases of experts are stacked into matrices.
        if p.ndim <= 1 or name.endswith("bias"):
            not_decayed.add(id(p))
    is_hidden = in_layers - not_decayed
    hidden = [p for p in trained if p.ndim == 2 and id(p) in is_hidden]
    hidden_ids = {id(p) for p in hidden}
    others = [p for p in trained if id(p) not in hidden_ids | not_decayed]
    vectors = [p for p in trained if id(p) in not_decayed]
    return [
        {"params": hidden, "weight_decay": weight_decay},
        {"params": others, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def find_optimizer(optim: DictConfig) -> Callable:
    """Return the function that optim.name names, with optim.kwargs bound."""
    return plugins.find("optim.name", optim.name, OPTIMIZERS, INPUTS, "optim.kwargs", optim.kwargs)


def check_muon(kwargs: DictConfig) -> None:
    """Raise InputError for a parameter of Muon that is out of its bounds."""
    for name, value in kwargs.items():
        problem = MUON_RULES[name].problem(value) if name in MUON_RULES else None
        if problem:
            raise InputError(f"optim.kwargs.{name}={value} {problem}")


def check_optimizer(config: DictConfig) -> None:
    """Raise InputError for an unknown optimizer, and for keys that it does not read."""
    optim = config.optim
    inputs = plugins.parameters(find_optimizer(optim))
    if config.model_engine == "megatron" and optim.name != "adamw":
        raise InputError(
            f"optim.name={optim.name} needs model_engine=fsdp: "
            "model_engine=megatron has no optimizer but AdamW"
        )
    if optim.name == "muon":
        check_muon(optim.kwargs)
    for key, default in DEFAULTS.items():
        if key not in inputs and optim[key] != default:
            raise InputError(
                f"optim.{key}={optim[key]} has no effect with optim.name={optim.name}: leave it out"
            )
