"""Free and restore the device memory of vLLM's weights and KV cache.

vLLM calls this sleeping and waking. At sleep level 1, weights are copied to host memory, and waking
copies them back. At level 2 they are dropped.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from rollout.vllm.adapters import Adapter

PARTS = ("weights", "kv_cache")


def used_gib(device: torch.device) -> float | None:
    """Return the GiB in use on the device by all allocators and processes; None for a CPU.

    torch's own statistics do not include vLLM's allocator.
    """
    if device.type == "cpu":
        return None
    free, total = torch.get_device_module().mem_get_info()
    return (total - free) / 2**30


class CpuMemory:
    """vLLM's memory on a CPU, which is never freed."""

    def free(self, keep_weights: bool) -> None:
        pass

    def restore(self, part: str, are_weights_valid: bool) -> None:
        pass

    def forget_host_copies(self) -> None:
        pass


class SharedMemory:
    """vLLM's memory when the trainer shares its weights: only the KV cache sleeps."""

    def __init__(self, llm):
        self.llm = llm

    def free(self, keep_weights: bool) -> None:
        drop_kv_cache()

    def restore(self, part: str, are_weights_valid: bool) -> None:
        if part == "kv_cache":
            # LLM.wake_up() would do nothing, because LLM.sleep() was not called.
            self.llm.collective_rpc("wake_up", kwargs={"tags": [part]})

    def forget_host_copies(self) -> None:
        pass


class OwnMemory:
    """vLLM's memory on an accelerator, with its own weights.

    The weights of a frozen base never change, so they are copied to host memory only once. Later
    sleeps drop them, and waking restores them from the same copies.
    """

    def __init__(self, llm, adapter: Adapter | None, device_type: str, level: int):
        """
        Args:
            level: vLLM's sleep level when the weights need not be kept.
        """
        self.llm = llm
        self.adapter = adapter
        self.device_type = device_type
        self.level = level
        self.host_copies: dict[int, Tensor] = {}

    def free(self, keep_weights: bool) -> None:
        if self.host_copies:
            self.llm.sleep(level=2)
            fill_on_waking(self.host_copies)
        else:
            self.llm.sleep(level=1 if keep_weights else self.level)

    def restore(self, part: str, are_weights_valid: bool) -> None:
        if part == "weights" and are_weights_valid and self.device_type == "cuda":
            self.host_copies = find_host_copies()
        self.llm.wake_up(tags=[part])
        if self.adapter:
            self.adapter.forget_mapping()

    def forget_host_copies(self) -> None:
        """Forget the copies in host memory, because the weights are about to change."""
        self.host_copies = {}


# vLLM-private: LLM.sleep() can only put weights and KV cache to sleep together, and waking frees
# the copies in host memory. So the functions below use its allocator directly.


def allocations(tag: str) -> Iterable:
    """Return the blocks with a tag, "weights" or "kv_cache", in vLLM's sleep allocator."""
    from vllm.device_allocator.cumem import CuMemAllocator

    blocks = CuMemAllocator.get_instance().pointer_to_data.values()
    return [block for block in blocks if block.tag == tag]


def drop_kv_cache() -> None:
    """Free the memory of the KV cache, and nothing else."""
    from vllm.device_allocator.cumem import unmap_and_release

    torch.cuda.synchronize()
    for block in allocations("kv_cache"):
        if not block.is_asleep:
            unmap_and_release(block.handle)
            block.is_asleep = True


def find_host_copies() -> dict[int, Tensor]:
    """Return {device address: copy in host memory} of the weights, which must be asleep."""
    return {block.handle[2]: block.cpu_backup_tensor for block in allocations("weights")}


def fill_on_waking(host_copies: dict[int, Tensor]) -> None:
    """Make waking restore the weights, which must be asleep, from these copies."""
    for block in allocations("weights"):
        block.cpu_backup_tensor = host_copies[block.handle[2]]
