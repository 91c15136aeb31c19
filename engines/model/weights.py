"""Weights from safetensors files into a sharded model, each rank reading its own rows."""

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from omegaconf import DictConfig
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common.checksum import checksum
from config import InputError
from engines.heads import Head
from engines.model import lora


def load_weights(
    hf: nn.Module,
    path: Path,
    names: dict[str, str | None],
    device: torch.device,
    buffer_device: torch.device,
    buffer_dtype: torch.dtype,
    head: Head = Head.LOG_PROBS,
    base: dict[str, Tensor] | None = None,
) -> None:
    """Allocate the sharded parameters and read this rank's rows of each from the safetensors files, and the persistent buffers,
    which are floating-point numbers of buffer_dtype (but where transformers keeps them in fp32). A critic's output matrix is zero
    where the files have none, or a policy's: every value begins at 0. Adapters are left empty. names: as from model_names().
    base: tensors by name that are to be filled, and used, instead of memory of the model's own."""
    from transformers import PreTrainedModel  # slow: not for those who only read checksums

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
                in_fp32 = name in module._non_persistent_buffers_set or any(
                    part in f"{prefix}.{name}" for part in kept
                )
                dtype = buffer_dtype if buffer.is_floating_point() and not in_fp32 else buffer.dtype
                module._buffers[name] = buffer.to(buffer_device, dtype)
    tensors = {lora.plain_name(name): x for name, x in stored_tensors(hf)}
    parts = {name: (stack, rows) for stack, found in stacked(hf).items() for name, rows in found}
    with torch.no_grad():
        if head is Head.VALUES:
            hf.get_output_embeddings().weight.zero_()
        for file in weight_files(path):
            with safe_open(file, framework="pt") as opened:
                for file_name in opened.keys():
                    stack, rows = parts.get(file_name, (names[file_name], None))
                    tensor, source = tensors.get(stack), opened.get_slice(file_name)
                    if rows is not None:
                        copy_rows(tensor, source, rows)
                    elif tensor is None or source.get_shape() != list(
                        tensor.shape
                    ):  # a policy's matrix, for a critic
                        continue
                    else:
                        copy_rows(tensor, source) if tensor.ndim else tensor.copy_(
                            opened.get_tensor(file_name)
                        )
        for _, tensor in stored_tensors(hf):
            tensor._is_hf_initialized = (
                True  # which transformers' _init_weights() leaves as they are
            )
        models = [model for model in hf.modules() if isinstance(model, PreTrainedModel)]
        model_of = {
            module: model for model in models for module in model.modules()
        }  # the innermost one
        for module in hf.modules():
            if module._non_persistent_buffers_set:  # rotary frequencies: in no file
                model_of[module]._init_weights(module)


def stacked(hf: nn.Module) -> dict[str, list[tuple[str, range]]]:
    """Of parameters that transformers stacks when it loads, such as a layer's experts [n, 2 * f, h]: the names that the files
    have for the parts, and which rows each is, of all matrices one below the other. The parameter's name -> its parts.

    This is transformers' own table, applied to the numbers of the rows. Raises InputError for parts that are no rows.
    """
    from transformers.conversion_mapping import (
        get_model_conversion_mapping,
    )  # slow: not for those who only read checksums
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        revert_weight_conversion,
    )

    table = [
        entry
        for entry in get_model_conversion_mapping(hf, add_legacy=False)
        if not isinstance(entry, PrefixChange)
    ]
    targets = [
        target
        for entry in table
        if isinstance(entry, WeightConverter)
        for target in entry.target_patterns
    ]
    found, hf._weight_conversions = {}, table
    for name, parameter in hf.named_parameters():
        if parameter.ndim < 2 or not any(target in name for target in targets):
            continue
        numbers = torch.arange(parameter.shape[:-1].numel()).view(*parameter.shape[:-1], 1)
        parts = {
            part: rows.flatten().tolist()
            for part, rows in revert_weight_conversion(hf, {name: numbers}).items()
        }
        if len(parts) == 1:
            continue
        found[name] = [(part, range(rows[0], rows[0] + len(rows))) for part, rows in parts.items()]
        if any(list(rows) != parts[part] for part, rows in found[name]):
            raise InputError(
                f"transformers makes {name} of {min(parts)} and others in a way that is not supported"
            )
    return found


