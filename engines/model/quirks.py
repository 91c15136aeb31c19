"""How model families differ in config.json: the keys and values that other code looks for."""

# Values of layer_types for layers that carry a state from token to token.
RECURRENT_LAYER_TYPES = {"linear_attention", "conv", "hybrid"}
# Values of layer_types for layers without attention. A hybrid layer has attention and a state.
LAYER_TYPES_WITHOUT_ATTENTION = RECURRENT_LAYER_TYPES - {"hybrid"} | {"mlp", "moe"}

# Keys whose name contains this enable attention to later tokens.
BIDIRECTIONAL = "bidirectional"

# Values of rope_type whose frequencies change with the length of the sequence.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

# Keys for the number of experts per token.
EXPERTS_PER_TOKEN_KEYS = ("num_experts_per_tok", "top_k_experts", "moe_topk")

# Keys for the number of layers for multi-token prediction.
NUM_MTP_LAYERS_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def config_json_fix(hf_config, key_part: str, new_value: str) -> str:
    """Return ": set KEY=VALUE to `new_value` in config.json", the end of an error message.

    Every key that contains `key_part` and is set is listed. Returns "" if there is none.
    """
    settings = [
        f"{key}={value}" for key, value in hf_config.to_dict().items() if key_part in key and value
    ]
    if not settings:
        return ""
    return f": set {', '.join(settings)} to {new_value} in config.json"
