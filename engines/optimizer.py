"""Optimizers of the FSDP engine, and the check of their configuration keys for both engines.

Every optimizer is a function that is called with these inputs by name. With **_ in its signature,
it ignores those it does not need.

    params  parameter groups with their weight_decay, in this order: hidden matrices (the matrices
            in decoder layers); embeddings, output matrix and experts; norms and biases (without
            weight decay). Groups without a parameter are left out.
    lr      the peak learning rate
    betas   optim.betas
    eps     optim.eps
    storage how weights and moments are rounded and stored (Storage)

It returns a torch optimizer or a list of them. In every step, the engine sets the learning rate of
all groups from the schedule. If a group's initial learning rate is not the peak, the group keeps
its ratio to the peak.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from common import plugins
from config import InputError, defaults
from configs.rules import at_least, rule
from engines.adamw import AdamW, KeepsDtypes, Storage, first_position, local
from engines.rounding import LOW_16, noise_key, random_bits, to_bfloat16

INPUTS = ("params", "lr", "betas", "eps", "storage")
MUON_RULES = {
    "momentum": rule("must be at least 0 and less than 1", lambda v: 0 <= v < 1),
    "ns_steps": at_least(1),
}


def adamw(
    params: list[dict],
    lr: float,
    *,
    betas: tuple[float, float],
    eps: float,
    storage: Storage,
    **_,
) -> Optimizer:
    """AdamW (Loshchilov and Hutter 2019)."""
    if storage.suits_torch(params):
        return torch.optim.AdamW(params, lr=lr, betas=betas, eps=eps, fused=True)
    return AdamW(params, lr, betas, eps, storage)


def muon(
    params: list[dict],
    lr: float,
    *,
    betas: tuple[float, float],
    eps: float,
    storage: Storage,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    **_,
) -> list[Optimizer]:
    """Muon (Jordan 2024) on the hidden matrices, AdamW on the rest.

    Muon's updates are scaled to the size of AdamW's (Liu 2025), so both use one learning rate.
    """
    hidden = params[0]
    rest = params[1:]
    settings = dict(
        lr=lr,
        momentum=momentum,
        nesterov=nesterov,
        ns_steps=ns_steps,
        adjust_lr_fn="match_rms_adamw",
    )
    first = hidden["params"][0]
    if isinstance(first, DTensor) or not storage.suits_torch([hidden]):
        on_hidden = ShardedMuon([hidden], storage, **settings)
    else:
        on_hidden = torch.optim.Muon([hidden], **settings)
    if not rest:  # adapters consist of hidden matrices only
        return [on_hidden]
    return [on_hidden, adamw(rest, lr, betas=betas, eps=eps, storage=storage)]


OPTIMIZERS = {"adamw": adamw, "muon": muon}


class ShardedMuon(KeepsDtypes, torch.optim.Muon):
    """torch's Muon for DTensors, and for bfloat16 weights that are rounded stochastically.

    The momentum is sharded like the parameters. Each matrix is gathered and orthogonalized on one
    of the ranks that share it; the ranks work on different matrices. (torch's Muon would multiply
    sharded matrices, and DTensor would sum the partial results in bfloat16.)
    """

    def __init__(self, params: list[dict], storage: Storage, **settings):
        super().__init__(params, **settings)
        self.storage = storage
        # Each parameter's index, which gives the parameter its own random bits.
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.indices = {parameter: index for index, parameter in enumerate(parameters)}

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                self._begin_step(parameter)
            if not isinstance(parameters[0], DTensor):
                for parameter in parameters:
                    update = self._update(parameter, group).float()
                    orthogonalize(update, group)
                    self._apply(parameter, update, group)
                continue
            mesh = parameters[0].device_mesh
            shard_group = mesh.get_group(mesh.ndim - 1)
            for start in range(0, len(parameters), shard_group.size()):
                self._step_one_per_rank(parameters[start : start + shard_group.size()], group)

    def _begin_step(self, parameter: Tensor) -> None:
        """Create a parameter's state, and count its steps, on which its random bits depend."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            dtype = self.storage.state_dtype or parameter.dtype
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=dtype)
            if self._is_rounded(parameter):
                state["step"] = torch.tensor(0.0)
        if self._is_rounded(parameter):
            state["step"] += 1

    def _is_rounded(self, parameter: Tensor) -> bool:
        """Return whether a parameter needs random bits, and so a count of its steps."""
        return self.storage.stochastic and parameter.dtype is not torch.float32

    def _step_one_per_rank(self, parameters: list[DTensor], group: dict) -> None:
        """Update at most one matrix per rank of the group; each rank orthogonalizes one."""
        mesh = parameters[0].device_mesh
        shard_group = mesh.get_group(mesh.ndim - 1)
        updates = []
        for parameter in parameters:
            update = self._update(parameter, group).to(mesh.device_type)
            updates.append(update.full_tensor().float())
        if shard_group.rank() < len(parameters):
            orthogonalize(updates[shard_group.rank()], group)
        for owner, (parameter, update) in enumerate(zip(parameters, updates)):
            dist.broadcast(update, group=shard_group, group_src=owner)
            whole = DTensor.from_local(update, mesh, [Replicate()] * mesh.ndim)
            own_part = whole.redistribute(placements=parameter.placements)
            self._apply(parameter, own_part.to(parameter.device), group)

    def _update(self, parameter: Tensor, group: dict) -> Tensor:
        """Return a new tensor: the gradient with momentum, before it is orthogonalized."""
        momentum = group["momentum"]
        buffer = self.state[parameter]["momentum_buffer"]
        gradient = parameter.grad.to(buffer.dtype)
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum) if group["nesterov"] else buffer.clone()

    def _apply(self, parameter: Tensor, update: Tensor, group: dict) -> None:
        """Decay a parameter's own part and add its part of the orthogonalized update, fp32."""
        decay = 1 - group["lr"] * group["weight_decay"]
        weight = local(parameter)
        if not self._is_rounded(parameter):
            weight.mul_(decay)
            weight.add_(local(update))
            return
        step = int(self.state[parameter]["step"])
        key = noise_key(self.storage.seed, step, "muon", self.indices[parameter])
        first = torch.tensor(first_position(parameter), device=weight.device)
        bits = random_bits(torch.tensor(key, device=weight.device), first, weight) & LOW_16
        weight.copy_(to_bfloat16(weight.float() * decay + local(update), bits))


