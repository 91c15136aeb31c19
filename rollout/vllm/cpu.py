"""Workarounds for vLLM's build for CPUs."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn


def free_shared_memory(ranks: Sequence[int], tp_rank: int) -> None:
    """Unlink the shared memory through which these ranks of one replica are going to communicate.

    Its name depends on the ranks alone. If a run that was killed has left it, or another run of the
    same layout is using it, vLLM cannot start. Unlinking removes only the name: a run that is using
    the memory keeps it.
    """
    name = "-".join(map(str, ranks))
    for file in Path("/dev/shm").glob(f"*-tp:*-[[]{name}]-cpushm_{tp_rank}"):
        file.unlink(missing_ok=True)


def keep_plain_weights() -> None:
    """Let vLLM multiply with weights as they are. Call before vLLM starts.

    It would pack them into a layout of its own and drop the originals, which the trainer shares.
    """
    # vLLM-private: no option turns packing off.
    from vllm.model_executor.layers import utils

    def use_plain_linear(layer: nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = use_plain_linear


def forget_packed_experts(model: nn.Module) -> None:
    """Let vLLM pack its experts again after the next reload of weights.

    It packs them when it creates their kernel. A reload puts unpacked ones in their place and keeps
    the kernel, which would read them as packed.
    """
    # vLLM-private: reload_weights() forgets other layers' kernels, but not these.
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel = None
