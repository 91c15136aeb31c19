"""Counts that both engines' memory estimates need."""

import math
from collections.abc import Callable

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from engines.context_parallel import fixed_cp_size, has_dynamic_cp
from engines.model.hf import read_hf_config
from engines.model.lengths import longest_sequence
from engines.model.shape import attention_widths, head_dim


def teacher_matrix_bytes(config: DictConfig) -> float | None:
    """Return the bytes of the teacher's output matrix in the compute dtype.

    None without a teacher, and with top_k, which needs no matrix while the student is trained.
    """
    distill = OmegaConf.select(config, "algorithm.distill")
    if distill is None or distill.teacher is None or distill.top_k:
        return None
    shape = read_hf_config(distill.teacher).get_text_config()
    dtype = getattr(torch, config.engine.compute_dtype)
    return shape.vocab_size * shape.hidden_size * dtype.itemsize


def keys_per_token(
    config: DictConfig, shape, num_ranks: int, gathers_keys: Callable[[int], bool]
) -> float:
    """Return how many tokens' keys and values a rank keeps for each of its own tokens.

    In a group that gathers keys, each rank keeps the keys of all ranks. The first keys of a
    sequence are kept twice, for both of the rank's chunks, which adds half a token per own token.
    In other groups, the number exceeds 1 only if key heads are repeated.

    Args:
        config: the run's configuration.
        shape: the model's configuration.
        num_ranks: number of data-parallel ranks, which may form groups.
        gathers_keys: group size -> whether groups of this size gather keys and values.
    """
    size = fixed_cp_size(config.engine)
    if has_dynamic_cp(config.engine):
        # Assume a group as large as the longest sequence needs.
        num_tokens = longest_sequence(config)[0]
        needed = math.ceil(num_tokens / config.data.max_tokens_per_micro_batch)
        size = 1 << min((needed - 1).bit_length(), num_ranks.bit_length() - 1)
    if size > 1 and gathers_keys(size):
        return size + 0.5
    return max(1, size * head_dim(shape) / attention_widths(shape)[1])


def root_and_layer(parameters: list[nn.Parameter], layers: list[nn.Module]) -> tuple[int, int]:
    """Count the elements of parameters outside all decoder layers, and in the largest layer.

    parameters: the parameters to count; the layers may have others.
    """
    counted = {id(parameter) for parameter in parameters}
    sizes = []
    for layer in layers:
        sizes.append(sum(p.numel() for p in layer.parameters() if id(p) in counted))
    total = sum(parameter.numel() for parameter in parameters)
    return total - sum(sizes), max(sizes, default=0)
