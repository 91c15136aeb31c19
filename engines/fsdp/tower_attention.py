"""Attention for vision towers: all patches of an image, or of a window, attend to each other.

Importing this file registers the attention implementation WINDOWS with transformers.
"""

import inspect
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from engines.fsdp.attention import reject_unsupported
from engines.parallel.varlen import KernelSegments, Scoring, attend_by_segment, attend_with_kernel

# transformers passes cu_seqlens only to attention implementations named *flash*.
WINDOWS = "windows_flash"


def windows_attention(
    module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options
) -> tuple[Tensor, None]:
    """Attend within each window: [1, heads, T, dim] -> [1, T, heads, dim].

    Args:
        options: cu_seq_lens_q ([n+1] int32, where windows begin), max_length_q and scaling. The
            text model's packing may be among the options, and is ignored.
    """
    cu_seqlens = options.pop("cu_seq_lens_q")
    max_length = options.pop("max_length_q")
    scaling = options.pop("scaling", None)
    is_causal = options.pop("is_causal", False)
    for ignored in ("cu_seq_lens_k", "max_length_k", "packing"):
        options.pop(ignored, None)
    reject_unsupported(options | {"a mask": attention_mask, "is_causal=True": is_causal or None})
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, dim]
    scoring = Scoring(scaling, is_causal=False)
    if q.is_cuda and q.dtype != torch.float32:
        segments = KernelSegments(cu_seqlens, cu_seqlens, max_length, max_length)
        attended = attend_with_kernel(q, k, v, segments, scoring)
        return attended[None], None
    segments = [(start, end, start, end) for start, end in pairwise(cu_seqlens.tolist())]
    attended = attend_by_segment(q[:, None], k[:, None], v[:, None], segments, scoring)
    return attended[None, :, 0], None


def vision_tower_configs(hf: nn.Module) -> list:
    """Return the configurations of the vision towers whose attention always takes `cu_seqlens`.

    With WINDOWS, transformers calls such a tower's attention once per layer. With other
    implementations it calls it once per window, and there are hundreds of windows.
    """
    text_modules = {*hf.get_decoder().modules()}
    configs = {}
    takes_windows = {}
    for module in hf.modules():
        if module in text_modules or not hasattr(module, "is_causal"):
            continue
        key = id(module.config)
        configs[key] = module.config
        takes_windows.setdefault(key, []).append(needs_cu_seqlens(module) and not module.is_causal)
    return [config for key, config in configs.items() if all(takes_windows[key])]


def needs_cu_seqlens(module: nn.Module) -> bool:
    """Return whether a module's forward() has a parameter `cu_seqlens` without a default."""
    parameter = inspect.signature(module.forward).parameters.get("cu_seqlens")
    return parameter is not None and parameter.default is parameter.empty


AttentionInterface.register(WINDOWS, windows_attention)
AttentionMaskInterface.register(WINDOWS, sdpa_mask)
