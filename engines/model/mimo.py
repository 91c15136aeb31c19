"""MiMo (2025), which transformers lacks: Qwen2 with layers for multi-token prediction (MTP).

Importing this module registers it with transformers' Auto classes.
"""

from pathlib import Path

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm


class MiMoConfig(Qwen2Config):
    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """The model without its MTP layers: transformers omits MTP layers from all models."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = [r"^model\.mtp_layers\."]


class MiMoLayer(Qwen2DecoderLayer):
    """Holds an MTP layer's weights, named as in the files (model.mtp_layers.*); never computes."""

    def __init__(self, hf_config):
        super().__init__(hf_config, 0)
        size = hf_config.hidden_size
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            self.add_module(name, Qwen2RMSNorm(size, hf_config.rms_norm_eps))
        self.input_proj = nn.Linear(2 * size, size, bias=False)


AutoConfig.register("mimo", MiMoConfig)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)

CONFIGURATION = '''"""For transformers, which has no class for this model's config.json."""

from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
'''


def write_config_class(hf_config, directory: Path) -> None:
    """Write configuration_mimo.py into an exported model, and refer to it in hf_config.

    Call this before config.json is written. Other programs can then read config.json with
    trust_remote_code=True. Does nothing for other models, or if the model has its own class.
    """
    if hf_config.model_type == "mimo" and not getattr(hf_config, "auto_map", None):
        hf_config.auto_map = {"AutoConfig": "configuration_mimo.MiMoConfig"}
        (directory / "configuration_mimo.py").write_text(CONFIGURATION)
