"""The sizes of a model's layers, according to config.json."""


def layer_configs(hf_config) -> list:
    """Return the configuration of each layer if layers differ; otherwise the one for all of them.

    Where layers differ, transformers raises if a size is read from the whole configuration.
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
    """Return heads * head_dim of queries, and of keys, each in the layer where it is largest."""
    layers = layer_configs(hf_config)
    query_width = max(layer.num_attention_heads * head_dim(layer) for layer in layers)
    key_width = max(num_key_value_heads(layer) * head_dim(layer) for layer in layers)
    return query_width, key_width


def stages_of_layers(num_layers: int, num_stages: int) -> list[int]:
    """Return the number of layers of each pipeline stage. The first ones may have one more."""
    smallest, remainder = divmod(num_layers, num_stages)
    return [smallest + (stage < remainder) for stage in range(num_stages)]
