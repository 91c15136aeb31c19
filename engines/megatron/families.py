"""The models that the Megatron engine computes as transformers does, and errors for all others."""

from config import InputError
from engines.model.lengths import check_windows

# Values of model_type in config.json, by engine.bridge.
FAMILIES = ("llama", "mimo", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
FAMILIES_OF_MBRIDGE = ("llama", "qwen2", "qwen3")
# Rope types that depend on the configuration alone. The others change with a sequence's length.
ROPE_TYPES = ("default", "llama3", "linear", "yarn")
# The only supported values of keys in config.json. With the keys of experts, either every layer has
# experts or none has.
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

    bridge: engine.bridge
    """
    families = FAMILIES if bridge == "own" else FAMILIES_OF_MBRIDGE
    if hf_config.model_type not in families:
        raise InputError(
            f"model.path={path}: model_engine=megatron with engine.bridge={bridge} has no "
            f"{hf_config.model_type} models, only {', '.join(families)}. Set model_engine=fsdp."
        )
    check_rope(hf_config, path)
    check_routing(hf_config, path)
    if getattr(hf_config, "sliding_window", None) == 0:
        raise InputError(
            f"model.path={path}: sliding_window=0 in config.json leaves nothing to attend to. "
            "Write null for no window."
        )
    check_windows(hf_config, path)
    check_values(hf_config, path, bridge)


def check_rope(hf_config, path: str) -> None:
    """Raise InputError for rotary embeddings that Megatron does not have."""
    rope = hf_config.rope_parameters
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        raise InputError(
            f"model.path={path}: model_engine=megatron has no rope type {rope['rope_type']!r}, "
            f"only {', '.join(ROPE_TYPES)}. Set model_engine=fsdp."
        )
    if rope.get("partial_rotary_factor") not in (1, None):
        raise InputError(
            f"model.path={path}: partial_rotary_factor={rope['partial_rotary_factor']} in "
            "config.json is not supported by model_engine=megatron. Set model_engine=fsdp."
        )


def check_routing(hf_config, path: str) -> None:
    """Raise InputError for experts whose router could not learn."""
    has_experts = bool(getattr(hf_config, "num_experts", 0))
    normalizes_weights = getattr(hf_config, "norm_topk_prob", True)
    if has_experts and hf_config.num_experts_per_tok == 1 and normalizes_weights:
        raise InputError(
            f"model.path={path}: one expert per token (num_experts_per_tok) of weight 1 "
            "(norm_topk_prob) in config.json is not supported by model_engine=megatron: the "
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
            help = "Set model_engine=fsdp."
            engine = "model_engine=megatron"
            if name in SUPPORTED_VALUES_OF_MBRIDGE:
                engine += f" with engine.bridge={bridge}"
                help = "Set engine.bridge=own."
            raise InputError(
                f"model.path={path}: {name}={value} in config.json is not supported by {engine}. "
                f"{help}"
            )