def orthogonalize(matrix: Tensor, group: dict) -> None:
    """Replace a matrix in place by torch's Muon step for it. Momentum is already included."""
    step = nn.Parameter(torch.zeros_like(matrix))
    step.grad = matrix
    keys = ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
    settings = {key: group[key] for key in keys}
    torch.optim.Muon([step], weight_decay=0.0, momentum=0.0, nesterov=False, **settings).step()
    matrix.copy_(step)


def build(
    model: nn.Module, layers: list[nn.Module], config: DictConfig, compiled: bool = False
) -> list[Optimizer]:
    """Build the optimizers of a model's trained parameters.

    Args:
        model: the sharded model.
        layers: its decoder layers.
        config: the configuration of the run.
        compiled: whether low-precision updates are compiled.

    Raises:
        InputError: the user's own optimizer function does not return torch optimizers.
    """
    optim = config.optim
    groups = parameter_groups(model, layers, optim.weight_decay)
    make = find_optimizer(optim)
    optimizers = make(
        params=[group for group in groups if group["params"]],
        lr=optim.lr,
        betas=tuple(optim.betas),
        eps=optim.eps,
        storage=Storage.of(config, compiled),
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
    """Return the settings of each parameter group that come from the configuration.

    For the optimizers of torch and of this repository, these are all but the parameters. A user's
    own optimizer may also keep state in a group, such as a counter. So only its settings that are
    named like an input of its function are returned.
    """
    configured = plugins.parameters(find_optimizer(optim)) | {"weight_decay", *optim.kwargs}
    settings = []
    for optimizer in optimizers:
        is_from_torch = type(optimizer).__module__.startswith("torch.optim")
        changes_no_group = is_from_torch or isinstance(optimizer, (ShardedMuon, AdamW))
        for group in optimizer.param_groups:
            names = group.keys() if changes_no_group else group.keys() & configured
            settings.append({name: group[name] for name in names if name != "params"})
    return settings


def parameter_groups(model: nn.Module, layers: list[nn.Module], weight_decay: float) -> list[dict]:
    """Group the trained parameters: hidden matrices, other matrices, then norms and biases."""
    trained = [p for p in model.parameters() if p.requires_grad]
    in_layers = set()
    for layer in layers:
        in_layers |= {id(p) for p in layer.parameters()}
    not_decayed = set()
    for name, p in model.named_parameters():
        # Check the name too, because the biases of experts are stacked into matrices.
        if p.ndim <= 1 or name.endswith("bias"):
            not_decayed.add(id(p))
    decayed_in_layers = in_layers - not_decayed
    hidden = [p for p in trained if p.ndim == 2 and id(p) in decayed_in_layers]
    hidden_ids = {id(p) for p in hidden}
    other_matrices = [p for p in trained if id(p) not in hidden_ids | not_decayed]
    vectors = [p for p in trained if id(p) in not_decayed]
    return [
        {"params": hidden, "weight_decay": weight_decay},
        {"params": other_matrices, "weight_decay": weight_decay},
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


def check_muon_parameters(
    config: DictConfig, model: nn.Module, layers: list[nn.Module], has_value_head: bool
) -> None:
    """Raise InputError if Muon, or the AdamW beside it, has no parameter to update.

    Args:
        model: the model on the meta device, with its adapters and frozen parameters.
        layers: its decoder layers.
        has_value_head: whether it also trains a value head, which may be frozen in this model.
    """
    optim = config.optim
    if optim.name != "muon":
        return
    hidden, *rest = parameter_groups(model, layers, optim.weight_decay)
    if not hidden["params"]:
        raise InputError(
            f"optim.name=muon has nothing to update: model.freeze={list(config.model.freeze)} "
            "leaves no matrix of the decoder's layers. Set optim.name=adamw"
        )
    if has_value_head or any(group["params"] for group in rest):
        return
    for key in ("betas", "eps"):
        if optim[key] != defaults("optim")[key]:
            raise InputError(
                f"optim.{key}={optim[key]} has no effect with optim.name=muon, which updates all "
                "trained parameters of this run: leave it out"
            )


def check_optimizer(config: DictConfig) -> None:
    """Raise InputError for an unknown optimizer, and for keys that it does not read."""
    optim = config.optim
    inputs = plugins.parameters(find_optimizer(optim))
    if config.model_engine == "megatron" and optim.name != "adamw":
        raise InputError(
            f"optim.name={optim.name} needs model_engine=fsdp: "
            "model_engine=megatron supports only adamw"
        )
    if optim.name == "muon":
        check_muon(optim.kwargs)
    for key in ("betas", "eps"):
        if key not in inputs and optim[key] != defaults("optim")[key]:
            raise InputError(
                f"optim.{key}={optim[key]} has no effect with optim.name={optim.name}: leave it out"
            )
    check_storage(config, inputs)


def check_storage(config: DictConfig, inputs: Iterable[str]) -> None:
    """Raise InputError for optim.rounding or optim.state_dtype that the optimizer does not support.

    Args:
        inputs: names of the inputs that the optimizer's function reads.
    """
    optim = config.optim
    for key in ("rounding", "state_dtype"):
        setting = f"optim.{key}={optim[key]}"
        if optim[key] == defaults("optim")[key]:
            continue
        if config.model_engine == "megatron":
            raise InputError(
                f"{setting} needs model_engine=fsdp: model_engine=megatron keeps weights and "
                "moments in fp32"
            )
        if "storage" not in inputs:
            raise InputError(f"{setting} has no effect with optim.name={optim.name}: leave it out")
    if config.model_engine == "megatron":
        return
    if optim.name == "muon" and optim.state_dtype == "int8":
        raise InputError(
            "optim.state_dtype=int8 needs optim.name=adamw: the momentum of muon has no 8-bit form"
        )
    weights = config.model.lora.dtype if config.model.lora.rank else config.engine.param_dtype
    is_all_fp32 = weights == "float32" and optim.state_dtype in ("auto", "float32")
    if optim.rounding != defaults("optim").rounding and is_all_fp32:
        raise InputError(
            f"optim.rounding={optim.rounding} has no effect: weights and moments are float32. "
            "Leave it out"
        )
