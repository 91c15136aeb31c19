"""AdamW for bfloat16 weights that keep learning, and for moments of 8 bits.

torch's own AdamW is used where it stores weights and moments as configured, for example when all of
them are fp32 (Storage.suits_torch). This one computes every update in fp32 from the stored numbers,
and stores the results with stochastic rounding. torchao has such optimizers too. We tried them, and
do not use them because:

* Their random bits come from the device's global generator. So the rounding of a weight depends on
  everything drawn before it, ranks that hold copies of a weight round them differently, and results
  change with the number of ranks.
* Their 8-bit blocks are cut from each rank's own part, so a checkpoint cannot be loaded on another
  number of ranks. They round to the nearest code.
* The scales of their blocks are at least 1e-12, so second moments of gradients below 1e-6 become
  coarse. After 200 steps with gradients of 1e-8, the distance that weights have moved is 9 % off;
  here it is 1 % off.
* They compile each parameter's step on every device, so CPUs need a C++ compiler.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from engines import moments
from engines.rounding import LOW_16, noise_key, random_bits, to_bfloat16, upper_bits

# The number of elements that are updated at a time. Without torch.compile, an element needs up to
# 100 bytes of temporary memory, which on a CPU should stay in the cache.
CHUNK_ELEMENTS = 2**24
CPU_CHUNK_ELEMENTS = 2**18
STATE_DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.uint8,
}


@dataclass(frozen=True)
class Storage:
    """How an optimizer stores weights and moments.

    Attributes:
        state_dtype: dtype of the moments; uint8 for the codes of engines/moments.py. None: the
            dtype of each weight.
        stochastic: whether bfloat16 and 8-bit numbers are rounded stochastically.
        seed: the seed of the random bits; the same on all ranks.
        compiled: whether updates are compiled with torch.compile.
    """

    state_dtype: torch.dtype | None
    stochastic: bool
    seed: int
    compiled: bool

    @classmethod
    def of(cls, config: DictConfig, compiled: bool) -> "Storage":
        optim = config.optim
        is_stochastic = optim.rounding == "stochastic"
        dtype = STATE_DTYPES[optim.state_dtype]
        return cls(dtype, is_stochastic, config.trainer.seed, compiled)

    def suits_torch(self, params: list[dict]) -> bool:
        """Return whether torch's AdamW stores these parameters and their moments as configured."""
        dtypes = {p.dtype for group in params for p in group["params"]}
        has_own_dtype = self.state_dtype is None or dtypes == {self.state_dtype}
        return has_own_dtype and (dtypes == {torch.float32} or not self.stochastic)


class Chunk(NamedTuple):
    """Some rows of a parameter, [R, C] each, and of its state. The update changes them in place.

    weight, gradient, first, second  fp32, bfloat16, or uint8 for the codes of a moment
    first_scale, second_scale        [R, B] fp32 scales of codes, or None
    """

    weight: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    first_scale: Tensor | None
    second_scale: Tensor | None


class KeepsDtypes(Optimizer):
    """An optimizer that loads its state in the dtypes in which it was saved.

    torch's optimizers cast a loaded state to the dtype of the weights. That would round the fp32
    moments of bfloat16 weights, and turn 8-bit codes into floating-point numbers.

    Attributes:
        storage: how it stores weights and moments.
    """

    storage: Storage

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for key, parameter in zip(keys, parameters):
            for name, value in state_dict["state"].get(key, {}).items():
                if name != "step":
                    self.state[parameter][name] = value.to(parameter.device)


