"""Multi-token prediction (MTP): layers behind the last one that predict one token more each (DeepSeek-V3, 2024; MiMo, 2025).

transformers has no class for MiMo. It is a Qwen2 with such layers, whose weights are called model.mtp_layers.* in its files.
"""

from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

from config import InputError, defaults
from engines.model.weights import shapes_in_files

FIELDS = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
)  # of config.json: the number of MTP layers
# Keys of model.mtp that do nothing without another.
NEEDS = {
    "enable_train": "enable",
    "enable_rollout": "enable",
    "detach_encoder": "enable_train",
    "mtp_loss_scaling_factor": "enable_train",
}


class MiMoConfig(Qwen2Config):
    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Without its MTP layers, which transformers leaves out of every model."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = [r"^model\.mtp_layers\."]


class MiMoLayer(Qwen2DecoderLayer):
    """The weights of an MTP layer, under their names in the files; it computes nothing."""

    def __init__(self, hf_config):
        super().__init__(hf_config, 0)
        size = hf_config.hidden_size
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            self.add_module(name, Qwen2RMSNorm(size, hf_config.rms_norm_eps))
        self.input_proj = nn.Linear(2 * size, size, bias=False)


AutoConfig.register("mimo", MiMoConfig)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)
LAYERS = {"mimo": MiMoLayer}  # by model_type: those that model_engine=megatron can train
CONFIGURATION = '''"""For transformers, which has no class for this model's config.json."""

from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
'''


def num_layers(hf_config) -> int:
    """How many MTP layers a model has."""
    shapes = (hf_config, hf_config.get_text_config())
    return max(getattr(shape, field, None) or 0 for shape in shapes for field in FIELDS)


def write_class(hf_config, directory: Path) -> None:
    """Put the class of a configuration that transformers does not know beside its config.json, which is written after that. With
    trust_remote_code=True others can read it then."""
    if hf_config.model_type in LAYERS and not getattr(hf_config, "auto_map", None):
        hf_config.auto_map = {"AutoConfig": "configuration_mimo.MiMoConfig"}
        (directory / "configuration_mimo.py").write_text(CONFIGURATION)


def is_trained(config: DictConfig) -> bool:
    return config.model.mtp.enable and config.model.mtp.enable_train


def drafter(config: DictConfig) -> str | None:
    """Who drafts tokens in vLLM: mtp, ngram, suffix, or None."""
    return "mtp" if config.model.mtp.enable_rollout else config.rollout.speculative


def num_drafted(config: DictConfig) -> int:
    """The most tokens that are drafted at once; 0 without a drafter."""
    return {"mtp": config.model.mtp.num_speculative_tokens, None: 0}.get(
        drafter(config), config.rollout.num_speculative_tokens
    )


def layers(hf_config) -> nn.ModuleList:
    """The MTP layers of a model, on the meta device."""
    with torch.device("meta"):
        return nn.ModuleList(
            LAYERS[hf_config.model_type](hf_config) for _ in range(num_layers(hf_config))
        )


def check(config: DictConfig, hf_config) -> None:
    """Raise InputError for MTP layers that are asked for, and cannot be trained or used."""
    mtp, path, default = config.model.mtp, config.model.path, defaults("model.mtp")
    for key, needs in NEEDS.items():
        if mtp.get(key, default[key]) != default[key] and not mtp[needs]:
            raise InputError(
                f"model.mtp.{key}={mtp[key]} does nothing with model.mtp.{needs}=false: set model.mtp.{needs}=true"
            )
    if mtp.enable and not num_layers(hf_config):
        said = " and ".join(f"{field}={getattr(hf_config, field, None)}" for field in FIELDS)
        raise InputError(
            f"model.mtp.enable=true, but model.path={path} has no MTP layers: its config.json says {said}"
        )
    if mtp.enable and hf_config.model_type in LAYERS:
        wanted = {f"model.mtp_layers.{name}" for name in layers(hf_config).state_dict()}
        if lost := sorted(wanted - shapes_in_files(Path(path)).keys()):
            raise InputError(
                f"model.mtp.enable=true, but the files of model.path={path} lack {len(lost)} of the {len(wanted)} "
                f"weights of its {num_layers(hf_config)} MTP layers, such as {lost[0]}"
            )
    if not is_trained(config):
        return
    if config.model_engine != "megatron":
        raise InputError(
            f"model.mtp.enable_train=true needs model_engine=megatron: transformers has no MTP layers for "
            f"model_type={hf_config.model_type}"
        )
    if hf_config.model_type not in LAYERS:
        raise InputError(
            f"model.mtp.enable_train=true: model_engine=megatron has no MTP layers for model_type="
            f"{hf_config.model_type}, only for {', '.join(LAYERS)}"
        )
    if getattr(hf_config, "sliding_window", None):
        raise InputError(
            f"model.mtp.enable_train=true: sliding_window={hf_config.sliding_window} in config.json is not "
            "supported: it does not say whether MTP layers have it"
        )
    if config.model.lora.rank:
        raise InputError(
            f"model.mtp.enable_train=true trains whole layers, model.lora.rank={config.model.lora.rank} adapters "
            "alone: set model.mtp.enable_train=false, or model.lora.rank=0"
        )
