"""Causal attention for Hugging Face models, packed or padded, with sequences that ranks share by heads (Ulysses) or by tokens; and
that of vision towers.

Importing this file registers the attention implementations "packed", "padded" and WINDOWS with transformers. The layout of packed
sequences (where they begin, which ranks share them) reaches the first as the model's keyword argument `packing`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from config import InputError
from engines.parallel.collectives import AllToAll
from engines.parallel.device import to_device
from engines.parallel.varlen import Zigzag, by_kernel, by_segment, explicit_attention

# Arguments that models pass to their attention and that mean nothing to it.
HARMLESS = {"position_ids", "use_cache", "cache_position", "output_attentions", "is_causal"}
WINDOW = "only a mask limits its attention to a window"
NOT_CAUSAL = "is_causal=False"
WINDOWS = "windows_flash"  # transformers says where windows begin to implementations with "flash" in their name alone


@dataclass
class Packing:
    """Where the sequences of one packed micro-batch lie.

    cu_seqlens  [n+1] int32 on the model's device, over all T tokens (padding at the end is a sequence of its own)
    bounds      the same numbers as a list
    max_length  longest sequence, tokens, or more
    group       ranks among which the T tokens are divided (Ulysses); None: this rank has them all
    zigzag      how ranks divide each sequence, and gather its keys and values, instead; also of rows with one sequence each
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
        longest = 1 << (max(lengths) - 1).bit_length()
        return Packing(
            to_device(torch.tensor(bounds, dtype=torch.int32), device),
            bounds,
            longest,
            group if group.size() > 1 and not zigzag else None,
            Zigzag(bounds, group, device) if zigzag else None,
        )

    def arguments(self) -> dict:
        """The model's keyword arguments. The mask of four dimensions is not read; it keeps transformers from building one, for
        which it would wait for the device."""
        return {
            "packing": self,
            "attention_mask": torch.empty(1, 1, 1, 1, device=self.cu_seqlens.device),
        }


