"""Tensors that wait in host memory while others need the device's."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engines.parallel.device import synchronize

# Smaller ones (Adam's step counters) stay where they are. The places of the others are multiples of it.
MIN_BYTES = 4096
# Host memory is pinned in parts of this size. Torch rounds pinned memory up to powers of two, of which this is one.
PART_BYTES = 256 * 2**20


class HostMemory:
    """Empties the storage of tensors on a device and fills it again. Only the memory moves: tensors, their views, and what
    FSDP or an optimizer keeps of them stay the same objects. Each storage has a place in parts of host memory that lie end
    to end. To pin them takes seconds: they are kept, and a thread does it before they are needed."""

    def __init__(self, device: torch.device):
        self.device, self.background = device, ThreadPoolExecutor(max_workers=1)
        self.parts: list[Future[Tensor]] = []
        self.places: dict[
            int, tuple[torch.UntypedStorage, int, int]
        ] = {}  # a storage, where it begins, its bytes
        self.num_bytes = 0  # of all places

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        """Take host memory in the background, until what is free of it could hold as many bytes as these tensors have."""
        num_bytes = self.num_bytes + sum(
            tensor.nbytes + MIN_BYTES for tensor in self._here(tensors)
        )
        while len(self.parts) * PART_BYTES < num_bytes:
            self.parts.append(
                self.background.submit(
                    torch.empty, PART_BYTES, dtype=torch.uint8, pin_memory=self.device.type != "cpu"
                )
            )

    def offload(self, tensors: Iterable[Tensor]) -> None:
        wait(
            self.parts
        )  # vLLM starts next, and while it captures CUDA graphs no thread may pin memory
        full = [storage for storage in self.storages(tensors) if storage.nbytes() >= MIN_BYTES]
        for storage in full:
            if (
                storage._cdata not in self.places
            ):  # which holds the storage, too: its address stays taken
                self.places[storage._cdata] = storage, self.num_bytes, storage.nbytes()
                self.num_bytes += -(-storage.nbytes() // MIN_BYTES) * MIN_BYTES
        self.reserve([])
        for host, here in self._pieces(full):
            host.copy_(here, non_blocking=True)
        synchronize()  # the copies read what is freed next
        for storage in full:
            storage.resize_(0)
        if full and self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def onload(self, tensors: Iterable[Tensor]) -> None:
        empty = [
            x
            for x in self.storages(tensors if self.places else [])
            if not x.nbytes() and x._cdata in self.places
        ]
        for storage in empty:
            storage.resize_(self.places[storage._cdata][2])
        for host, here in self._pieces(empty):
            here.copy_(host, non_blocking=True)

    def storages(self, tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
        """The memory on the device behind the tensors, each once."""
        return list(
            {
                storage._cdata: storage
                for storage in (x.untyped_storage() for x in self._here(tensors))
            }.values()
        )

    def _here(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Those on the device, of a DTensor this rank's part."""
        local = (x.to_local() if isinstance(x, DTensor) else x for x in tensors)
        return (x for x in local if x.device.type == self.device.type)

    def _pieces(self, storages: list[torch.UntypedStorage]) -> Iterator[tuple[Tensor, Tensor]]:
        """The bytes of these storages in host memory and where they were, [n] uint8 each."""
        for storage in storages:
            here = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            start = self.places[storage._cdata][1]
            while len(here):
                part, begin = divmod(start, PART_BYTES)
                host = self.parts[part].result()[begin : begin + len(here)]
                yield host, here[: len(host)]
                start, here = start + len(host), here[len(host) :]
