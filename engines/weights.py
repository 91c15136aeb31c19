"""Weights from safetensors files into a sharded model, each rank reading its own rows."""

import json
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from omegaconf import DictConfig
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key

from config import InputError
from engines import lora
from engines.storage import checksum


def load_weights(hf: nn.Module, path: Path, names: dict[str, str], device: torch.device, buffer_device: torch.device,
                 buffer_dtype: torch.dtype, critic: bool = False, base: dict[str, Tensor] | None = None) -> None:
    """Allocate the sharded parameters and read this rank's rows of each from the safetensors files, and the persistent buffers,
    which are floating-point numbers of buffer_dtype (but where transformers keeps them in fp32). A critic's output matrix is zero
    where the files have none, or a policy's: every value begins at 0. Adapters are left empty. names: as from model_names().
    base: tensors by name that are to be filled, and used, instead of memory of the model's own."""
    for prefix, module in hf.named_modules():
        for name in module._parameters:
            if (tensor := (base or {}).get(lora.plain_name(f"{prefix}.{name}"))) is not None:
                setattr(module, name, nn.Parameter(tensor, requires_grad=False))
    hf._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x)
    hf.tie_weights()
    kept = tuple(hf._keep_in_fp32_modules_strict or ())
    for prefix, module in hf.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                in_fp32 = name in module._non_persistent_buffers_set or any(part in f"{prefix}.{name}" for part in kept)
                dtype = buffer_dtype if buffer.is_floating_point() and not in_fp32 else buffer.dtype
                module._buffers[name] = buffer.to(buffer_device, dtype)
    tensors = {lora.plain_name(name): x for name, x in stored_tensors(hf)}
    with torch.no_grad():
        if critic:
            hf.get_output_embeddings().weight.zero_()
        for file in weight_files(path):
            with safe_open(file, framework="pt") as opened:
                for file_name in opened.keys():
                    tensor = tensors.get(names[file_name])
                    source = opened.get_slice(file_name)
                    if tensor is None or source.get_shape() != list(tensor.shape):       # a policy's matrix, for a critic
                        continue
                    copy_rows(tensor, source) if tensor.ndim else tensor.copy_(opened.get_tensor(file_name))
        for module in hf.modules():
            if module._non_persistent_buffers_set:                        # rotary frequencies: in no file
                for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                    if name not in module._non_persistent_buffers_set:
                        tensor._is_hf_initialized = True                  # an embedding with a scale keeps its weights
                hf._init_weights(module)


def stored_tensors(hf: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of everything that a file of the model's weights holds: parameters, tied ones once, and persistent buffers."""
    kept = hf.state_dict().keys()               # first, since FSDP frees what it has gathered
    yield from hf.named_parameters()
    yield from ((name, buffer) for name, buffer in hf.named_buffers() if name in kept)


def model_names(hf: nn.Module, path: Path) -> dict[str, str]:
    """name in the files -> name in the model: transformers renames some families' weights when it loads them. Raises InputError
    where it would make one weight of several, or several of one."""
    transforms = get_model_conversion_mapping(hf)
    renamings = [x for x in transforms if isinstance(x, WeightRenaming)]
    converters = [x for x in transforms if not isinstance(x, WeightRenaming)]
    stored, names = {lora.plain_name(name): x for name, x in hf.state_dict().items()}, {}
    for name in sorted(shapes_in_files(path), key=dot_natural_key):
        names[name], converted = rename_source_key(name, renamings, converters, hf.base_model_prefix, stored)
        if converted:
            raise InputError(f"model.path={path}: transformers converts {name} to {names[name]} of {type(hf).__name__}, which is "
                             "not supported: load the model with transformers, and save it with save_original_format=False")
    return names


def shapes_in_files(path: Path) -> dict[str, list[int]]:
    found = {}
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}
    return found


def check_files(hf: nn.Module, path: Path, critic: bool, parameters: Iterable[tuple[str, Tensor]] | None = None) -> None:
    """Raise InputError unless the files hold exactly the weights of hf, the model on the meta device; only headers are read.

    A critic's output matrix may be absent, or a policy's. parameters: names and shapes in the files, where they are to be taken
    literally, and are not those of hf's own parameters and buffers.
    """
    expected = {name: list(p.shape) for name, p in parameters or stored_tensors(hf)}
    found = shapes_in_files(path)
    if parameters is None:
        found = {name: found[file_name] for file_name, name in model_names(hf, path).items()}
    # A file may hold the output matrix of a tied model once more.
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
