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
    parts = {name: (stack, rows) for stack, found in stacked(hf).items() for name, rows in found}
    with torch.no_grad():
        if critic:
            hf.get_output_embeddings().weight.zero_()
        for file in weight_files(path):
            with safe_open(file, framework="pt") as tensors:
                for name in parameters.keys() & tensors.keys():
                    source = tensors.get_slice(name)
                    if source.get_shape() == list(parameters[name].shape):      # else a policy's matrix, for a critic
                        copy_rows(parameters[name], source)
                for name in parts.keys() & tensors.keys():
                    stack, rows = parts[name]
                    copy_rows(parameters[stack], tensors.get_slice(name), rows)
        for module in hf.modules():
            if module._non_persistent_buffers_set:                        # rotary frequencies: in no file
                for name in module._non_persistent_buffers_set:
                    setattr(module, name, getattr(module, name).to(buffer_device))
                for parameter in module.parameters(recurse=False):
                    parameter._is_hf_initialized = True                   # an embedding with a scale keeps its weights
                hf._init_weights(module)


def stacked(hf: nn.Module) -> dict[str, list[tuple[str, range]]]:
    """Of parameters that transformers stacks when it loads, such as a layer's experts [n, 2 * f, h]: the names that the files
    have for the parts, and which rows each is, of all matrices one below the other. The parameter's name -> its parts.

    This is transformers' own table, applied to the numbers of the rows. Raises InputError for parts that are no rows.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping  # slow: not for those who only read checksums
    from transformers.core_model_loading import WeightConverter, revert_weight_conversion
    table = [entry for entry in get_model_conversion_mapping(hf, add_legacy=False) if isinstance(entry, WeightConverter)]
    patterns, found = [pattern for entry in table for pattern in entry.target_patterns], {}
    hf._weight_conversions = table
    for name, parameter in hf.named_parameters():
        if parameter.ndim < 3 or not any(pattern in name for pattern in patterns):
            continue
        numbers = torch.arange(parameter.shape[:-1].numel()).view(*parameter.shape[:-1], 1)
        parts = {part: rows.flatten().tolist() for part, rows in revert_weight_conversion(hf, {name: numbers}).items()}
        if parts.keys() == {name}:
            continue
        found[name] = [(part, range(rows[0], rows[0] + len(rows))) for part, rows in parts.items()]
        if any(list(rows) != parts[part] for part, rows in found[name]):
            raise InputError(f"transformers makes {name} of {min(parts)} and others in a way that is not supported")
    return found


def in_files(weights: Iterable[tuple[str, Tensor]], parts: dict[str, list[tuple[str, range]]]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) as the files have them, of a model's whole parameters."""
    for name, weight in weights:
        if name not in parts:
            yield name, weight
        for part, rows in parts.get(name, ()):
            yield part, weight.flatten(0, -2)[rows.start:rows.stop]


def check_files(hf: nn.Module, path: Path, critic: bool, parameters: Iterable[tuple[str, Tensor]] | None = None) -> None:
    """Raise InputError unless the files hold exactly the weights of hf, the model on the meta device; only headers are read.

    A critic's output matrix may be absent, or a policy's. parameters: names and shapes in the files, where they are not those
    of hf's own parameters.
    """
    found, parts = {}, {} if parameters else stacked(hf)
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}
    split = {name: found_parts for name, found_parts in parts.items() if name not in found}
    expected = {name: list(p.shape) for name, p in in_files(parameters or hf.named_parameters(), split)}
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


def copy_rows(parameter: nn.Parameter, source, rows: range | None = None) -> None:
    """Copy this rank's rows of a tensor, or of a slice of a file. rows: source has only these, of all matrices of a stack."""
    start, stop = 0, parameter.shape[0]
    if isinstance(parameter, DTensor):                                    # FSDP2 shards dimension 0 as torch.chunk does
        mesh = parameter.device_mesh
        each = -(-stop // mesh.size(mesh.ndim - 1))
        start = min(mesh.get_local_rank(mesh.ndim - 1) * each, stop)
        stop = min(start + each, stop)
        parameter = parameter.to_local()
    if rows is not None:
        height = parameter.shape[1:-1].numel()
        start, stop, parameter = start * height, stop * height, parameter.flatten(0, -2)
    else:
        rows = range(stop)
    first, end = max(start, rows.start), min(stop, rows.stop)
    if first < end:
        parameter[first - start:end - start].copy_(source[first - rows.start:end - rows.start])