def in_files(
    weights: Iterable[tuple[str, Tensor]], parts: dict[str, list[tuple[str, range]]]
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) with the parts of a stack by themselves. weights: a model's whole parameters; parts: as from stacked()."""
    for name, weight in weights:
        if name not in parts:
            yield name, weight
        for part, rows in parts.get(name, ()):
            # A row of depthwise convolutions [c, 1, k] is a matrix, and stays one.
            matrices = weight.flatten(0, -2) if weight.shape[1:-1].numel() > 1 else weight
            yield part, matrices[rows.start : rows.stop]


def stored_tensors(hf: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of everything that a file of the model's weights holds: parameters, tied ones once, and persistent buffers."""
    kept = hf.state_dict().keys()  # first, since FSDP frees what it has gathered
    yield from hf.named_parameters()
    yield from ((name, buffer) for name, buffer in hf.named_buffers() if name in kept)


def model_names(hf: nn.Module, path: Path) -> dict[str, str | None]:
    """name in the files -> name in the model: transformers renames some families' weights when it loads them. A part of a stack
    keeps its name; what transformers leaves alone has None: a layer that predicts one more token (MTP), a vision tower. Raises
    InputError where it would compute other weights, and for two names of one weight."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        Transpose,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(hf)
    renamings = [x for x in transforms if isinstance(x, WeightRenaming)]
    converters = [x for x in transforms if not isinstance(x, WeightRenaming)]
    stored = {lora.plain_name(name): x for name, x in hf.state_dict().items()}
    there = shapes_in_files(path)
    names = {part: part for parts in stacked(hf).values() for part, _ in parts if part in there}
    first = {}  # name in the model -> in the files
    for name in sorted(there.keys() - names.keys(), key=dot_natural_key):
        names[name], converted = rename_source_key(
            name, renamings, converters, hf.base_model_prefix, stored
        )
        if names[name] not in stored and is_ignored(hf, names[name]):
            names[name] = None
        elif converted:
            operations = next(x.operations for x in converters if converted in x.source_patterns)
            by_shape = all(
                isinstance(x, Transpose) and x.check_dims for x in operations
            )  # which leave alone what fits
            if not (
                by_shape
                and names[name] in stored
                and there[name] == list(stored[names[name]].shape)
            ):
                again = not by_shape and rename_source_key(names[name], renamings, converters)[1]
                raise InputError(
                    f"model.path={path}: transformers converts {name} to {names[name]} of {type(hf).__name__}, which "
                    "is not supported"
                    + (
                        ""
                        if again
                        else ": load the model with transformers, and save it with "
                        "save_original_format=False"
                    )
                )
        if (other := first.setdefault(names[name] or name, name)) != name:
            raise InputError(
                f"model.path={path}: {other} and {name} are two names of one weight, {names[name]} of "
                f"{type(hf).__name__}: take one of them out of the files"
            )
    return names


def is_ignored(hf: nn.Module, name: str) -> bool:
    """Whether transformers leaves a weight alone that the model does not have. name: as the model would have it"""
    return any(re.search(pattern, name) for pattern in hf._keys_to_ignore_on_load_unexpected or ())


def ignored_weights(path: Path, names: dict[str, str | None]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of those, as the files have them. names: as from model_names()."""
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            yield from (
                (name, tensors.get_tensor(name)) for name in tensors.keys() if names[name] is None
            )


def shapes_in_files(path: Path) -> dict[str, list[int]]:
    found = {}
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                found |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}
        except SafetensorError as error:
            raise InputError(f"{file} is damaged, or not whole: {error}") from None
    return found


