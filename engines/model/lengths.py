"""Checks of rotary embeddings and sliding windows, which depend on the sequence length."""

from collections.abc import Iterator

from omegaconf import DictConfig
from torch import nn

from config import InputError
from engines.model.quirks import LENGTH_DEPENDENT_ROPE


def longest_sequence(config: DictConfig) -> tuple[int, str]:
    """Return the maximum sequence length of this run, and the keys that set it."""
    if "rollout" in config:
        if config.rollout.max_episode_tokens:
            return config.rollout.max_episode_tokens, "rollout.max_episode_tokens"
        longest = config.data.max_prompt_length + config.rollout.max_tokens
        return longest, "data.max_prompt_length + rollout.max_tokens"
    return config.data.max_length, "data.max_length"


def check_rope(hf_config, config: DictConfig) -> None:
    """Reject rotary frequencies that change within the lengths of this run.

    The longest sequence of a batch determines the frequencies, so shorter sequences packed with it
    would be rotated differently than on their own.

    Raises:
        InputError: if the run's longest sequence exceeds the length at which frequencies change.
    """
    longest, key = longest_sequence(config)
    for rope_type, limit in frequency_limits(hf_config):
        if longest > limit:
            raise InputError(
                f"model.path={config.model.path}: rope_type={rope_type} in "
                f"config.json changes the frequencies beyond {limit} tokens: lower {key}={longest}"
            )


def frequency_limits(hf_config) -> Iterator[tuple[str, int]]:
    """Yield (rope_type, length in tokens beyond which its frequencies change), if they do."""
    rope = getattr(hf_config, "rope_parameters", None) or {}
    # Some models have separate parameters for each type of layer.
    per_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in (rope, *per_layer_type):
        rope_type = parameters.get("rope_type")
        if rope_type in LENGTH_DEPENDENT_ROPE:
            original_length = parameters.get("original_max_position_embeddings")
            yield rope_type, original_length or hf_config.max_position_embeddings


def keep_short_frequencies(hf: nn.Module) -> None:
    """Make rotary embeddings always use the frequencies for short sequences.

    check_rope() has ruled out longer sequences. Without this function, modules would search every
    batch for them.
    """
    for module in hf.modules():
        rope_type = vars(module).get("rope_type")
        if isinstance(rope_type, dict):
            module.rope_type = {
                layer_type: fixed_rope_type(name) for layer_type, name in rope_type.items()
            }
        elif rope_type in LENGTH_DEPENDENT_ROPE:
            module.rope_type = "default"


def fixed_rope_type(rope_type: str) -> str:
    """Return "default" for a rope_type whose frequencies depend on the length, else rope_type."""
    return "default" if rope_type in LENGTH_DEPENDENT_ROPE else rope_type


def check_windows(hf_config, path: str) -> None:
    """Raise InputError if layers use a sliding window and config.json has no window length."""
    if hf_config.is_heterogeneous or getattr(hf_config, "sliding_window", None):
        return
    if "sliding_attention" in (getattr(hf_config, "layer_types", None) or ()):
        raise InputError(
            f"model.path={path}: layer_types in config.json has sliding_attention, but there is no "
            "window: give sliding_window (and use_sliding_window, if the model has that key), or "
            "make them full_attention"
        )
