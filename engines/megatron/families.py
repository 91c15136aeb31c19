"""The model families that the Megatron engine supports, and errors for all other models.

For a supported model, this engine computes the same results as transformers.
"""

from config import InputError
from engines.model.lengths import check_windows

# Values of model_type in config.json, by engine.bridge.
FAMILIES = ("llama", "mimo", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
FAMILIES_OF_MBRIDGE = ("llama", "qwen2", "qwen3")
# Rope types whose frequencies are fixed by config.json. Others depend on the sequence length.
ROPE_TYPES = ("default", "llama3", "linear", "yarn")
# Key in config.json -> its only supported value. With the last two values, every layer of a mixture
# of experts has experts.
SUPPORTED_VALUES = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
SUPPORTED_VALUES_OF_MBRIDGE = {"mlp_bias": False, "attention_bias": False}


def check_family(hf_config, path: str, bridge: str) -> None:
    """Raise InputError for a model that Megatron would compute differently from transformers.

    Args:
        bridge: the value of engine.bridge.
    """
    families = FAMILIES if bridge == "own" else FAMILIES_OF_MBRIDGE
    if hf_config.model_type not in families:
        raise InputError(
            f"model.path={path}: model_engine=megatron with engine.bridge={bridge} does not "
            f"support {hf_config.model_type} models, only {', '.join(families)}. Set "
            "model_engine=fsdp."
        )
    check_rope(hf_config, path)
    check_routing(hf_config, path)
    if getattr(hf_config, "sliding_window", None) == 0:
        raise InputError(
            f"model.path={path}: sliding_window=0 in config.json leaves nothing to attend to. "
            "Set it to null if the model has no window."
        )
    check_windows(hf_config, path)
    check_values(hf_config, path, bridge)


def check_rope(hf_config, path: str) -> None:
    """Raise InputError for rotary embeddings that Megatron does not support."""
    rope = hf_config.rope_parameters
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        raise InputError(
            f"model.path={path}: model_engine=megatron does not support rope type "
            f"{rope['rope_type']!r}, only {', '.join(ROPE_TYPES)}. Set model_engine=fsdp."
        )
    if rope.get("partial_rotary_factor") not in (1, None):
        raise InputError(
            f"model.path={path}: partial_rotary_factor={rope['partial_rotary_factor']} in "
            "config.json is not supported by model_engine=megatron. Set model_engine=fsdp."
        )


def check_routing(hf_config, path: str) -> None:
    """Raise InputError for a mixture of experts whose routers would get no gradient."""
    has_experts = bool(getattr(hf_config, "num_experts", 0))
    normalizes_weights = getattr(hf_config, "norm_topk_prob", True)
    if has_experts and hf_config.num_experts_per_tok == 1 and normalizes_weights:
        raise InputError(
            f"model.path={path}: num_experts_per_tok=1 with norm_topk_prob=true in config.json is "
            "not supported by model_engine=megatron: the only expert always has weight 1, so the "
            "router would get no gradient. Set model_engine=fsdp."
        )


def check_values(hf_config, path: str, bridge: str) -> None:
    """Raise InputError for values in config.json that Megatron's modules ignore."""
    supported_values = dict(SUPPORTED_VALUES)
    if bridge != "own":
        supported_values |= SUPPORTED_VALUES_OF_MBRIDGE
    for name, supported in supported_values.items():
        value = getattr(hf_config, name, None)
        if value not in (supported, None):
            fix = "Set model_engine=fsdp."
            engine = "model_engine=megatron"
            if name in SUPPORTED_VALUES_OF_MBRIDGE:
                engine += f" with engine.bridge={bridge}"
                fix = "Set engine.bridge=own."
            raise InputError(
                f"model.path={path}: {name}={value} in config.json is not supported by {engine}. "
                f"{fix}"
            )
