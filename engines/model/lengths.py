"""Checks of what depends on a sequence's length: rotary embeddings and sliding windows."""

from omegaconf import DictConfig
from torch import nn

from config import InputError
from engines.model.quirks import LENGTH_DEPENDENT_ROPE


def longest_sequence(config: DictConfig) -> tuple[int, str]:
    """Return the most tokens that a sequence of this run may have, and the keys that set it."""
    if "rollout" in config:
        longest = config.data.max_prompt_length + config.rollout.max_tokens
        return longest, "data.max_prompt_length + rollout.max_tokens"
    return config.data.max_length, "data.max_length"


def check_rope(hf_config, config: DictConfig) -> None:
    """Reject rotary frequencies that change within the lengths of this run.

    The longest sequence of a batch sets the frequencies, so shorter ones packed with it would be
    rotated differently than by themselves.

    Raises:
        InputError: if the run's longest sequence exceeds the length at which frequencies change.
    """
    longest, key = longest_sequence(config)
    rope = getattr(hf_config, "rope_parameters", None) or {}
    # Some models have parameters for each type of layer.
    of_layer_types = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in (rope, *of_layer_types):
        if parameters.get("rope_type") not in LENGTH_DEPENDENT_ROPE:
            continue
        limit = (
            parameters.get("original_max_position_embeddings") or hf_config.max_position_embeddings
        )
        if longest > limit:
            raise InputError(
                f"model.path={config.model.path}: rope_type={parameters['rope_type']} in "
                f"config.json has other frequencies beyond {limit} tokens: lower {key}={longest}"
            )


def keep_short_frequencies(hf: nn.Module) -> None:
    """Fix the frequencies of rotary embeddings to those of short sequences.

    check_rope() has excluded longer ones; without this, modules would look at every batch for them.
    """
    for module in hf.modules():
        rope_type = vars(module).get("rope_type")
        if isinstance(rope_type, dict):
            module.rope_type = {
                layer_type: without_length(name) for layer_type, name in rope_type.items()
            }
        elif rope_type in LENGTH_DEPENDENT_ROPE:
            module.rope_type = "default"


def without_length(rope_type: str) -> str:
    """Return the rope_type for frequencies that do not depend on a length."""
    return "default" if rope_type in LENGTH_DEPENDENT_ROPE else rope_type


def check_windows(hf_config, path: str) -> None:
    """Raise InputError for layers with a sliding window whose length config.json does not tell."""
    if hf_config.is_heterogeneous or getattr(hf_config, "sliding_window", None):
        return
    if "sliding_attention" in (getattr(hf_config, "layer_types", None) or ()):
        raise InputError(
            f"model.path={path}: layer_types in config.json has sliding_attention, but there is no "
            "window: give sliding_window (and use_sliding_window, if the model has that key), or "
            "make them full_attention"
        )