class AdamW(KeepsDtypes):
    """AdamW (Loshchilov and Hutter 2019) with low-precision weights and moments."""

    def __init__(
        self,
        params: list[dict],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        storage: Storage,
    ):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))
        self.storage = storage
        self._update = torch.compile(update, dynamic=True) if storage.compiled else update

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update all parameters that have a gradient."""
        chunks = []
        scalars = []
        for parameter, group, index in self._with_gradient():
            state = self.state[parameter]
            if not state:
                state.update(self.initial_state(parameter))
            state["step"] += 1
            step = int(state["step"])
            key = noise_key(self.storage.seed, step, index)
            position = first_position(parameter)
            for chunk in chunks_of(parameter, state):
                chunks.append(chunk)
                scalars.append([*step_scalars(group, step), *key, position])
                position += chunk.weight.numel()
        if not chunks:
            return
        # Copy the scalars of all chunks at once: a copy for each chunk would take longer than its
        # update.
        device = chunks[0].weight.device
        codes = moments.codes_of_moments(device)
        on_device = torch.tensor(scalars, dtype=torch.float64).to(device)
        for chunk, chunk_scalars in zip(chunks, on_device):
            self._update(chunk, chunk_scalars, codes, self.storage.stochastic)

    def _with_gradient(self) -> Iterator[tuple[nn.Parameter, dict, int]]:
        """Yield (parameter, its group, its index among all of the optimizer's parameters)."""
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield parameter, group, index
                index += 1

    def initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state of a parameter that has taken no step yet."""
        state = {"step": torch.tensor(0.0)}
        dtype = moment_dtype(parameter, self.storage.state_dtype)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=dtype)
            if dtype is torch.uint8:
                state[name + "_scale"] = zero_scales(parameter)
        return state


def moment_dtype(parameter: Tensor, state_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a parameter's moments are stored.

    Norms and biases have few elements, so their moments are fp32 instead of 8 bits.
    """
    if state_dtype is None:
        return parameter.dtype
    is_vector = parameter.ndim < 2
    return torch.float32 if state_dtype is torch.uint8 and is_vector else state_dtype


def moment_bytes(part: Tensor, state_dtype: torch.dtype | None) -> int:
    """Return the bytes of one moment, scales included, of a parameter or a rank's part of one."""
    dtype = moment_dtype(part, state_dtype)
    num_bytes = part.numel() * dtype.itemsize
    if dtype is torch.uint8:
        num_rows = part.numel() // part.shape[-1]
        num_bytes += 4 * num_rows * moments.num_blocks(part.shape[-1])
    return num_bytes


def update(chunk: Chunk, scalars: Tensor, codes: moments.CodesOfMoments, stochastic: bool) -> None:
    """Take AdamW's step for some rows of a parameter, in fp32.

    Args:
        scalars: [10] fp64: the results of step_scalars() and noise_key(), and the position of the
            first element in the whole parameter. fp64 holds all these integers exactly.
    """
    lr, decay, beta1, beta2, correction1, correction2, eps = scalars[:7].unbind()
    key = scalars[7:9].long()
    position = scalars[9].long()
    gradient = chunk.gradient.float()
    first = read(chunk.first, chunk.first_scale, codes.first)
    second = read(chunk.second, chunk.second_scale, codes.second)
    if chunk.second_scale is not None:
        second = second.square()
    first = torch.lerp(first, gradient, (1 - beta1).float())
    second = torch.lerp(second, gradient.square(), (1 - beta2).float())
    denominator = (second / correction2).sqrt() + eps
    weight = chunk.weight.float() * (1 - lr * decay) - lr * (first / correction1) / denominator
    weight_bits = first_bits = second_bits = None
    if stochastic:
        # Each result needs 16 random bits, so a draw of 32 bits is enough for two results.
        bits = random_bits(key, position, chunk.weight)
        weight_bits = bits & LOW_16
        first_bits = upper_bits(bits, 16)
        second_bits = random_bits(key.flip(0), position, chunk.weight) & LOW_16
    write(weight, chunk.weight, weight_bits)
    if chunk.first_scale is None:
        write(first, chunk.first, first_bits)
        write(second, chunk.second, second_bits)
    else:
        write_codes(first, chunk.first, chunk.first_scale, codes.first, first_bits)
        root = second.sqrt()
        write_codes(root, chunk.second, chunk.second_scale, codes.second, second_bits)


def read(stored: Tensor, scale: Tensor | None, codes: moments.Codes) -> Tensor:
    """Return stored numbers in fp32."""
    return stored.float() if scale is None else moments.decode(stored, scale, codes)


def write(x: Tensor, target: Tensor, bits: Tensor | None) -> None:
    """Round fp32 numbers to a target's dtype, stochastically if there are random bits."""
    is_rounded = target.dtype is torch.bfloat16 and bits is not None
    target.copy_(to_bfloat16(x, bits) if is_rounded else x)


def write_codes(
    x: Tensor, target: Tensor, scale: Tensor, codes: moments.Codes, bits: Tensor | None
) -> None:
    """Write fp32 numbers as 8-bit codes with their scales."""
    stored, new_scale = moments.encode(x, codes, bits)
    target.copy_(stored)
    scale.copy_(new_scale)


def step_scalars(group: dict, step: int) -> tuple[float, ...]:
    """Return lr, weight decay, both betas, both bias corrections, and epsilon."""
    beta1, beta2 = group["betas"]
    corrections = (1 - beta1**step, 1 - beta2**step)
    return (group["lr"], group["weight_decay"], beta1, beta2, *corrections, group["eps"])


# -- parts of parameters ---------------------------------------------------------------------------


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def as_rows(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor as [R, C]."""
    part = local(x)
    return part.reshape(1, -1) if part.ndim < 2 else part.flatten(0, -2)


def first_position(parameter: Tensor) -> int:
    """Return where in the whole parameter this rank's part begins, as a number of elements."""
    if not isinstance(parameter, DTensor):
        return 0
    assert all(p in (Replicate(), Shard(0)) for p in parameter.placements), parameter.placements
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    # Of the shape, since parameter[0] would gather the whole parameter from all ranks.
    elements_per_row = math.prod(parameter.shape[1:])
    return offset[0] * elements_per_row


def zero_scales(parameter: Tensor) -> Tensor:
    """Return a scale of zero for each block of a parameter, sharded as the parameter is."""
    shape = (*parameter.shape[:-1], moments.num_blocks(parameter.shape[-1]))
    part = local(parameter)
    scales = torch.zeros(*part.shape[:-1], shape[-1], device=part.device)
    if not isinstance(parameter, DTensor):
        return scales
    whole = torch.empty(shape, device="meta")
    sharded = DTensor.from_local(
        scales,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return sharded.to(part.device)  # from_local() moves parts that are offloaded to the host


def chunks_of(parameter: nn.Parameter, state: dict[str, Tensor]) -> Iterator[Chunk]:
    """Yield this rank's part of a parameter with its state, some rows at a time."""
    weight = as_rows(parameter.detach())
    scales = [state.get(name) for name in ("exp_avg_scale", "exp_avg_sq_scale")]
    tensors = [
        weight,
        as_rows(parameter.grad),
        as_rows(state["exp_avg"]),
        as_rows(state["exp_avg_sq"]),
        *[None if scale is None else as_rows(scale) for scale in scales],
    ]
    num_elements = CPU_CHUNK_ELEMENTS if weight.device.type == "cpu" else CHUNK_ELEMENTS
    num_rows = max(1, num_elements // max(1, weight.shape[1]))
    for start in range(0, len(weight), num_rows):
        rows = slice(start, start + num_rows)
        yield Chunk(*[None if x is None else x[rows] for x in tensors])
