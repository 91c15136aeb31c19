"""The sizes of a model's layers, according to config.json."""


def layer_configs(hf_config) -> list:
    """Return one configuration per layer if layers differ, else a list with the shared one.

    If layers differ, transformers raises an error when a size is read from the whole configuration.
    """
    if hf_config.is_heterogeneous:
        return hf_config.per_layer_config
    return [hf_config]


def head_dim(hf_config) -> int:
    """Return the size of an attention head; if layers differ, the largest."""
    if hf_config.is_heterogeneous:
        return max(map(head_dim, layer_configs(hf_config)))
    configured = getattr(hf_config, "head_dim", None)
    return configured or hf_config.hidden_size // hf_config.num_attention_heads


def num_key_value_heads(hf_config) -> int:
    """Return the number of key-value heads of one layer's configuration."""
    configured = getattr(hf_config, "num_key_value_heads", None)
    return configured or hf_config.num_attention_heads


def attention_widths(hf_config) -> tuple[int, int]:
    """Return num_heads * head_dim for queries and for keys: the maximum over all layers."""
    layers = layer_configs(hf_config)
    query_width = max(layer.num_attention_heads * head_dim(layer) for layer in layers)
    key_width = max(num_key_value_heads(layer) * head_dim(layer) for layer in layers)
    return query_width, key_width


def stage_sizes(num_layers: int, num_stages: int) -> list[int]:
    """Return the number of layers in each pipeline stage.

    If the layers do not divide evenly, the first stages have one more.
    """
    minimum, remainder = divmod(num_layers, num_stages)
    return [minimum + (stage < remainder) for stage in range(num_stages)]
