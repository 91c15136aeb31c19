"""Check a model's files, and load them into a sharded model, each rank reading its own rows."""

from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from config import InputError
from engines.heads import Head
from engines.model import lora
from engines.model.classifier import SCORE, check_score_shape
from engines.model.model_files import shapes_in_files, weight_files
from engines.model.names import is_ignored, model_names, split_stacks, stacked, stored_tensors

# The number of matrix rows that are compared at a time.
ROWS_AT_ONCE = 4096


# -- checking ------------------------------------------------------------------------------------


def check_files(
    hf: nn.Module, path: Path, head: Head, parameters: Iterable[tuple[str, Tensor]] | None = None
) -> None:
    """Check that the files hold exactly the weights of a model.

    Only headers are read, except for tied matrices that are in the files twice: their values are
    compared. With a value head, the files may have no output matrix, a language model's output
    matrix, or a classifier's score head.

    Args:
        hf: the model on the meta device.
        parameters: (name, tensor) with the exact names and shapes that the files must have. None:
            those that transformers expects.

    Raises:
        InputError: if a weight is missing or unknown, or its shape does not follow from
            config.json.
    """
    shapes = shapes_in_files(path)
    if head is Head.VALUES:
        check_score_shape(path, shapes)
    file_names = {name: name for name in shapes}
    stacks = {}
    if parameters is None:
        parameters = stored_tensors(hf)
        names = model_names(hf, path)
        file_names = {name: file_name for file_name, name in names.items() if name}
        shapes = {name: shapes[file_name] for name, file_name in file_names.items()}
        stacks = {name: parts for name, parts in stacked(hf).items() if name not in shapes}
    expected = {name: list(tensor.shape) for name, tensor in split_stacks(parameters, stacks)}
    # The files of a tied model may hold the output matrix a second time.
    known = expected.keys() | hf.state_dict().keys()
    if head is Head.VALUES:
        known = known | {SCORE}
        del expected[output_matrix_name(hf)]

    check_complete(hf, path, expected, shapes)
    unknown = {name for name in shapes if name not in known and not may_be_extra(hf, name)}
    if unknown:
        raise InputError(
            f"model.path={path} holds {len(unknown)} weights that {type(hf).__name__} does not "
            f"have, such as {min(unknown)}"
        )
    check_tied(hf, path, file_names)


def output_matrix_name(hf: nn.Module) -> str:
    output_matrix = hf.get_output_embeddings().weight
    return next(name for name, parameter in hf.named_parameters() if parameter is output_matrix)


