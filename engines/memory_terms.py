"""Counts that both engines' memory estimates need."""

import math
from collections.abc import Callable

import torch
from omegaconf import DictConfig
from torch import nn

from engines.context_parallel import fixed_cp_size, has_dynamic_cp
from engines.model.hf import read_hf_config
from engines.model.lengths import longest_sequence
from engines.model.shape import attention_widths, head_dim
from engines.teacher_settings import distill_settings, teacher_paths, uses_teacher


def teacher_matrix_bytes(config: DictConfig) -> float | None:
    """Return the bytes of the teachers' output matrices in the compute dtype.

    None without a teacher, and with top_k, which needs no matrix while the student is trained.
    """
    if not uses_teacher(config) or distill_settings(config).top_k:
        return None
    dtype = getattr(torch, config.engine.compute_dtype)
    shapes = teacher_shapes(config)
    return sum(shape.vocab_size * shape.hidden_size * dtype.itemsize for shape in shapes)


def teacher_outputs_bytes(config: DictConfig, world_size: int) -> float | None:
    """Return the bytes of host memory for the teacher outputs that a rank keeps until the update.

    This is for a step in which all sequences have the maximum length. None without a teacher.
    """
    if not uses_teacher(config):
        return None
    top_k = distill_settings(config).top_k
    if top_k:
        bytes_per_token = top_k * 4 + (top_k + 1) * 4  # int32 ids, fp32 log-probabilities
    else:
        dtype = getattr(torch, config.engine.compute_dtype)
        widest = max(shape.hidden_size for shape in teacher_shapes(config))
        bytes_per_token = widest * dtype.itemsize
    num_sequences = config.data.train_batch_size
    if "rollout" in config:
        num_sequences *= config.rollout.n
    engine = config.engine
    ranks_per_share = (
        engine.get("tensor_model_parallel_size", 1)
        * engine.get("pipeline_model_parallel_size", 1)
        * fixed_cp_size(engine)
    )
    num_shares = max(1, world_size // ranks_per_share)
    return num_sequences * longest_sequence(config)[0] / num_shares * bytes_per_token


def teacher_shapes(config: DictConfig) -> list:
    """Return the transformers configurations of the teachers' decoders."""
    paths = teacher_paths(config).values() or [config.model.path]
    return [read_hf_config(path).get_text_config() for path in paths]


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
