"""Tensors that wait in host memory while others need the device."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engines.parallel.device import synchronize
from engines.planning import round_up

# Smaller storages, such as Adam's step counters, stay on the device. Host memory is allotted in
# multiples of this.
MIN_BYTES = 4096
# Host memory is pinned in parts of this size. Torch rounds pinned memory up to a power of two.
PART_BYTES = 256 * 2**20


@dataclass(frozen=True)
class HostPlace:
    """Where the bytes of a storage go in the parts of host memory, laid end to end.

    It holds the storage, so that its address stays taken.
    """

    storage: torch.UntypedStorage
    start: int
    num_bytes: int


class HostMemory:
    """Empties the storages of tensors on a device, and fills them again.

    Only the memory moves: tensors, their views, and references that FSDP or an optimizer holds stay
    the same objects. Pinning host memory takes seconds, so it is kept, and a thread pins it before
    it is needed.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.background = ThreadPoolExecutor(max_workers=1)
        self.parts: list[Future[Tensor]] = []
        self.places: dict[int, HostPlace] = {}  # by the address of a storage's C++ object
        self.num_bytes = 0  # of all places

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        """Pin memory in the background until the free part could hold these tensors."""
        num_bytes = self.num_bytes
        num_bytes += sum(tensor.nbytes + MIN_BYTES for tensor in self._on_device(tensors))
        while len(self.parts) * PART_BYTES < num_bytes:
            part = self.background.submit(
                torch.empty,
                PART_BYTES,
                dtype=torch.uint8,
                pin_memory=self.device.type != "cpu",
            )
            self.parts.append(part)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Move the contents of these tensors to host memory, and free their device memory."""
        # vLLM starts next. While it captures CUDA graphs, no thread may pin memory.
        wait(self.parts)
        full = [storage for storage in self.storages(tensors) if storage.nbytes() >= MIN_BYTES]
        for storage in full:
            if storage._cdata not in self.places:
                place = HostPlace(storage, self.num_bytes, storage.nbytes())
                self.places[storage._cdata] = place
                self.num_bytes += round_up(storage.nbytes(), MIN_BYTES)
        self.reserve([])
        for on_host, on_device in self._pieces(full):
            on_host.copy_(on_device, non_blocking=True)
        synchronize()  # the copies read memory that is freed next
        for storage in full:
            storage.resize_(0)
        if full and self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def onload(self, tensors: Iterable[Tensor]) -> None:
        """Move back the contents of those of these tensors that are in host memory."""
        if not self.places:
            return
        empty = []
        for storage in self.storages(tensors):
            if not storage.nbytes() and storage._cdata in self.places:
                empty.append(storage)
        for storage in empty:
            storage.resize_(self.places[storage._cdata].num_bytes)
        for on_host, on_device in self._pieces(empty):
            on_device.copy_(on_host, non_blocking=True)

    def storages(self, tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
        """Return the storages of the tensors on the device, each once."""
        storages = {}
        for tensor in self._on_device(tensors):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage
        return list(storages.values())

    def _on_device(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the tensors that are on the device; of a DTensor this rank's part."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.device.type == self.device.type:
                yield local

    def _pieces(self, storages: list[torch.UntypedStorage]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the bytes of these storages in host memory and on the device, [n] uint8 each.

        A storage that lies in several parts of host memory comes in several pieces.
        """
        for storage in storages:
            on_device = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            start = self.places[storage._cdata].start
            while len(on_device):
                part, offset = divmod(start, PART_BYTES)
                on_host = self.parts[part].result()[offset : offset + len(on_device)]
                yield on_host, on_device[: len(on_host)]
                start += len(on_host)
                on_device = on_device[len(on_host) :]