def check_complete(
    hf: nn.Module, path: Path, expected: dict[str, list[int]], shapes: dict[str, list[int]]
) -> None:
    """Raise InputError unless the files have every expected weight with the expected shape."""
    missing = expected.keys() - shapes
    if missing:
        raise InputError(
            f"model.path={path} lacks {len(missing)} weights of {type(hf).__name__}, such as "
            f"{min(missing)}"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise InputError(
                f"model.path={path}: {name} has shape {shapes[name]} in the file, but should have "
                f"{shape} according to config.json"
            )


def may_be_extra(hf: nn.Module, name: str) -> bool:
    """Return whether files may hold this weight although the model lacks it."""
    return name.endswith("rotary_emb.inv_freq") or is_ignored(hf, name)


def check_tied(hf: nn.Module, path: Path, file_names: dict[str, str]) -> None:
    """Raise InputError if the files have different values for matrices that config.json ties.

    transformers would load such matrices without tying them.

    Args:
        file_names: name in the model -> name in the files.
    """
    names_of_parameter = defaultdict(list)
    for name, parameter in hf.named_parameters(remove_duplicate=False):
        if name in file_names:
            names_of_parameter[parameter].append(file_names[name])
    with ExitStack() as stack:
        sources = {}
        for file in weight_files(path):
            tensors = stack.enter_context(safe_open(file, framework="pt"))
            sources |= {name: tensors.get_slice(name) for name in tensors.keys()}
        for name, *tied_names in names_of_parameter.values():
            for tied_name in tied_names:
                if not have_equal_values(sources[name], sources[tied_name]):
                    raise InputError(
                        f"model.path={path}: {tied_name} and {name} have different values, but "
                        "config.json ties them: set tie_word_embeddings to false in config.json"
                    )


def have_equal_values(a, b) -> bool:
    """Return whether two tensors in safetensors files are equal, reading a few rows at a time."""
    if a.get_shape() != b.get_shape():
        return False
    num_rows = a.get_shape()[0]
    for start in range(0, num_rows, ROWS_AT_ONCE):
        stop = start + ROWS_AT_ONCE
        if not torch.equal(a[start:stop], b[start:stop]):
            return False
    return True


# -- loading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """Where a model's tensors are allocated."""

    parameter_device: torch.device
    buffer_device: torch.device
    # The dtype of floating-point buffers, except those that transformers keeps in fp32.
    buffer_dtype: torch.dtype


def load_weights(
    hf: nn.Module,
    path: Path,
    names: dict[str, str | None],
    placement: Placement,
    head: Head = Head.LOG_PROBS,
    shared_weights: dict[str, Tensor] | None = None,
) -> None:
    """Allocate memory for a sharded model on the meta device, and load safetensors files into it.

    Each rank reads its own rows of every parameter, and all persistent buffers. Adapters are left
    uninitialised: see load_adapter().

    Args:
        names: name in the files -> name in the model, as returned by model_names().
        head: with Head.VALUES, the output matrix is zero unless the files have a value head, so
            all values are 0 at first.
        shared_weights: existing tensors by name. They become parameters, for which no memory is
            allocated.
    """
    allocate(hf, placement, shared_weights or {})
    if head is Head.VALUES:
        with torch.no_grad():
            hf.get_output_embeddings().weight.zero_()
    read_weights(hf, path, names)
    initialise_nonpersistent_buffers(hf)


def allocate(hf: nn.Module, placement: Placement, shared_weights: dict[str, Tensor]) -> None:
    """Give parameters and buffers on the meta device uninitialised memory."""
    for prefix, module in hf.named_modules():
        for name in module._parameters:
            tensor = shared_weights.get(lora.plain_name(f"{prefix}.{name}"))
            if tensor is not None:
                setattr(module, name, nn.Parameter(tensor, requires_grad=False))

    def materialise(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        return torch.empty_like(tensor, device=placement.parameter_device)

    hf._apply(materialise)
    hf.tie_weights()
    fp32_names = tuple(hf._keep_in_fp32_modules_strict or ())
    for prefix, module in hf.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            is_persistent = name not in module._non_persistent_buffers_set
            is_kept_in_fp32 = any(part in f"{prefix}.{name}" for part in fp32_names)
            dtype = buffer.dtype
            if buffer.is_floating_point() and is_persistent and not is_kept_in_fp32:
                dtype = placement.buffer_dtype
            module._buffers[name] = buffer.to(placement.buffer_device, dtype)


@torch.no_grad()
def read_weights(hf: nn.Module, path: Path, names: dict[str, str | None]) -> None:
    """Copy this rank's rows of every weight in the files into the model."""
    tensors = {lora.plain_name(name): tensor for name, tensor in stored_tensors(hf)}
    stack_of_part = {}
    for stack, parts in stacked(hf).items():
        for part in parts:
            stack_of_part[part.name] = (tensors.get(stack), part.rows)
    for file in weight_files(path):
        with safe_open(file, framework="pt") as opened:
            for file_name in opened.keys():
                source = opened.get_slice(file_name)
                if file_name in stack_of_part:
                    stack, rows = stack_of_part[file_name]
                    copy_rows(stack, source, rows)
                    continue
                tensor = tensors.get(names[file_name])
                # The shapes differ if the files have a language model's output matrix, and the
                # model has a value head.
                if tensor is None or source.get_shape() != list(tensor.shape):
                    continue
                if tensor.ndim:
                    copy_rows(tensor, source)
                else:
                    tensor.copy_(opened.get_tensor(file_name))


@torch.no_grad()
def initialise_nonpersistent_buffers(hf: nn.Module) -> None:
    """Let transformers compute the buffers that no file contains, such as rotary frequencies."""
    from transformers import PreTrainedModel  # imported here because it is slow

    for _, tensor in stored_tensors(hf):
        # With this mark, transformers' _init_weights() does not overwrite the tensor.
        tensor._is_hf_initialized = True
    # A model may contain other models. Inner models come later, so they overwrite outer ones.
    innermost_model = {}
    for model in hf.modules():
        if isinstance(model, PreTrainedModel):
            innermost_model |= dict.fromkeys(model.modules(), model)
    for module in hf.modules():
        if module._non_persistent_buffers_set:
            innermost_model[module]._init_weights(module)


def load_adapter(hf: nn.Module, settings: DictConfig, seed: int) -> None:
    """Fill a model's adapters from model.lora.adapter_path, or with their initial values."""
    tensors = lora.initial_adapter(settings, lora.shapes(hf), seed)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            plain_name = lora.plain_name(name)
            if plain_name in tensors:
                copy_rows(parameter, tensors[plain_name])


def copy_rows(parameter: nn.Parameter, source, rows: range | None = None) -> None:
    """Copy this rank's rows of a tensor, or of a slice of a safetensors file, into a parameter.

    Args:
        rows: the rows of the parameter that `source` contains. For a stack, rows are numbered
            consecutively across its matrices. None: all rows.
    """
    start = 0
    stop = parameter.shape[0]
    if isinstance(parameter, DTensor):
        start, stop = own_rows(parameter)
        parameter = parameter.to_local()
    if rows is None:
        rows = range(stop)
    else:
        matrix_height = parameter.shape[1:-1].numel()
        start *= matrix_height
        stop *= matrix_height
        parameter = parameter.flatten(0, -2)
    first = max(start, rows.start)
    end = min(stop, rows.stop)
    if first < end:
        target = parameter[first - start : end - start]
        target.copy_(source[first - rows.start : end - rows.start].reshape(target.shape))


def own_rows(parameter: DTensor) -> tuple[int, int]:
    """Return (start, stop) of this rank's rows: FSDP2 shards dimension 0 like torch.chunk."""
    num_rows = parameter.shape[0]
    mesh = parameter.device_mesh
    shard_dim = mesh.ndim - 1
    rows_per_rank = -(-num_rows // mesh.size(shard_dim))
    start = min(mesh.get_local_rank(shard_dim) * rows_per_rank, num_rows)
    stop = min(start + rows_per_rank, num_rows)
    return start, stop
