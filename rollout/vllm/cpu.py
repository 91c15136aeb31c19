"""What vLLM's build for CPUs needs of its surroundings."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn


def forget_packed_experts(model: nn.Module) -> None:
    """vLLM 0.32 packs a CPU's experts when it makes their kernel, and at a reload puts unpacked ones where these were."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel = None


def free_shared_memory(ranks: Sequence[int], tp_rank: int) -> None:
    """Remove the name of the memory that these ranks of vLLM's CPU build are going to share. It says nothing of the run: one
    that was killed has left it, or another one of the same layout has it open, which it stays, and vLLM could not start."""
    name = "-".join(map(str, ranks))
    for file in Path("/dev/shm").glob(f"*-tp:*-[[]{name}]-cpushm_{tp_rank}"):
        file.unlink(missing_ok=True)
