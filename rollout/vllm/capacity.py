"""Estimate vLLM's memory on one rank, and how many responses a replica can decode at once."""

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from omegaconf import DictConfig

from engines.memory import GIB
from engines.model import mtp
from engines.model.hf import build_on_meta, read_hf_config
from engines.model.lengths import longest_sequence
from engines.model.shape import attention_widths, head_dim
from engines.planning import round_up
from rollout.vllm.quantization import has_fp8_cache, is_quantized, quantized_parameters

CPU_KV_CACHE_GIB = 1.0
MAX_NUM_SEQS = 1024
# The memory that a sleeping vLLM (CUDA graphs, buffers), CUDA itself and the allocators keep on a
# device: tests/repository/test_measured_memory.py compares it with measurements.
ASLEEP_BYTES = 6 * GIB
LOGIT_COPIES = 3  # the fp32 copies of each response's logits that exist during sampling


@dataclass(frozen=True)
class AwakeMemory:
    """The memory of one rank's vLLM while it is awake, in bytes.

    Attributes:
        total: what vLLM may use. Without rollout.kv_cache_gib, its part of the device.
        weights: the model's weights, which the trainer may share.
        longest_sequence: the KV cache of the longest prompt and response.
        setting: the key and value that determine the total.
    """

    total: float
    weights: float
    longest_sequence: float
    setting: str

    @classmethod
    def of(cls, config: DictConfig, device_bytes: int) -> "AwakeMemory":
        """Return the memory on a device of this many bytes."""
        rollout = config.rollout
        weights = weight_bytes(config)
        shape = read_hf_config(config.model.path).get_text_config()
        longest, _ = longest_sequence(config)
        total = rollout.gpu_memory_utilization * device_bytes
        setting = f"rollout.gpu_memory_utilization={rollout.gpu_memory_utilization:g}"
        if rollout.kv_cache_gib:
            total = weights + rollout.kv_cache_gib * GIB
            setting = f"rollout.kv_cache_gib={rollout.kv_cache_gib:g}"
        return cls(total, weights, kv_bytes_per_token(config, shape) * longest, setting)

    def describe(self) -> str:
        return (
            f"{self.total / GIB:.1f} GiB ({self.setting}), of which the weights take "
            f"{self.weights / GIB:.1f}"
        )

    @property
    def problem(self) -> str | None:
        """The reason why vLLM cannot generate even one of the longest responses, or None."""
        needed = self.weights + self.longest_sequence
        if needed <= self.total:
            return None
        return (
            f"vLLM may use {self.total / GIB:.1f} GiB of each device ({self.setting}), but the "
            f"model's weights take {self.weights / GIB:.1f} GiB there, and the KV cache of one "
            f"response of the greatest length takes {self.longest_sequence / GIB:.1f}: raise "
            f"{self.setting.partition('=')[0]} or rollout.tensor_parallel_size"
        )


def max_num_seqs(config: DictConfig, world_size: int, device_bytes: int) -> int:
    """Return rollout.max_num_seqs or, if it is null, the number of sequences that fit in memory.

    The result is at most MAX_NUM_SEQS, and at most the number of responses that a replica generates
    in one draw. The estimate for each sequence is the KV cache of the longest prompt and of half of
    what may follow it (rollout.max_tokens; of an episode, the rest of rollout.max_episode_tokens),
    plus the logits unless rollout.kv_cache_gib is set. If sequences need more, vLLM preempts some
    of them.

    Args:
        device_bytes: The device's memory; 0 for a CPU.
    """
    rollout = config.rollout
    if rollout.max_num_seqs is not None:
        return rollout.max_num_seqs
    tp = rollout.tensor_parallel_size
    shape = read_hf_config(config.model.path).get_text_config()
    longest, _ = longest_sequence(config)
    mean_length = (config.data.max_prompt_length + longest) / 2
    bytes_per_sequence = kv_bytes_per_token(config, shape) * mean_length
    if rollout.kv_cache_gib or not device_bytes:
        available_bytes = (rollout.kv_cache_gib or CPU_KV_CACHE_GIB) * GIB
    else:
        available_bytes = rollout.gpu_memory_utilization * device_bytes - weight_bytes(config)
        bytes_per_sequence += LOGIT_COPIES * (1 + mtp.num_drafted(config)) * shape.vocab_size * 4
    num_prompts = round_up(config.data.train_batch_size * tp, world_size) // world_size
    if rollout.partial.enable:
        num_prompts = math.ceil(num_prompts * rollout.partial.oversample)
    num_drawn = num_prompts * rollout.n
    return max(1, min(num_drawn, int(available_bytes / bytes_per_sequence), MAX_NUM_SEQS))


def kv_bytes_per_token(config: DictConfig, shape) -> int:
    """Return the bytes of a token's keys and values on one rank, which has at least one KV head."""
    dim = head_dim(shape)
    key_width = attention_widths(shape)[1]
    width_on_rank = max(dim, key_width // dim // config.rollout.tensor_parallel_size * dim)
    itemsize = 1 if has_fp8_cache(config) else getattr(torch, config.engine.compute_dtype).itemsize
    return 2 * shape.num_hidden_layers * width_on_rank * itemsize


def weight_bytes(config: DictConfig) -> float:
    """Return the bytes of the model's weights on each rank of a replica."""
    path = Path(config.model.path)
    version = (path / "config.json").stat().st_mtime_ns
    counts = count_parameters(str(path), config.model.images, version)
    num_in_8_bits = counts.in_linear_layers if is_quantized(config) else 0
    itemsize = getattr(torch, config.engine.compute_dtype).itemsize
    num_bytes = num_in_8_bits + (counts.total - num_in_8_bits) * itemsize
    return num_bytes / config.rollout.tensor_parallel_size


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters of a model."""

    total: int
    in_linear_layers: int


@lru_cache
def count_parameters(path: str, images: bool, version: int) -> Counts:
    """Count the parameters of a model.

    Args:
        version: when config.json was written, so that the cache notices a change.
    """
    model = build_on_meta(read_hf_config(path), torch.float32, images=images)
    total = sum(parameter.numel() for parameter in model.parameters())
    return Counts(total, quantized_parameters(model))
