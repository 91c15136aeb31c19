"""Exports Megatron parameters under their Hugging Face names, gathering them from all ranks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor, nn

from engines.heads import Head
from engines.megatron.mapping import Mapping, global_parameters
from engines.megatron.torch_layers import AdaptableLinear
from engines.model import weights
from engines.parallel.device import gather_values

LAYERS = "decoder.layers."


class WeightMapping(Protocol):
    """The interface that Mapping and MBridge share; see Mapping for the methods."""

    def rows_per_group(self, hf_names: list[str], num_rows: int) -> list[int]: ...

    def hf_names(self, name: str) -> list[str]: ...

    def to_hf(
        self, name: str, parts: list[Tensor], dim: int = 0
    ) -> Iterator[tuple[str, Tensor]]: ...

    def load(self, models: list[nn.Module], path: Path) -> None: ...


def make_mapping(kind: str, hf_config, dtype: torch.dtype, head: Head) -> WeightMapping:
    """Return the mapping for a value of engine.bridge."""
    if kind == "own":
        return Mapping(hf_config, head)
    # Imported here because mbridge is slow to import and may not be installed.
    from engines.megatron.mbridge import MBridge

    return MBridge(hf_config, dtype, head)


def check_files(hf: nn.Module, path: Path, head: Head) -> None:
    """Raise InputError if the files do not fit the model: see weights.check_files()."""
    weights.check_files(hf, path, head, Mapping(hf.config, head).hf_parameters(hf))


@dataclass(frozen=True)
class ParameterPart:
    """One tensor-parallel rank's part of a parameter from any pipeline stage.

    is_divided: whether tensor-parallel ranks divide the parameter
    dim: the dimension that they divide
    """

    name: str
    value: Tensor
    is_divided: bool
    dim: int


def export(
    mapping: WeightMapping,
    models: list[nn.Module],
    dtype: torch.dtype,
    device: torch.device,
    value_of: Callable[[nn.Parameter], Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) for all parameters, in the same order on all ranks.

    Adapters are left out, and so is the last pipeline stage's copy of a tied embedding.

    Args:
        value_of: returns the tensor to export for a parameter.
    """
    tp_group = mpu.get_tensor_model_parallel_group()
    ep_group = mpu.get_expert_model_parallel_group()
    parameters = {}
    for model in models:
        parameters |= dict(global_parameters(model))
    exported = set()
    for part in parameters_of_all_stages(parameters, dtype, device, value_of):
        if ".experts." in part.name:
            parts = gather_parts(part.value, ep_group)
        elif part.is_divided:
            parts = gather_parts(part.value, tp_group)
        else:
            parts = [part.value]
        for hf_name, tensor in mapping.to_hf(part.name, parts, part.dim):
            if hf_name not in exported:
                exported.add(hf_name)
                yield hf_name, tensor


def parameters_of_all_stages(
    parameters: dict[str, nn.Parameter],
    dtype: torch.dtype,
    device: torch.device,
    value_of: Callable[[nn.Parameter], Tensor] = nn.Parameter.detach,
) -> Iterator[ParameterPart]:
    """Yield the parameters of every pipeline stage, in the same order on all ranks.

    Args:
        parameters: this stage's parameters by name.
        value_of: returns the tensor to yield for a parameter.
    """
    stages = mpu.get_pipeline_model_parallel_group()
    own_descriptions = [
        (name, parameter.shape, parameter.tensor_model_parallel, parameter.partition_dim)
        for name, parameter in parameters.items()
    ]
    for stage, descriptions in enumerate(gather_values(own_descriptions, stages)):
        for name, shape, is_divided, dim in descriptions:
            if stage == stages.rank():
                value = value_of(parameters[name]).to(dtype)
            else:
                value = torch.empty(shape, dtype=dtype, device=device)
            if stages.size() > 1:
                dist.broadcast(value, group=stages, group_src=stage)
            yield ParameterPart(name, value, is_divided, dim)


def gather_parts(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Gather a group's tensors, which all have the same shape."""
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def export_stored(
    mapping: Mapping, tensors: Iterator[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor) from a checkpoint's names and full tensors.

    A checkpoint stacks all layers in one tensor, unless the name contains a layer number.
    """
    for name, tensor in tensors:
        is_stacked = name.startswith(LAYERS) and not name.removeprefix(LAYERS)[0].isdigit()
        if is_stacked:
            for number, layer_tensor in enumerate(tensor):
                layer_name = name.replace(LAYERS, f"{LAYERS}{number}.")
                yield from mapping.to_hf(layer_name, [layer_tensor])
        else:
            yield from mapping.to_hf(name, [tensor])


def adaptable_layers(
    mapping: WeightMapping, model: nn.Module
) -> Iterator[tuple[AdaptableLinear, list[str]]]:
    """Yield each linear layer with the names of the Hugging Face modules it fuses, in row order."""
    names = {parameter: name for name, parameter in global_parameters(model)}
    for layer in model.modules():
        if isinstance(layer, AdaptableLinear):
            hf_names = mapping.hf_names(names[layer.weight])
            yield layer, [hf_name.removesuffix(".weight") for hf_name in hf_names]
