"""Workarounds for vLLM's CPU build."""

from pathlib import Path

import torch
from torch import Tensor, nn


def free_shared_memory(rank: int, tp_size: int) -> None:
    """Unlink the shared memory that a rank will use to communicate with the others of its replica.

    Its name depends only on the ranks of the replica. vLLM could not start if a killed run had left
    this memory behind, or if another run with the same layout was using it. Unlinking removes only
    the name: another run can still use its memory.
    """
    replica, tp_rank = divmod(rank, tp_size)
    ranks = range(replica * tp_size, (replica + 1) * tp_size)
    name = "-".join(map(str, ranks))
    for file in Path("/dev/shm").glob(f"*-tp:*-[[]{name}]-cpushm_{tp_rank}"):
        file.unlink(missing_ok=True)


def skip_ranks_of_tokens() -> None:
    """Keep vLLM's sampler from computing each sampled token's rank by likelihood.

    These ranks are not used. Their function is compiled by every process, which takes a second, and
    the first time on a machine ten.
    """
    # vLLM-private: the sampler computes ranks along with log-probabilities; no option avoids it.
    from vllm.v1.sample import sampler

    def no_ranks(log_probs: Tensor, log_probs_of_tokens: Tensor) -> Tensor:
        return torch.zeros(len(log_probs), dtype=torch.int64)

    sampler.batched_count_greater_than = no_ranks


def keep_plain_weights() -> None:
    """Keep vLLM from packing the weights of linear layers. Call this before vLLM starts.

    Packing would copy the weights to another layout, and drop the originals, which the trainer
    shares.
    """
    # vLLM-private: no option turns packing off.
    from vllm.model_executor.layers import utils

    def use_plain_linear(layer: nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = use_plain_linear


def forget_packed_experts(model: nn.Module) -> None:
    """Make vLLM pack its experts again after the next reload of weights.

    vLLM packs experts when it creates their kernel. A reload replaces them with unpacked ones but
    keeps the kernel, which expects packed ones.
    """
    # vLLM-private: reload_weights() forgets other layers' kernels, but not these.
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel = None
