"""Weight names: in the files of a model directory, and in transformers' modules.

For some families, transformers renames weights when it loads them, or stacks several weights, such
as the experts of a layer. Exports, checkpoints and vLLM use the names in the files.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from config import InputError
from engines.model import lora
from engines.model.classifier import SCORE, value_head_name
from engines.model.model_files import shapes_in_files


@dataclass(frozen=True)
class StackedPart:
    """A weight in the files that is one part of a stacked parameter."""

    # The weight's name in the files.
    name: str
    # Its rows within the stack. Rows are numbered consecutively across the stack's matrices.
    rows: range


def stacked(hf: nn.Module) -> dict[str, list[StackedPart]]:
    """Return the parts of every parameter that transformers stacks when it loads a model.

    For example, a layer's experts [n, 2 * f, h] are 2 n weights in the files. To find the parts, we
    let transformers convert a tensor of row numbers back to the format of the files.

    Raises:
        InputError: if a part does not consist of consecutive rows.
    """
    # Imported here because it is slow.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        revert_weight_conversion,
    )

    conversions = [
        conversion
        for conversion in get_model_conversion_mapping(hf, add_legacy=False)
        if not isinstance(conversion, PrefixChange)
    ]
    stack_patterns = []
    for conversion in conversions:
        if isinstance(conversion, WeightConverter):
            stack_patterns += conversion.target_patterns
    hf._weight_conversions = conversions

    stacks = {}
    for name, parameter in hf.named_parameters():
        is_converted = any(pattern in name for pattern in stack_patterns)
        if parameter.ndim < 2 or not is_converted:
            continue
        row_numbers = torch.arange(parameter.shape[:-1].numel()).view(*parameter.shape[:-1], 1)
        parts = revert_weight_conversion(hf, {name: row_numbers})
        if len(parts) > 1:
            stacks[name] = [part_of_rows(name, part, rows) for part, rows in parts.items()]
    return stacks


def described_names(hf: nn.Module) -> dict[str, str]:
    """Return {name in the files that transformers would write: name in the model}.

    For a model without files. Stacked parameters, whose parts are in the files, are left out.
    """
    from transformers.core_model_loading import revert_weight_conversion

    stacks = stacked(hf)
    names = {}
    for name, parameter in hf.named_parameters(remove_duplicate=False):
        if name in stacks:
            continue
        (file_name,) = revert_weight_conversion(hf, {name: parameter.detach()})
        names[file_name] = name
    return names


def part_of_rows(stack: str, name: str, row_numbers: Tensor) -> StackedPart:
    """Return a part from its row numbers, or raise InputError if they are not consecutive."""
    numbers = row_numbers.flatten().tolist()
    rows = range(numbers[0], numbers[0] + len(numbers))
    if list(rows) != numbers:
        raise InputError(
            f"transformers stacks {name} and other weights into {stack} in a way that is not "
            "supported"
        )
    return StackedPart(name, rows)


def split_stacks(
    weights: Iterable[tuple[str, Tensor]], stacks: dict[str, list[StackedPart]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) with stacked parameters split into their parts, as in the files.

    Args:
        weights: (name, tensor) of a model's unsharded parameters.
        stacks: as returned by stacked().
    """
    for name, weight in weights:
        if name not in stacks:
            yield name, weight
            continue
        # Depthwise convolutions [c, 1, k] are split along c; their parts keep three dimensions.
        is_stack_of_matrices = weight.shape[1:-1].numel() > 1
        rows = weight.flatten(0, -2) if is_stack_of_matrices else weight
        for part in stacks[name]:
            yield part.name, rows[part.rows.start : part.rows.stop]


