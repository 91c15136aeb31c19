"""rollout.quantization and rollout.kv_cache_dtype: 8-bit floating point (FP8) in vLLM.

With rollout.quantization, vLLM's linear layers multiply in FP8. The trainer's weights are quantized
in every update, with one scale per output channel; activations have one per token. Embedding,
output matrix and norms keep the compute dtype.

With rollout.kv_cache_dtype, keys and values are stored in FP8, with a scale of 1. Some models' keys
do not fit: see rl/updates.py, check_fp8_kv_cache().

Responses then come from a policy that differs a little from the trainer's, so
algorithm.rollout_is has to correct for it.
"""

import torch
from omegaconf import DictConfig
from torch import nn

from config import InputError
from engines.model import mtp
from engines.model.experts import expert_weights
from engines.model.float8 import check_accelerator
from engines.model.hf import build_on_meta, layer_modules, read_hf_config
from engines.model.shape import head_dim

# vLLM's name for weights with one scale per output channel and activations with one per token.
VLLM_NAME = "fp8_per_channel"
# vLLM's attention on a CPU reads keys and values in FP8 only of heads of such sizes.
CPU_HEAD_DIM_MULTIPLE = 32


def is_quantized(config: DictConfig) -> bool:
    return config.rollout.quantization != "none"


def has_fp8_cache(config: DictConfig) -> bool:
    return config.rollout.kv_cache_dtype == "fp8"


def weight_arguments(config: DictConfig) -> dict:
    """Return the arguments of `vllm.LLM` for weights in FP8."""
    return {"quantization": VLLM_NAME} if is_quantized(config) else {}


def cache_arguments(config: DictConfig) -> dict:
    """Return the arguments of `vllm.LLM` for a KV cache in FP8."""
    return {"kv_cache_dtype": "fp8"} if has_fp8_cache(config) else {}


def quantized_parameters(hf: nn.Module) -> int:
    """Return the number of weights that vLLM stores in FP8: those of linear layers.

    Args:
        hf: the model on the meta device.
    """
    return sum(
        module.weight.numel()
        for layer in layer_modules(hf, hf.get_decoder())
        for module in layer.modules()
        if isinstance(module, nn.Linear)
    )


def check_quantization(config: DictConfig) -> None:
    """Raise InputError for settings that do not work with FP8 in vLLM."""
    rollout = config.rollout
    if is_quantized(config):
        setting = f"rollout.quantization={rollout.quantization}"
        check_setting(config, setting)
        if expert_weights(build_on_meta(read_hf_config(config.model.path), torch.float32)):
            raise InputError(f"{setting} does not work with mixtures of experts yet: leave it out")
    if has_fp8_cache(config):
        setting = f"rollout.kv_cache_dtype={rollout.kv_cache_dtype}"
        check_setting(config, setting)
        runs_on_cpu = not torch.accelerator.is_available() and config.assume.gpu_memory_gib is None
        if runs_on_cpu:
            check_cache_on_cpu(config, setting)


def check_setting(config: DictConfig, setting: str) -> None:
    """Raise InputError if other settings exclude both FP8 weights and an FP8 KV cache.

    Args:
        setting: "key=value".
    """
    if config.engine.compute_dtype != "bfloat16":
        raise InputError(
            f"{setting} needs engine.compute_dtype=bfloat16, not {config.engine.compute_dtype}"
        )
    if config.algorithm.rollout_is == "none":
        raise InputError(
            f"{setting} samples from a policy that differs from the trainer's: set "
            "algorithm.rollout_is=token (or sequence, icepop) to correct for it"
        )
    if config.model.images:
        raise InputError(f"{setting} does not work with model.images=true yet: use only one")
    if mtp.drafter(config) == "mtp":
        raise InputError(
            f"{setting} does not work with model.mtp.enable_rollout=true yet: use only one"
        )
    check_accelerator(setting)


def cpu_can_cache() -> bool:
    """Return whether vLLM's attention on this CPU reads keys and values in FP8."""
    return torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()


def check_cache_on_cpu(config: DictConfig, setting: str) -> None:
    """Raise InputError if vLLM cannot keep this model's keys and values in FP8 on this CPU.

    Args:
        setting: "key=value".
    """
    if not cpu_can_cache():
        raise InputError(
            f"{setting} needs a GPU, or a CPU with AVX-512 or AMX. This CPU has neither: leave it "
            "out"
        )
    check_head_size(config, setting)


def check_head_size(config: DictConfig, setting: str) -> None:
    """Raise InputError if vLLM has no FP8 cache on CPUs for heads of this model's size.

    Args:
        setting: "key=value".
    """
    size = head_dim(read_hf_config(config.model.path).get_text_config())
    if size % CPU_HEAD_DIM_MULTIPLE != 0:
        raise InputError(
            f"{setting}: on a CPU, the size of attention heads must be a multiple of "
            f"{CPU_HEAD_DIM_MULTIPLE}, and this model's is {size}: leave it out"
        )