def check_files(
    hf: nn.Module, path: Path, head: Head, parameters: Iterable[tuple[str, Tensor]] | None = None
) -> None:
    """Raise InputError unless the files hold exactly the weights of hf, the model on the meta device; only headers are read, and
    tied matrices of which a file holds both.

    A critic's output matrix may be absent, or a policy's. parameters: names and shapes in the files, where they are to be taken
    literally, and are not those of hf's own parameters and buffers.
    """
    found, parts = shapes_in_files(path), {}
    file_names = {name: name for name in found}
    if parameters is None:
        file_names = {name: file_name for file_name, name in model_names(hf, path).items() if name}
        found = {name: found[file_name] for name, file_name in file_names.items()}
        parts = {name: each for name, each in stacked(hf).items() if name not in found}
    expected = {
        name: list(x.shape) for name, x in in_files(parameters or stored_tensors(hf), parts)
    }
    # A file may hold the output matrix of a tied model once more.
    known = expected.keys() | hf.state_dict().keys()
    if head is Head.VALUES:
        expected.pop(
            next(
                name for name, p in hf.named_parameters() if p is hf.get_output_embeddings().weight
            )
        )
    missing = expected.keys() - found
    if missing:
        raise InputError(
            f"model.path={path} lacks {len(missing)} weights of {type(hf).__name__}, {min(missing)} among them"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise InputError(f"{name} has shape {found[name]} in the file, {shape} by config.json")
    unknown = {
        name
        for name in found
        if name not in known
        and not name.endswith("rotary_emb.inv_freq")
        and not is_ignored(hf, name)
    }
    if unknown:
        raise InputError(
            f"model.path={path} holds {len(unknown)} weights that {type(hf).__name__} does not have, "
            f"{min(unknown)} among them"
        )
    check_tied(hf, path, file_names)


def check_tied(hf: nn.Module, path: Path, file_names: dict[str, str]) -> None:
    """Raise InputError for files with different values of matrices that config.json ties: transformers does not tie them then."""
    tied, at_once = defaultdict(list), 4096  # rows
    for name, parameter in hf.named_parameters(remove_duplicate=False):
        if name in file_names:
            tied[parameter].append(file_names[name])
    with ExitStack() as stack:
        opened = [
            stack.enter_context(safe_open(file, framework="pt")) for file in weight_files(path)
        ]
        sources = {name: tensors.get_slice(name) for tensors in opened for name in tensors.keys()}
        for name, *others in tied.values():
            for other in others:
                a, b = sources[name], sources[other]
                if a.get_shape() != b.get_shape() or not all(
                    torch.equal(a[i : i + at_once], b[i : i + at_once])
                    for i in range(0, a.get_shape()[0], at_once)
                ):
                    raise InputError(
                        f"model.path={path}: {other} and {name} have different values, but config.json ties them: "
                        "set tie_word_embeddings to false in it"
                    )


def fingerprint(path: Path) -> str:
    """crc32 of a model's configuration and weights."""
    files = [path / "config.json", *weight_files(path)]
    with ThreadPoolExecutor() as pool:
        return f"{zlib.crc32(' '.join(pool.map(checksum, files)).encode()):08x}"


def weight_files(path: Path) -> list[Path]:
    """The files that the index names, else model.safetensors: others beside them may be variants of the same weights.
    Raises InputError for a name that leads out of the directory; a link in it may, as in the hub's cache."""
    index = path / "model.safetensors.index.json"
    names = (
        set(json.loads(index.read_text())["weight_map"].values())
        if index.exists()
        else ["model.safetensors"]
    )
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
    if isinstance(parameter, DTensor):  # FSDP2 shards dimension 0 as torch.chunk does
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
        mine = parameter[first - start : end - start]
        mine.copy_(source[first - rows.start : end - rows.start].reshape(mine.shape))