def stored_tensors(hf: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for everything in a model's files: parameters and persistent buffers.

    A tied parameter is yielded once.
    """
    # Call state_dict() first: FSDP gathers parameters for it, and frees them afterwards.
    names = hf.state_dict().keys()
    yield from hf.named_parameters()
    for name, buffer in hf.named_buffers():
        if name in names:
            yield name, buffer


def text_name(hf: nn.Module, name: str) -> str:
    """Return the name of a weight in a text-only model with the same layers."""
    decoder = next(prefix for prefix, module in hf.named_modules() if module is hf.get_decoder())
    if not name.startswith(f"{decoder}."):
        return name
    return f"{hf.base_model_prefix}{name.removeprefix(decoder)}"


class LoadingRules:
    """How transformers renames and converts a model's weights when it loads them."""

    def __init__(self, hf: nn.Module):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        transforms = get_model_conversion_mapping(hf)
        self.renamings = [rule for rule in transforms if isinstance(rule, WeightRenaming)]
        self.converters = [rule for rule in transforms if not isinstance(rule, WeightRenaming)]
        self.base_model_prefix = hf.base_model_prefix
        # Name in the model -> tensor.
        self.stored = {lora.plain_name(name): tensor for name, tensor in hf.state_dict().items()}

    def rename(self, file_name: str) -> tuple[str, str | None]:
        """Return the name in the model, and the pattern of the matching converter, if any."""
        from transformers.core_model_loading import rename_source_key

        name, pattern = rename_source_key(
            file_name, self.renamings, self.converters, self.base_model_prefix, self.stored
        )
        if name not in self.stored and file_name in self.stored:
            # As transformers does, leave out rules that match too much. For example, DeepSeek-V4's
            # rule for the norms of compressors also renames model.norm.weight.
            return rename_source_key(file_name, [], [], self.base_model_prefix, self.stored)
        return name, pattern

    def leaves_as_is(self, name: str, pattern: str, shape: list[int]) -> bool:
        """Return whether a converter leaves a weight unchanged because its shape already fits."""
        is_in_model = name in self.stored
        is_by_shape = self.is_conversion_by_shape(pattern)
        return is_by_shape and is_in_model and shape == list(self.stored[name].shape)

    def is_conversion_by_shape(self, pattern: str) -> bool:
        """Return whether a converter only transposes weights, and only if their shape is wrong."""
        from transformers.core_model_loading import Transpose

        operations = next(
            converter.operations
            for converter in self.converters
            if pattern in converter.source_patterns
        )
        return all(
            isinstance(operation, Transpose) and operation.check_dims for operation in operations
        )

    def would_convert_again(self, name: str, pattern: str) -> bool:
        """Return whether a weight saved under this name would be converted when it is loaded."""
        from transformers.core_model_loading import rename_source_key

        if self.is_conversion_by_shape(pattern):
            return False
        return bool(rename_source_key(name, self.renamings, self.converters)[1])


def model_names(hf: nn.Module, path: Path) -> dict[str, str | None]:
    """Return {name in the files: name in the model}.

    A part of a stack keeps its name. Weights that transformers ignores map to None. They belong to
    layers for multi-token prediction, for example, or to a vision tower. The score head of a
    sequence classifier is the value head of a model that has one.

    Raises:
        InputError: if transformers would compute new weights from those in the files, or if two
            names in the files refer to the same weight.
    """
    from transformers.core_model_loading import dot_natural_key

    rules = LoadingRules(hf)
    shapes = shapes_in_files(path)
    value_head = value_head_name(hf)
    parts = {part.name for stack in stacked(hf).values() for part in stack}
    names: dict[str, str | None] = {name: name for name in shapes if name in parts}
    first_file_name = {}
    for file_name in sorted(shapes.keys() - names.keys(), key=dot_natural_key):
        if file_name == SCORE and value_head:
            names[file_name] = value_head
            continue
        name, pattern = rules.rename(file_name)
        if name not in rules.stored and is_ignored(hf, name):
            name = None
        elif pattern and not rules.leaves_as_is(name, pattern, shapes[file_name]):
            raise conversion_error(
                hf, path, file_name, name, rules.would_convert_again(name, pattern)
            )
        names[file_name] = name
        first = first_file_name.setdefault(name or file_name, file_name)
        if first != file_name:
            raise InputError(
                f"model.path={path}: {first} and {file_name} are two names of one weight, {name} "
                f"of {type(hf).__name__}: remove one of them from the files"
            )
    return names


def literal_names(hf: nn.Module, path: Path) -> dict[str, str | None]:
    """Return {name in the files: the same name, or None for a weight that transformers ignores}.

    This is for an engine that has its own mapping and does not need transformers' names.
    """
    names_in_model = hf.state_dict().keys()
    names: dict[str, str | None] = {}
    for name in shapes_in_files(path):
        is_unused = name not in names_in_model and is_ignored(hf, name)
        names[name] = None if is_unused else name
    return names


def conversion_error(
    hf: nn.Module, path: Path, file_name: str, name: str, would_convert_again: bool
) -> InputError:
    """Return the error for a weight that transformers converts.

    The message suggests saving the model again, unless the weight would still be converted then.
    """
    fix = ""
    if not would_convert_again:
        fix = ": load the model with transformers, and save it with save_original_format=False"
    return InputError(
        f"model.path={path}: transformers converts {file_name} to {name} of {type(hf).__name__}, "
        f"which is not supported{fix}"
    )


def is_ignored(hf: nn.Module, name: str) -> bool:
    """Return whether transformers ignores a weight in the files that the model lacks.

    Args:
        name: the name that the weight would have in the model.
    """
    patterns = hf._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(pattern, name) for pattern in patterns)
