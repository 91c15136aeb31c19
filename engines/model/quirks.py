"""How families of models differ in config.json: the keys and values that other code looks for."""

# Values of layer_types with a state that is carried from token to token.
RECURRENT_LAYER_TYPES = {"linear_attention", "conv", "hybrid"}
# Values of layer_types without attention. A hybrid layer has both attention and a state.
LAYER_TYPES_WITHOUT_ATTENTION = RECURRENT_LAYER_TYPES - {"hybrid"} | {"mlp", "moe"}

# Part of the names of keys for attention that also sees later tokens.
BIDIRECTIONAL = "bidirectional"

# Values of rope_type whose frequencies change with the length of the sequence.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

# Keys for the number of experts that a token goes to.
EXPERTS_PER_TOKEN_KEYS = ("num_experts_per_tok", "top_k_experts", "moe_topk")

# Keys for the number of layers for multi-token prediction.
NUM_MTP_LAYERS_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def config_json_fix(hf_config, key_part: str, harmless: str) -> str:
    """Return ": set KEY=VALUE to `harmless` in config.json", to end an error message with.

    Names every key that contains `key_part` and is set; returns "" if there is none.
    """
    settings = [
        f"{key}={value}" for key, value in hf_config.to_dict().items() if key_part in key and value
    ]
    if not settings:
        return ""
    return f": set {', '.join(settings)} to {harmless} in config.json"
