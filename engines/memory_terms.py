"""Counts that the estimates of both engines need."""

import math
from collections.abc import Callable

from omegaconf import DictConfig
from torch import nn

from engines.context_parallel import fixed_cp_size, has_dynamic_cp
from engines.model.lengths import longest_sequence
from engines.model.shape import attention_widths, head_dim


def keys_per_token(
    config: DictConfig, shape, num_ranks: int, gathers_keys: Callable[[int], bool]
) -> float:
    """Return how many tokens' keys and values a rank keeps for each of its own tokens.

    A group that gathers keys keeps those of all its ranks, and half a token's more, since both of a
    rank's chunks keep the first ones. Other groups keep more than one where heads are repeated.

    Args:
        config: the engine's configuration.
        shape: the model's configuration.
        num_ranks: data-parallel ranks, that may form groups.
        gathers_keys: group size -> whether groups of this size gather keys and values.
    """
    size = fixed_cp_size(config.engine)
    if has_dynamic_cp(config.engine):
        # A group as large as the longest sequence needs.
        num_tokens = longest_sequence(config)[0]
        needed = math.ceil(num_tokens / config.data.max_tokens_per_micro_batch)
        size = 1 << min((needed - 1).bit_length(), num_ranks.bit_length() - 1)
    if size > 1 and gathers_keys(size):
        return size + 0.5
    return max(1, size * head_dim(shape) / attention_widths(shape)[1])


def root_and_layer(parameters: list[nn.Parameter], layers: list[nn.Module]) -> tuple[int, int]:
    """Return how many of these numbers are in no decoder layer, and in the largest layer."""
    counted = {id(parameter) for parameter in parameters}
    sizes = []
    for layer in layers:
        sizes.append(sum(p.numel() for p in layer.parameters() if id(p) in counted))
    total = sum(parameter.numel() for parameter in parameters)
    return total - sum(sizes), max(sizes, default=0)
