"""rollout.quantization: vLLM's linear layers multiply in 8-bit floating point (FP8).

vLLM quantizes the trainer's weights itself, anew in every update, with one scale per output channel
of a weight and one per token of the activations. Embedding, output matrix and norms keep the
compute dtype.

Responses then come from a policy that differs a little from the trainer's, so
algorithm.rollout_is has to correct for it.
"""

import torch
from omegaconf import DictConfig
from torch import nn

from config import InputError
from engines.model import mtp
from engines.model.experts import expert_weights
from engines.model.float8 import MIN_CAPABILITY
from engines.model.hf import build_on_meta, layer_modules, read_hf_config

# vLLM's name for weights with one scale per output channel and activations with one per token.
VLLM_NAME = "fp8_per_channel"


def is_quantized(config: DictConfig) -> bool:
    return config.rollout.quantization != "none"


def quantization_arguments(config: DictConfig) -> dict:
    """Return the arguments of `vllm.LLM` for the quantization."""
    return {"quantization": VLLM_NAME} if is_quantized(config) else {}


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
    """Raise InputError for settings that do not work with rollout.quantization."""
    if not is_quantized(config):
        return
    setting = f"rollout.quantization={config.rollout.quantization}"
    if config.engine.compute_dtype != "bfloat16":
        raise InputError(
            f"{setting} needs engine.compute_dtype=bfloat16, not {config.engine.compute_dtype}: "
            "vLLM quantizes only weights in 16 bits"
        )
    if config.algorithm.rollout_is == "none":
        raise InputError(
            f"{setting} samples from a policy that differs from the trainer's: set "
            "algorithm.rollout_is=token (or sequence, icepop) to correct for it"
        )
    if config.model.images:
        raise InputError(f"{setting} does not work with model.images=true yet: leave out one")
    if mtp.drafter(config) == "mtp":
        raise InputError(
            f"{setting} does not work with model.mtp.enable_rollout=true yet: leave out one"
        )
    if expert_weights(build_on_meta(read_hf_config(config.model.path), torch.float32)):
        raise InputError(f"{setting} does not work with mixtures of experts yet: leave it out")
    check_accelerator(setting)


def check_accelerator(setting: str) -> None:
    """Raise InputError if the accelerator cannot multiply in FP8. A CPU can, slowly."""
    if not torch.accelerator.is_available():
        return
    if torch.accelerator.current_accelerator().type != "cuda":
        raise InputError(f"{setting} needs NVIDIA GPUs: set rollout.quantization=none")
    if torch.cuda.get_device_capability() < MIN_CAPABILITY:
        raise InputError(
            f"{setting}: {torch.cuda.get_device_name()} has no FP8 instructions; Hopper (H100) and "
            "Ada (L40S) have: set rollout.quantization=none"
        )