def packed_attention(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence; the signature is transformers' attention interface.

    query [1, heads, T', dim], key and value [1, kv_heads, T', dim] -> [1, T', heads, dim], T' this rank's tokens; or with zigzag
    rows of T' tokens each.
    Soft caps and sinks (s_aux [heads]) take memory for all scores of a sequence. Raises InputError for a model that asks its
    attention for something else: biases, dropout.
    """
    refuse(dropout, others)
    if packing is None:
        raise InputError("its layers do not pass on to their attention where sequences begin")
    if (
        attention_mask is not None
        and attention_mask.is_meta
        and attention_mask.shape[2:] not in ((1, 1), (2, sliding_window or 0))
    ):
        raise InputError(f"{WINDOW} of {attention_mask.shape[-1]} tokens")
    window = sliding_window or 0
    if packing.zigzag:
        by_token = (x.permute(2, 0, 1, 3) for x in (query, key, value))
        return packing.zigzag.attention(*by_token, scaling, window, softcap, s_aux).transpose(
            0, 1
        ), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T', heads, dim]
    attend = whole_sequences if packing.group is None else shared_by_heads
    return attend(q, k, v, packing, scaling, window, softcap, s_aux)[None], None


def whole_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    scaling: float | None,
    window: int,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[T, heads, dim] of all tokens -> the same."""
    if q.is_cuda and q.dtype != torch.float32 and not softcap and sinks is None:
        return by_kernel(
            q,
            k,
            v,
            packing.cu_seqlens,
            packing.cu_seqlens,
            packing.max_length,
            packing.max_length,
            scaling,
            window,
        )
    return by_sequence(q, k, v, packing, scaling, window, softcap, sinks)  # there is no such kernel


# Not compiled: it would be compiled again for every group of ranks, without any gain for collectives.
@torch.compiler.disable
def shared_by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    scaling: float | None,
    window: int,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[T', heads, dim] of this rank's tokens -> the same (Ulysses): meanwhile it has some heads of all tokens."""
    group = packing.group
    repeats = max(1, group.size() // k.shape[1])  # every rank needs a KV head of its own
    k, v = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (k, v))
    q, k, v = (exchange(x, group, True) for x in (q, k, v))  # [T, heads / ranks, dim]
    sinks = None if sinks is None else sinks.chunk(group.size())[group.rank()]
    return exchange(
        whole_sequences(q, k, v, packing, scaling, window, softcap, sinks), group, False
    )


def padded_attention(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others,
) -> tuple[Tensor, None]:
    """transformers' attention for a sequence in each row, query [b, heads, n, dim] -> [b, n, heads, dim], with the soft caps and
    sinks that it leaves out in silence. attention_mask [b, 1, n, n] bool, None: causal."""
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **others)
    refuse(others.get("dropout"), {})
    length = query.shape[2]
    seen = (
        torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        if attention_mask is None
        else attention_mask
    )
    return explicit_attention(
        query, key, value, seen, others.get("scaling"), softcap, s_aux
    ).transpose(1, 2), None


def windows_attention(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    cu_seq_lens_k: Tensor | None = None,
    max_length_k: int | None = None,
    packing: Packing | None = None,
    **others,
) -> tuple[Tensor, None]:
    """Attention of all to all inside each image, or each window of one, for vision towers: query, key and value
    [1, heads, T, dim] -> [1, T, heads, dim]; cu_seq_lens_q [n+1] int32: where windows begin. packing is the text's."""
    refuse(dropout, others | {"a mask": attention_mask, "is_causal=True": is_causal or None})
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, dim]
    if q.is_cuda and q.dtype != torch.float32:
        return by_kernel(
            q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scaling, causal=False
        )[None], None
    segments = [(a, b, a, b) for a, b in pairwise(cu_seq_lens_q.tolist())]
    return by_segment(q[:, None], k[:, None], v[:, None], segments, scaling, causal=False)[
        None, :, 0
    ], None


def of_towers(hf: nn.Module) -> list:
    """The configurations of vision towers whose attention always takes `cu_seqlens`. With WINDOWS transformers calls that once in a
    layer, and with any implementation of another name once for each window, which are hundreds."""
    text, told = {*hf.get_decoder().modules()}, {}
    for module in hf.modules():
        if module not in text and hasattr(module, "is_causal"):
            windows = inspect.signature(module.forward).parameters.get("cu_seqlens")
            told.setdefault(id(module.config), (module.config, []))[1].append(
                windows is not None and windows.default is windows.empty and not module.is_causal
            )
    return [config for config, knows in told.values() if all(knows)]


@contextmanager
def attending(hf: nn.Module, attention: str) -> Iterator[None]:
    """Meanwhile layers of the text model have this implementation of attention."""
    decoder = hf.get_decoder()
    before = decoder.config._attn_implementation
    decoder.set_attn_implementation(attention)
    try:
        yield
    finally:
        decoder.set_attn_implementation(before)


def refuse(dropout: float, others: dict) -> None:
    asked = [name for name, value in others.items() if value is not None and name not in HARMLESS]
    asked += [NOT_CAUSAL] * (others.get("is_causal") is False)
    if dropout or asked:
        raise InputError(
            f"the model wants {'dropout' if dropout else asked[0]} in its attention, which is not supported"
        )


# Not compiled: it would be compiled again for every new set of lengths, without any gain for collectives.
@torch.compiler.disable
def by_sequence(q: Tensor, k: Tensor, v: Tensor, packing: Packing, *others) -> Tensor:
    segments = [(a, b, a, b) for a, b in zip(packing.bounds, packing.bounds[1:])]
    return by_segment(q[:, None], k[:, None], v[:, None], segments, *others)[:, 0]


def exchange(x: Tensor, group: dist.ProcessGroup, scatter_heads: bool) -> Tensor:
    """Ulysses (Jacobs et al. 2023): trade tokens for heads. scatter_heads: [T/R, H, D] -> [T, H/R, D], else back."""
    ranks = group.size()
    if scatter_heads:
        return AllToAll.apply(x.unflatten(1, (ranks, -1)).transpose(0, 1), group).flatten(0, 1)
    return AllToAll.apply(x.unflatten(0, (ranks, -1)), group).transpose(0, 1).flatten(1, 2)


def window_of(*_, device: torch.device, local_size: int | None = None, **__) -> Tensor | None:
    """In place of transformers' mask, where Packing.arguments() gave none: in a pass over shapes, what window the mask has."""
    return (
        torch.empty(1, 1, 2, local_size or 0, device="meta")
        if torch.device(device).type == "meta"
        else None
    )


AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", window_of)
AttentionInterface.register("padded", padded_attention)
AttentionMaskInterface.register("padded", sdpa_mask)
AttentionInterface.register(WINDOWS, windows_attention)
AttentionMaskInterface.register(WINDOWS, sdpa_mask)
