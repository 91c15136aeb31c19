"""Find out where vLLM's loaders copy weights, without loading any."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Copy:
    """A copy that a loader would make.

    Attributes:
        destination: A view of vLLM's memory.
        source: A view of the weight, on the meta device.
    """

    destination: Tensor
    source: Tensor


class CopyRecorder(TorchDispatchMode):
    """Within this context, copies from `weights` are recorded but not made.

    Attributes:
        weights: {name: a tensor on the meta device}. Pass these to a loader.
        copies: {name: the copies that the loader would have made of it}.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype):
        super().__init__()
        self.weights: dict[str, Tensor] = {}
        self.copies: dict[str, list[Copy]] = defaultdict(list)
        self.name_of_storage: dict[int, str] = {}
        for name, shape in shapes.items():
            weight = torch.empty(shape, dtype=dtype, device="meta")
            self.weights[name] = weight
            self.name_of_storage[storage_id(weight)] = name

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default and args[1].is_meta:
            destination, source = args[:2]
            name = self.name_of_storage[storage_id(source)]
            self.copies[name].append(Copy(destination.detach(), source))
            return destination
        return function(*args, **(kwargs or {}))


def storage_id(tensor: Tensor) -> int:
    """Return a number that all views of the same storage share, even on the meta device."""
    return tensor.untyped_storage()._cdata
