"""Weights from safetensors files into a sharded model, each rank reading its own rows."""

import json
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from omegaconf import DictConfig
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from config import InputError
from engines import lora
from engines.storage import checksum


def load_weights(hf: nn.Module, path: Path, device: torch.device, buffer_device: torch.device, critic: bool = False,
                 base: dict[str, Tensor] | None = None) -> None:
    """Allocate the sharded parameters and read this rank's rows of each from the safetensors files. A critic's output
    matrix is zero where the files have none, or a policy's: every value begins at 0. Adapters are left empty.
    base: tensors by name that are to be filled, and used, instead of memory of the model's own."""
    for prefix, module in hf.named_modules():
        for name in module._parameters:
            if (tensor := (base or {}).get(lora.plain_name(f"{prefix}.{name}"))) is not None:
                setattr(module, name, nn.Parameter(tensor, requires_grad=False))
    hf._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x)
    hf.tie_weights()
    parameters = {lora.plain_name(name): p for name, p in hf.named_parameters()}
    with torch.no_grad():
        if critic:
            hf.get_output_embeddings().weight.zero_()
        for file in weight_files(path):
            with safe_open(file, framework="pt") as tensors:
                for name in parameters.keys() & tensors.keys():
                    source = tensors.get_slice(name)
                    if source.get_shape() == list(parameters[name].shape):      # else a policy's matrix, for a critic
                        copy_rows(parameters[name], source)
        for module in hf.modules():
            if module._non_persistent_buffers_set:                        # rotary frequencies: in no file
                for name in module._non_persistent_buffers_set:
                    setattr(module, name, getattr(module, name).to(buffer_device))
                for parameter in module.parameters(recurse=False):
                    parameter._is_hf_initialized = True                   # an embedding with a scale keeps its weights
                hf._init_weights(module)


def check_files(hf: nn.Module, path: Path, critic: bool, parameters: Iterable[tuple[str, Tensor]] | None = None) -> None:
    """Raise InputError unless the files hold exactly the weights of hf, the model on the meta device; only headers are read.

    A critic's output matrix may be absent, or a policy's. parameters: names and shapes in the files, where they are not those
    of hf's own parameters.
    """
    expected = {name: list(p.shape) for name, p in parameters or hf.named_parameters()}
    found = {}
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}
    # Besides parameters a file may hold buffers, and the output matrix of a tied model once more.
    known = expected.keys() | hf.state_dict().keys()
    if critic:
        expected.pop(next(name for name, p in hf.named_parameters() if p is hf.get_output_embeddings().weight))
    missing = expected.keys() - found
    if missing:
        raise InputError(f"model.path={path} lacks {len(missing)} weights of {type(hf).__name__}, {min(missing)} among them")
    for name, shape in expected.items():
        if found[name] != shape:
            raise InputError(f"{name} has shape {found[name]} in the file, {shape} by config.json")
    unknown = {name for name in found if name not in known and not name.endswith("rotary_emb.inv_freq")}
    if unknown:
        raise InputError(f"model.path={path} holds {len(unknown)} weights that {type(hf).__name__} does not have, "
                         f"{min(unknown)} among them")


def fingerprint(path: Path) -> str:
    """crc32 of a model's configuration and weights."""
    files = [path / "config.json", *weight_files(path)]
    with ThreadPoolExecutor() as pool:
        return f"{zlib.crc32(' '.join(pool.map(checksum, files)).encode()):08x}"


def weight_files(path: Path) -> list[Path]:
    """The files that the index names, else model.safetensors: others beside them may be variants of the same weights.
    Raises InputError for a name that leads out of the directory; a link in it may, as in the hub's cache."""
    index = path / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else ["model.safetensors"]
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise InputError(f"{index} names {name}, which is not in the model's directory")
    files = sorted(path / name for name in names)
    for file in files:
        if not file.exists():
            raise InputError(f"model.path={path} lacks {file.name}")
    return files


def load_adapter(hf: nn.Module, settings: DictConfig, seed: int) -> None:
    """Fill the adapters of a model: from model.lora.adapter_path, or as new ones begin."""
    tensors = lora.start(settings, lora.shapes(hf), seed)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if (name := lora.plain_name(name)) in tensors:
                copy_rows(parameter, tensors[name])


def copy_rows(parameter: nn.Parameter, source) -> None:
    start, stop = 0, parameter.shape[0]
    if isinstance(parameter, DTensor):                                    # FSDP2 shards dimension 0 as torch.chunk does
        mesh = parameter.device_mesh
        rows = -(-stop // mesh.size(mesh.ndim - 1))
        start = min(mesh.get_local_rank(mesh.ndim - 1) * rows, stop)
        stop = min(start + rows, stop)
        parameter = parameter.to_local()
    parameter.copy_(source[start:stop])
