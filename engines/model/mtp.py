"""Multi-token prediction (MTP): extra layers after the last one, each predicting one token further.

See DeepSeek-V3 (2024) and MiMo (2025). The layers can be trained (model.mtp.enable_train), and can
draft tokens in vLLM (model.mtp.enable_rollout).
"""

from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import nn

from config import InputError, defaults
from engines.model.mimo import MiMoLayer
from engines.model.model_files import is_only_described, shapes_in_files
from engines.model.quirks import NUM_MTP_LAYERS_KEYS

# model_type -> the class of MTP layers that model_engine=megatron can train.
LAYERS = {"mimo": MiMoLayer}

# Key of model.mtp -> the other key that must be true for it to have an effect.
REQUIRED_KEYS = {
    "enable_train": "enable",
    "enable_rollout": "enable",
    "detach_encoder": "enable_train",
    "mtp_loss_scaling_factor": "enable_train",
}


def num_layers(hf_config) -> int:
    """Return the number of a model's MTP layers."""
    configs = (hf_config, hf_config.get_text_config())
    return max(getattr(config, key, None) or 0 for config in configs for key in NUM_MTP_LAYERS_KEYS)


def layers(hf_config) -> nn.ModuleList:
    """Build the MTP layers of a model on the meta device."""
    layer_class = LAYERS[hf_config.model_type]
    with torch.device("meta"):
        return nn.ModuleList(layer_class(hf_config) for _ in range(num_layers(hf_config)))


def is_trained(config: DictConfig) -> bool:
    return config.model.mtp.enable and config.model.mtp.enable_train


def drafter(config: DictConfig) -> str | None:
    """Return the method that drafts tokens in vLLM: "mtp", "ngram", "suffix", or None."""
    return "mtp" if config.model.mtp.enable_rollout else config.rollout.speculative


def num_drafted(config: DictConfig) -> int:
    """Return the maximum number of tokens that are drafted at once; 0 without a drafter."""
    method = drafter(config)
    if method is None:
        return 0
    if method == "mtp":
        return config.model.mtp.num_speculative_tokens
    return config.rollout.num_speculative_tokens


def check_config(config: DictConfig, hf_config) -> None:
    """Raise InputError for settings of model.mtp that have no effect or cannot work."""
    check_required_keys(config.model.mtp)
    if config.model.mtp.enable:
        check_has_layers(hf_config, config.model.path)
        if not is_only_described(config):
            check_has_weights(hf_config, config.model.path)
    if is_trained(config):
        check_trainable(config, hf_config)


def check_required_keys(mtp: DictConfig) -> None:
    """Raise InputError for a key that has no effect because another key is false."""
    default = defaults("model.mtp")
    for key, required in REQUIRED_KEYS.items():
        is_set = mtp.get(key, default[key]) != default[key]
        if is_set and not mtp[required]:
            raise InputError(
                f"model.mtp.{key}={mtp[key]} does nothing with model.mtp.{required}=false: set "
                f"model.mtp.{required}=true"
            )


def check_has_layers(hf_config, path: str) -> None:
    """Raise InputError if the model has no MTP layers."""
    number = num_layers(hf_config)
    if not number:
        settings = [f"{key}={getattr(hf_config, key, None)}" for key in NUM_MTP_LAYERS_KEYS]
        raise InputError(
            f"model.mtp.enable=true, but model.path={path} has no MTP layers: its config.json has "
            f"{' and '.join(settings)}"
        )


def check_has_weights(hf_config, path: str) -> None:
    """Raise InputError if the files lack weights of the MTP layers.

    The weights are checked only for the model types in LAYERS, whose weight names we know.
    """
    if hf_config.model_type not in LAYERS:
        return
    number = num_layers(hf_config)
    expected = {f"model.mtp_layers.{name}" for name in layers(hf_config).state_dict()}
    missing = sorted(expected - shapes_in_files(Path(path)).keys())
    if missing:
        raise InputError(
            f"model.mtp.enable=true, but the files of model.path={path} lack {len(missing)} of the "
            f"{len(expected)} weights of its {number} MTP layers, such as {missing[0]}"
        )


def check_trainable(config: DictConfig, hf_config) -> None:
    """Raise InputError for MTP layers that cannot be trained."""
    model_type = hf_config.model_type
    if config.model_engine != "megatron":
        raise InputError(
            "model.mtp.enable_train=true needs model_engine=megatron: transformers has no MTP "
            f"layers for model_type={model_type}"
        )
    if model_type not in LAYERS:
        raise InputError(
            "model.mtp.enable_train=true: model_engine=megatron has no MTP layers for "
            f"model_type={model_type}, only for {', '.join(LAYERS)}"
        )
    if getattr(hf_config, "sliding_window", None):
        raise InputError(
            f"model.mtp.enable_train=true: sliding_window={hf_config.sliding_window} in "
            "config.json is not supported, since it is not clear whether MTP layers have the window"
        )
    rank = config.model.lora.rank
    if rank:
        raise InputError(
            "model.mtp.enable_train=true trains whole layers, but with model.lora.rank="
            f"{rank} only adapters are trained: set model.mtp.enable_train=false, or "
            "model.lora.rank=0"
        )
