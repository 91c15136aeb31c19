"""Tensors that wait in host memory while the device's memory is needed for something else."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engines.parallel.device import synchronize
from engines.planning import round_up

# Smaller storages, such as Adam's step counters, stay on the device. Slots in host memory are
# multiples of this size.
MIN_BYTES = 4096
# Host memory is pinned in parts of this size, a power of two: torch would round up other sizes.
PART_BYTES = 256 * 2**20


@dataclass(frozen=True)
class HostSlot:
    """The range of a storage's bytes in host memory, as if all parts were one buffer.

    The reference to the storage keeps the storage's address from being reused.
    """

    storage: torch.UntypedStorage
    start: int
    num_bytes: int


class HostMemory:
    """Empties the storages of tensors on a device, and fills them again.

    Only the memory moves. Tensors and their views stay the same objects, so references that FSDP or
    an optimizer holds stay valid. Pinning host memory takes seconds, so a thread pins it in
    advance, and it is never released.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.background = ThreadPoolExecutor(max_workers=1)
        self.parts: list[Future[Tensor]] = []
        self.slots: dict[int, HostSlot] = {}  # keyed by the address of a storage's C++ object
        self.num_bytes = 0  # the total size of all slots

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        """Pin enough host memory, in the background, to hold these tensors too."""
        self.reserve_bytes(tensor.nbytes for tensor in self._on_device(tensors))

    def reserve_bytes(self, sizes: Iterable[int]) -> None:
        """Pin enough host memory, in the background, to hold tensors of these sizes, too."""
        num_bytes = self.num_bytes + sum(size + MIN_BYTES for size in sizes)
        while len(self.parts) * PART_BYTES < num_bytes:
            part = self.background.submit(
                torch.empty,
                PART_BYTES,
                dtype=torch.uint8,
                pin_memory=self.device.type != "cpu",
            )
            self.parts.append(part)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Move the contents of tensors to host memory, and free their device memory."""
        # vLLM starts next. While it captures CUDA graphs, no thread may pin memory.
        wait(self.parts)
        full = [storage for storage in self.storages(tensors) if storage.nbytes() >= MIN_BYTES]
        for storage in full:
            if storage._cdata not in self.slots:
                slot = HostSlot(storage, self.num_bytes, storage.nbytes())
                self.slots[storage._cdata] = slot
                self.num_bytes += round_up(storage.nbytes(), MIN_BYTES)
        self.reserve([])
        for on_host, on_device in self._pieces(full):
            on_host.copy_(on_device, non_blocking=True)
        synchronize()  # wait for the copies before the memory is freed
        for storage in full:
            storage.resize_(0)
        if full and self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def onload(self, tensors: Iterable[Tensor]) -> None:
        """Move the contents of tensors back to the device, if they are in host memory."""
        if not self.slots:
            return
        empty = []
        for storage in self.storages(tensors):
            if not storage.nbytes() and storage._cdata in self.slots:
                empty.append(storage)
        for storage in empty:
            storage.resize_(self.slots[storage._cdata].num_bytes)
        for on_host, on_device in self._pieces(empty):
            on_device.copy_(on_host, non_blocking=True)

    def storages(self, tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
        """Return the storages of the tensors that are on the device, each storage once."""
        storages = {}
        for tensor in self._on_device(tensors):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage
        return list(storages.values())

    def _on_device(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the tensors that are on the device; for a DTensor, this rank's shard."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.device.type == self.device.type:
                yield local

    def _pieces(self, storages: list[torch.UntypedStorage]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (host view, device view) of these storages' bytes, both [n] uint8.

        A storage that spans several parts of host memory is yielded in several pieces.
        """
        for storage in storages:
            on_device = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            start = self.slots[storage._cdata].start
            while len(on_device):
                part, offset = divmod(start, PART_BYTES)
                on_host = self.parts[part].result()[offset : offset + len(on_device)]
                yield on_host, on_device[: len(on_host)]
                start += len(on_host)
                on_device = on_device[len(on_host) :]
