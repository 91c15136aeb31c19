"""Tensors that wait in host memory while somebody else needs the device's."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# Smaller ones (Adam's step counters) take less memory than a host buffer of their own.
MIN_BYTES = 4096


class HostMemory:
    """Empties the storage of tensors on a device and fills it again. Only the memory moves: tensors, their views, and
    what FSDP or an optimizer keeps of them stay the same objects. Host buffers are pinned and kept."""

    def __init__(self):
        self.buffers: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    def offload(self, tensors: Iterable[Tensor]) -> None:
        emptied = []
        for storage, device in _storages(tensors):
            if storage.nbytes() < MIN_BYTES:
                continue
            key = storage._cdata
            if key not in self.buffers or len(self.buffers[key][1]) != storage.nbytes():
                self.buffers[key] = storage, torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
            self.buffers[key][1].copy_(_bytes(storage, device), non_blocking=True)
            emptied.append(storage)
        if emptied:
            torch.accelerator.synchronize()         # the copies read what is freed next
            for storage in emptied:
                storage.resize_(0)
            torch.accelerator.empty_cache()

    def onload(self, tensors: Iterable[Tensor]) -> None:
        for storage, device in _storages(tensors):
            if storage.nbytes() or storage._cdata not in self.buffers:
                continue
            buffer = self.buffers[storage._cdata][1]
            storage.resize_(len(buffer))
            _bytes(storage, device).copy_(buffer, non_blocking=True)


def _storages(tensors: Iterable[Tensor]) -> Iterable[tuple[torch.UntypedStorage, torch.device]]:
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device.type != "cpu":
            yield local.untyped_storage(), local.device


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
