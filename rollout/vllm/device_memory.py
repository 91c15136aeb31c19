"""The device memory of vLLM's weights and KV cache: giving it up and taking it back.

vLLM calls this sleeping and waking. At level 1 weights are copied to host memory and filled from
there on waking; at level 2 they are dropped.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from rollout.vllm.adapters import Adapter

PARTS = ("weights", "kv_cache")


def used_gib(device: torch.device) -> float | None:
    """Return the GiB in use on the device by all allocators and processes; None for a CPU.

    torch's own statistics do not see vLLM's allocator.
    """
    if device.type == "cpu":
        return None
    free, total = torch.get_device_module().mem_get_info()
    return (total - free) / 2**30


class CpuMemory:
    """Memory of vLLM on a CPU, which never moves."""

    def give_up(self, keep_weights: bool) -> None:
        pass

    def take_back(self, part: str, are_weights_valid: bool) -> None:
        pass

    def forget_host_copies(self) -> None:
        pass


class SharedMemory:
    """Memory of vLLM whose weights are the trainer's, too. Only the KV cache sleeps."""

    def __init__(self, llm):
        self.llm = llm

    def give_up(self, keep_weights: bool) -> None:
        drop_kv_cache()

    def take_back(self, part: str, are_weights_valid: bool) -> None:
        if part == "kv_cache":
            # LLM.wake_up() would do nothing, because LLM.sleep() was not called.
            self.llm.collective_rpc("wake_up", kwargs={"tags": [part]})

    def forget_host_copies(self) -> None:
        pass


class OwnMemory:
    """Memory of vLLM on an accelerator, with weights of its own.

    Weights that stay valid, those of a frozen base, are copied to host memory only once: later
    sleeps drop them, and waking fills them from the first copies.
    """

    def __init__(self, llm, adapter: Adapter | None, device_type: str, level: int):
        """
        Args:
            level: vLLM's sleep level where the weights need not be kept.
        """
        self.llm = llm
        self.adapter = adapter
        self.device_type = device_type
        self.level = level
        self.host_copies: dict[int, Tensor] = {}

    def give_up(self, keep_weights: bool) -> None:
        if self.host_copies:
            self.llm.sleep(level=2)
            fill_on_waking(self.host_copies)
        else:
            self.llm.sleep(level=1 if keep_weights else self.level)

    def take_back(self, part: str, are_weights_valid: bool) -> None:
        if part == "weights" and are_weights_valid and self.device_type == "cuda":
            self.host_copies = find_host_copies()
        self.llm.wake_up(tags=[part])
        if self.adapter:
            self.adapter.forget_mapping()

    def forget_host_copies(self) -> None:
        """The weights are about to change."""
        self.host_copies = {}


# vLLM-private: LLM.sleep() always puts weights and KV cache to sleep together, and frees the copies
# in host memory on waking. The functions below reach into its allocator instead.


def allocations(tag: str) -> Iterable:
    """Return the blocks of vLLM's sleep allocator under a tag, "weights" or "kv_cache"."""
    from vllm.device_allocator.cumem import CuMemAllocator

    blocks = CuMemAllocator.get_instance().pointer_to_data.values()
    return [block for block in blocks if block.tag == tag]


def drop_kv_cache() -> None:
    """Give up the memory of the KV cache, and nothing else."""
    from vllm.device_allocator.cumem import unmap_and_release

    torch.cuda.synchronize()
    for block in allocations("kv_cache"):
        if not block.is_asleep:
            unmap_and_release(block.handle)
            block.is_asleep = True


def find_host_copies() -> dict[int, Tensor]:
    """Return {device address of weights that sleep: the copy in host memory}."""
    return {block.handle[2]: block.cpu_backup_tensor for block in allocations("weights")}


def fill_on_waking(host_copies: dict[int, Tensor]) -> None:
    """Let waking fill the weights, which sleep, from copies made before."""
    for block in allocations("weights"):
        block.cpu_backup_tensor = host_copies[block.handle[2]]
