"""Causal attention for Hugging Face models: packed, padded, and shared between ranks.

Ranks share sequences by heads (Ulysses) or, where heads cannot be divided, by tokens (zigzag: each
rank gathers the keys and values of the others).

Importing this file registers the attention implementations "packed" and "padded" with transformers.
The layout of packed sequences (where they begin, which ranks share them) reaches the first as the
model's keyword argument `packing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from config import InputError
from engines.context_parallel import shares_sequences
from engines.model.shape import layer_configs
from engines.parallel.collectives import AllToAll
from engines.parallel.device import to_device
from engines.parallel.varlen import (
    KernelSegments,
    Scoring,
    Zigzag,
    by_kernel,
    by_segment,
    explicit_attention,
    needs_all_scores,
)

# Arguments that models pass to their attention and that do not change its result.
HARMLESS = {"position_ids", "use_cache", "cache_position", "output_attentions", "is_causal"}
NEEDS_WINDOW_MASK = "only a mask limits its attention to a window"
NOT_CAUSAL = "is_causal=False"


@dataclass
class Packing:
    """Where the sequences of one packed micro-batch lie.

    cu_seqlens  [n+1] int32 on the model's device, over all T tokens (padding at the end is a
                sequence of its own)
    bounds      the same numbers as a list
    max_length  length of the longest sequence in tokens, or more
    group       ranks among which the T tokens are divided (Ulysses); None: this rank has them all
    zigzag      how ranks divide each sequence and gather its keys and values instead; also used for
                padded rows with one sequence each
    """

    cu_seqlens: Tensor
    bounds: list[int]
    max_length: int
    group: dist.ProcessGroup | None = None
    zigzag: Zigzag | None = None

    @staticmethod
    def of(
        lengths: list[int], group: dist.ProcessGroup, device: torch.device, zigzag: bool
    ) -> Packing:
        bounds = [0, *accumulate(lengths)]
        # A power of two, so that compiled code sees few different values.
        max_length = 1 << (max(lengths) - 1).bit_length()
        return Packing(
            to_device(torch.tensor(bounds, dtype=torch.int32), device),
            bounds,
            max_length,
            group if group.size() > 1 and not zigzag else None,
            Zigzag(bounds, group, device) if zigzag else None,
        )

    def arguments(self) -> dict:
        """Return the model's keyword arguments.

        Nothing reads the four-dimensional mask. It keeps transformers from building one of its own,
        which would block until the device is idle.
        """
        unread_mask = torch.empty(1, 1, 1, 1, device=self.cu_seqlens.device)
        return {"packing": self, "attention_mask": unread_mask}


# -- packed sequences ------------------------------------------------------------------------------


def packed_attention(
    module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options
) -> tuple[Tensor, None]:
    """Attend causally within each sequence; the signature is transformers' attention interface.

    query: [1, heads, T', dim]; key and value: [1, kv_heads, T', dim], where T' are this rank's
    tokens. With zigzag, rows of T' tokens each.
    options: packing, scaling, sliding_window, softcap and s_aux (sinks [heads]). Soft caps and
    sinks take memory for all scores of a sequence.
    Returns [1, T', heads, dim].
    Raises InputError for a model that needs something else from its attention, such as biases or
    dropout.
    """
    packing = options.pop("packing", None)
    scoring = Scoring(
        options.pop("scaling", None),
        options.pop("sliding_window", None) or 0,
        options.pop("softcap", None),
        options.pop("s_aux", None),
    )
    reject_unsupported(options)
    if packing is None:
        raise InputError("its layers do not pass on to their attention where sequences begin")
    reject_window_mask(attention_mask, scoring.window)
    if packing.zigzag:
        by_token = (x.permute(2, 0, 1, 3) for x in (query, key, value))
        attended = packing.zigzag.attention(*by_token, scoring)
        return attended.transpose(0, 1), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T', heads, dim]
    attend = whole_sequences if packing.group is None else shared_by_heads
    return attend(q, k, v, packing, scoring)[None], None


def whole_sequences(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scoring: Scoring) -> Tensor:
    """Attend with [T, heads, dim] of all tokens; returns the same shape."""
    if q.is_cuda and q.dtype != torch.float32 and not needs_all_scores(scoring):
        cu_seqlens = packing.cu_seqlens
        longest = packing.max_length
        segments = KernelSegments(cu_seqlens, cu_seqlens, longest, longest)
        return by_kernel(q, k, v, segments, scoring)
    return by_sequence(q, k, v, packing, scoring)


# Not compiled: every new set of lengths would cause a recompilation.
@torch.compiler.disable
def by_sequence(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scoring: Scoring) -> Tensor:
    """whole_sequences(), one sequence after another."""
    segments = [(start, end, start, end) for start, end in pairwise(packing.bounds)]
    return by_segment(q[:, None], k[:, None], v[:, None], segments, scoring)[:, 0]


# Not compiled: every group of ranks would cause a recompilation, and collectives gain nothing.
@torch.compiler.disable
def shared_by_heads(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scoring: Scoring) -> Tensor:
    """Attend with [T', heads, dim] of this rank's tokens; returns the same shape (Ulysses).

    In between, this rank has some of the heads of all tokens.
    """
    group = packing.group
    num_ranks = group.size()
    repeats = max(1, num_ranks // k.shape[1])  # every rank needs a KV head of its own
    if repeats > 1:
        k = k.repeat_interleave(repeats, dim=1)
        v = v.repeat_interleave(repeats, dim=1)
    q, k, v = (exchange(x, group, True) for x in (q, k, v))  # [T, heads / ranks, dim]
    if scoring.sinks is not None:
        scoring = scoring._replace(sinks=scoring.sinks.chunk(num_ranks)[group.rank()])
    return exchange(whole_sequences(q, k, v, packing, scoring), group, False)


def exchange(x: Tensor, group: dist.ProcessGroup, scatter_heads: bool) -> Tensor:
    """Trade tokens for heads (Ulysses, Jacobs et al. 2023).

    scatter_heads: [T / ranks, heads, dim] -> [T, heads / ranks, dim]; otherwise the way back.
    """
    num_ranks = group.size()
    if scatter_heads:
        by_rank = x.unflatten(1, (num_ranks, -1)).transpose(0, 1)
        return AllToAll.apply(by_rank, group).flatten(0, 1)
    by_rank = x.unflatten(0, (num_ranks, -1))
    return AllToAll.apply(by_rank, group).transpose(0, 1).flatten(1, 2)


# -- padded rows -----------------------------------------------------------------------------------


def padded_attention(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options,
) -> tuple[Tensor, None]:
    """Attend in rows of one sequence each: [b, heads, n, dim] -> [b, n, heads, dim].

    transformers' own attention silently ignores soft caps and sinks; this one does not.
    attention_mask: [b, 1, n, n] bool; None: causal.
    """
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    reject_unsupported({"dropout": options.get("dropout")})
    if attention_mask is None:
        length = query.shape[2]
        ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
        attention_mask = ones.tril()
    scoring = Scoring(options.get("scaling"), softcap=softcap, sinks=s_aux)
    attended = explicit_attention(query, key, value, attention_mask, scoring)
    return attended.transpose(1, 2), None


# -- which ranks can share what --------------------------------------------------------------------


def gathers_keys(engine: DictConfig, hf_config, group_size: int) -> bool:
    """Whether the ranks of a group gather each other's keys and values (zigzag).

    They do for padded rows, and where Ulysses has no whole heads for so many ranks.
    """
    if not shares_sequences(engine):
        return False
    return not (engine.use_remove_padding and has_whole_heads(hf_config, group_size))


def has_whole_heads(hf_config, num_ranks: int) -> bool:
    """Whether heads can be divided over ranks, as Ulysses needs. KV heads may be repeated."""
    if getattr(hf_config, "is_heterogeneous", False):
        return all(has_whole_heads(layer, num_ranks) for layer in layer_configs(hf_config))
    num_heads = hf_config.num_attention_heads
    num_kv_heads = getattr(hf_config, "num_key_value_heads", None) or num_heads
    num_heads_by_layer = getattr(hf_config, "num_attention_heads_per_layer", None) or [num_heads]
    if any(number % num_ranks for number in num_heads_by_layer):
        return False
    return num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0


# -- what models ask for ---------------------------------------------------------------------------


@contextmanager
def attention_set_to(hf: nn.Module, implementation: str) -> Iterator[None]:
    """Within this block, the text model's layers use this implementation of attention."""
    decoder = hf.get_decoder()
    before = decoder.config._attn_implementation
    decoder.set_attn_implementation(implementation)
    try:
        yield
    finally:
        decoder.set_attn_implementation(before)


def reject_unsupported(options: dict) -> None:
    """Raise InputError if a model passes its attention options that would change the result."""
    wanted = [
        name
        for name, value in options.items()
        if value is not None and name not in HARMLESS and name != "dropout"
    ]
    if options.get("dropout"):
        wanted.insert(0, "dropout")
    if options.get("is_causal") is False:
        wanted.append(NOT_CAUSAL)
    if wanted:
        raise InputError(f"the model wants {wanted[0]} in its attention, which is not supported")


def reject_window_mask(attention_mask: Tensor | None, window: int) -> None:
    """Raise InputError if a model limits its attention to a window by nothing but a mask.

    Only passes over shapes show that: see window_as_mask().
    """
    if attention_mask is None or not attention_mask.is_meta:
        return
    if attention_mask.shape[2:] not in ((1, 1), (2, window)):
        raise InputError(f"{NEEDS_WINDOW_MASK} of {attention_mask.shape[-1]} tokens")


def window_as_mask(*_, device: torch.device, local_size: int | None = None, **__) -> Tensor | None:
    """Build no mask; in a pass over shapes, one whose last dimension is the window, or 0.

    transformers calls this where Packing.arguments() has passed no mask.
    """
    if torch.device(device).type != "meta":
        return None
    return torch.empty(1, 1, 2, local_size or 0, device="meta")


AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", window_as_mask)
AttentionInterface.register("padded", padded_attention)
AttentionMaskInterface.register("padded", sdpa_mask)
