"""Weights from safetensors files into a sharded model, each rank reading its own rows."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from config import InputError


def load_weights(hf: nn.Module, path: Path, device: torch.device, buffer_device: torch.device, critic: bool = False) -> None:
    """Allocate the sharded parameters and read this rank's rows of each from the safetensors files. A critic's output
    matrix is zero where the files have none, or a policy's: every value begins at 0."""
    hf.to_empty(device=device)
    hf.tie_weights()
    parameters = dict(hf.named_parameters())
    files, missing, unknown = weight_files(path), set(parameters), set()
    value_head = next(n for n, p in parameters.items() if p is hf.get_output_embeddings().weight) if critic else None
    with torch.no_grad():
        if critic:
            full_shape = list(parameters[value_head].shape)
            parameters[value_head].zero_()
            missing.discard(value_head)
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    if name == value_head and tensors.get_slice(name).get_shape() != full_shape:
                        continue
                    if name in parameters:
                        copy_rows(parameters[name], tensors.get_slice(name), name)
                        missing.discard(name)
                    else:
                        unknown.add(name)
        for module in hf.modules():
            if module._non_persistent_buffers_set:                        # rotary frequencies: in no file
                for name in module._non_persistent_buffers_set:
                    setattr(module, name, getattr(module, name).to(buffer_device))
                for parameter in module.parameters(recurse=False):
                    parameter._is_hf_initialized = True                   # an embedding with a scale keeps its weights
                hf._init_weights(module)
    if missing:
        raise InputError(f"model.path={path} lacks {len(missing)} weights of {type(hf).__name__}, {min(missing)} among them")
    # Besides parameters a file may hold buffers, and the output matrix of a tied model once more.
    unknown = {name for name in unknown if name not in hf.state_dict() and not name.endswith("rotary_emb.inv_freq")}
    if unknown:
        raise InputError(f"model.path={path} holds {len(unknown)} weights that {type(hf).__name__} does not have, "
                         f"{min(unknown)} among them")


def weight_files(path: Path) -> list[Path]:
    """The files of the index, else model.safetensors: others beside them may be variants of the same weights."""
    index = path / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else ["model.safetensors"]
    files = sorted(path / name for name in names)
    for file in files:
        if not file.exists():
            raise InputError(f"model.path={path} lacks {file.name}")
    return files


def copy_rows(parameter: nn.Parameter, source, name: str) -> None:
    if list(source.get_shape()) != list(parameter.shape):
        raise InputError(f"{name} has shape {source.get_shape()} in the file, {list(parameter.shape)} by config.json")
    start, stop = 0, parameter.shape[0]
    if isinstance(parameter, DTensor):                                    # FSDP2 shards dimension 0 as torch.chunk does
        mesh = parameter.device_mesh
        rows = -(-stop // mesh.size(mesh.ndim - 1))
        start = min(mesh.get_local_rank(mesh.ndim - 1) * rows, stop)
        stop = min(start + rows, stop)
        parameter = parameter.to_local()
    parameter.copy_(source[start:stop])
