"""Tensors that wait in host memory while others need the device's."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# Smaller ones (Adam's step counters) take less memory than a host buffer of their own.
MIN_BYTES = 4096
# Pinned memory comes in powers of two: in parts of this size little of it is wasted.
PART_BYTES = 16 * 2**20


class HostMemory:
    """Empties the storage of tensors on a device and fills it again. Only the memory moves: tensors, their views, and
    what FSDP or an optimizer keeps of them stay the same objects. Host buffers are kept: to pin them takes a while."""

    def __init__(self):
        self.buffers: dict[int, tuple[torch.UntypedStorage, list[Tensor]]] = {}

    def offload(self, tensors: Iterable[Tensor]) -> None:
        emptied = []
        for storage, device in storages(tensors):
            if storage.nbytes() < MIN_BYTES:
                continue
            parts = as_bytes(storage, device).split(PART_BYTES)
            if storage._cdata not in self.buffers:
                pinned = [torch.empty(len(part), dtype=torch.uint8, pin_memory=True) for part in parts]
                self.buffers[storage._cdata] = storage, pinned          # the storage, too: its address stays taken
            for buffer, part in zip(self.buffers[storage._cdata][1], parts, strict=True):
                buffer.copy_(part, non_blocking=True)
            emptied.append(storage)
        if emptied:
            torch.accelerator.synchronize()         # the copies read what is freed next
            for storage in emptied:
                storage.resize_(0)
            torch.accelerator.empty_cache()

    def onload(self, tensors: Iterable[Tensor]) -> None:
        for storage, device in storages(tensors):
            if storage.nbytes() or storage._cdata not in self.buffers:
                continue
            buffers = self.buffers[storage._cdata][1]
            storage.resize_(sum(map(len, buffers)))
            for buffer, part in zip(buffers, as_bytes(storage, device).split(PART_BYTES)):
                part.copy_(buffer, non_blocking=True)


def storages(tensors: Iterable[Tensor]) -> Iterable[tuple[torch.UntypedStorage, torch.device]]:
    """The memory on a device behind each tensor, that of this rank's part for a DTensor."""
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device.type != "cpu":
            yield local.untyped_storage(), local.device


def as_bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
