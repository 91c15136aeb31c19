"""Causal attention for Hugging Face models: packed, padded, and shared between ranks.

Ranks that share sequences divide them by heads (Ulysses) or, if the heads cannot be divided, by
tokens (zigzag: each rank gathers the other ranks' keys and values).

Importing this file registers the attention implementations "packed" and "padded" with transformers.
"packed" receives the layout of packed sequences (where they begin, which ranks share them) as the
keyword argument `packing` of the model's forward pass.
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
    attend_by_segment,
    attend_with_kernel,
    explicit_attention,
    needs_all_scores,
)

# Arguments that models pass to their attention, but that do not change its result.
HARMLESS = {"position_ids", "use_cache", "cache_position", "output_attentions", "is_causal"}
NEEDS_WINDOW_MASK = "only a mask limits its attention to a window"
PARTIAL_WINDOW = "only some of transformers' attention implementations apply its window"
NOT_CAUSAL = "is_causal=False"


@dataclass
class Packing:
    """Where the sequences of one packed micro-batch of T tokens begin, and which ranks share them.

    cu_seqlens  [n+1] int32 on the model's device: where sequences begin, and T. Padding at the end
                counts as a sequence.
    offsets     the same numbers as a list
    max_length  upper bound of the sequence lengths in tokens
    group       with Ulysses, the ranks that divide the T tokens. None: this rank has all of them.
    zigzag      with zigzag, how ranks divide each sequence and gather its keys and values. Also
                used for padded rows of one sequence each.
    """

    cu_seqlens: Tensor
    offsets: list[int]
    max_length: int
    group: dist.ProcessGroup | None = None
    zigzag: Zigzag | None = None

    @staticmethod
    def of(
        lengths: list[int], group: dist.ProcessGroup, device: torch.device, zigzag: bool
    ) -> Packing:
        offsets = [0, *accumulate(lengths)]
        # A power of two, so that compiled code sees few different values.
        max_length = 1 << (max(lengths) - 1).bit_length()
        return Packing(
            to_device(torch.tensor(offsets, dtype=torch.int32), device),
            offsets,
            max_length,
            group if group.size() > 1 and not zigzag else None,
            Zigzag(offsets, group, device) if zigzag else None,
        )

    def arguments(self) -> dict:
        """Return the model's keyword arguments.

        The mask is never read. Its four dimensions keep transformers from building its own mask,
        which would block until the device is idle.
        """
        unread_mask = torch.empty(1, 1, 1, 1, device=self.cu_seqlens.device)
        return {"packing": self, "attention_mask": unread_mask}


# -- packed sequences ------------------------------------------------------------------------------


def packed_attention(
    module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options
) -> tuple[Tensor, None]:
    """Attend causally within each sequence. transformers prescribes the signature.

    T' is the number of tokens on this rank. With zigzag, the leading 1 is the number of rows.

    Args:
        query: [1, heads, T', dim].
        key, value: [1, kv_heads, T', dim].
        options: packing, scaling, sliding_window, softcap and s_aux (sinks [heads]). With soft caps
            or sinks, all scores of a sequence are held in memory.

    Returns:
        ([1, T', heads, dim], None).

    Raises:
        InputError: if the model needs an unsupported option, such as biases or dropout.
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
        raise InputError("its layers do not pass the sequence boundaries on to their attention")
    reject_window_mask(attention_mask, scoring.window)
    if packing.zigzag:
        by_token = (x.permute(2, 0, 1, 3) for x in (query, key, value))
        attended = packing.zigzag.attention(*by_token, scoring)
        return attended.transpose(0, 1), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T', heads, dim]
    attend = attend_whole_sequences if packing.group is None else ulysses_attention
    return attend(q, k, v, packing, scoring)[None], None


def attend_whole_sequences(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scoring: Scoring
) -> Tensor:
    """Attend within each sequence when this rank has all tokens, [T, heads, dim] -> same shape."""
    if q.is_cuda and q.dtype != torch.float32 and not needs_all_scores(scoring):
        cu_seqlens = packing.cu_seqlens
        longest = packing.max_length
        segments = KernelSegments(cu_seqlens, cu_seqlens, longest, longest)
        return attend_with_kernel(q, k, v, segments, scoring)
    return by_sequence(q, k, v, packing, scoring)


# Not compiled: every new set of lengths would cause a recompilation.
@torch.compiler.disable
def by_sequence(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scoring: Scoring) -> Tensor:
    """Do the same as attend_whole_sequences(), one sequence after another."""
    segments = [(start, end, start, end) for start, end in pairwise(packing.offsets)]
    return attend_by_segment(q[:, None], k[:, None], v[:, None], segments, scoring)[:, 0]


# Not compiled: every group of ranks would cause a recompilation, and collectives gain nothing.
@torch.compiler.disable
def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scoring: Scoring
) -> Tensor:
    """Attend within each sequence when ranks divide the tokens, [T', heads, dim] -> same shape.

    This is Ulysses: for the attention itself, this rank has all tokens but only some of the heads.
    """
    group = packing.group
    num_ranks = group.size()
    repeats = max(1, num_ranks // k.shape[1])  # every rank needs at least one KV head
    if repeats > 1:
        k = k.repeat_interleave(repeats, dim=1)
        v = v.repeat_interleave(repeats, dim=1)
    q, k, v = (all_to_all_heads(x, group, True) for x in (q, k, v))  # [T, heads / ranks, dim]
    if scoring.sinks is not None:
        scoring = scoring._replace(sinks=scoring.sinks.chunk(num_ranks)[group.rank()])
    return all_to_all_heads(attend_whole_sequences(q, k, v, packing, scoring), group, False)


def all_to_all_heads(x: Tensor, group: dist.ProcessGroup, scatter_heads: bool) -> Tensor:
    """Exchange tokens for heads between ranks, or back (Ulysses, Jacobs et al. 2023).

    Args:
        scatter_heads: True: [T / ranks, heads, dim] -> [T, heads / ranks, dim]. False: the reverse.
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
    """Attend within rows that hold one sequence each: [b, heads, n, dim] -> [b, n, heads, dim].

    transformers' own attention silently ignores soft caps and sinks; this function applies them.

    Args:
        attention_mask: [b, 1, n, n] bool. None: causal.
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


# -- Ulysses or zigzag -----------------------------------------------------------------------------


def gathers_keys(engine: DictConfig, hf_config, group_size: int) -> bool:
    """Return whether the ranks of a group gather each other's keys and values (zigzag).

    They do so for padded rows, and for packed ones if Ulysses cannot divide the heads over them.
    """
    if not shares_sequences(engine):
        return False
    return not (engine.use_remove_padding and has_whole_heads(hf_config, group_size))


def has_whole_heads(hf_config, num_ranks: int) -> bool:
    """Return whether Ulysses can divide the heads over ranks. KV heads may be repeated."""
    if getattr(hf_config, "is_heterogeneous", False):
        return all(has_whole_heads(layer, num_ranks) for layer in layer_configs(hf_config))
    num_heads = hf_config.num_attention_heads
    num_kv_heads = getattr(hf_config, "num_key_value_heads", None) or num_heads
    num_heads_by_layer = getattr(hf_config, "num_attention_heads_per_layer", None) or [num_heads]
    if any(number % num_ranks for number in num_heads_by_layer):
        return False
    return num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0


# -- the interface to transformers -----------------------------------------------------------------


@contextmanager
def attention_set_to(hf: nn.Module, implementation: str) -> Iterator[None]:
    """Within this block, the text model's layers use the named attention implementation."""
    decoder = hf.get_decoder()
    before = decoder.config._attn_implementation
    decoder.set_attn_implementation(implementation)
    try:
        yield
    finally:
        decoder.set_attn_implementation(before)


def reject_unsupported(options: dict) -> None:
    """Raise InputError if a model passes options to its attention that we do not support."""
    unsupported = [
        name
        for name, value in options.items()
        if value is not None and name not in HARMLESS and name != "dropout"
    ]
    if options.get("dropout"):
        unsupported.insert(0, "dropout")
    if options.get("is_causal") is False:
        unsupported.append(NOT_CAUSAL)
    if unsupported:
        raise InputError(
            f"the model needs {unsupported[0]} in its attention, which is not supported"
        )


def reject_window_mask(attention_mask: Tensor | None, window: int) -> None:
    """Raise InputError if a layer's attention and its mask have different windows.

    This is detected in passes over shapes (on the meta device): see window_as_mask().
    """
    if attention_mask is None or not attention_mask.is_meta:
        return
    if attention_mask.shape[2:] in ((1, 1), (2, window)):
        return
    window_of_mask = attention_mask.shape[-1]
    if window_of_mask == 0:
        raise InputError(f"{PARTIAL_WINDOW} of {window} tokens")
    raise InputError(f"{NEEDS_WINDOW_MASK} of {window_of_mask} tokens")


def window_as_mask(*_, device: torch.device, local_size: int | None = None, **__) -> Tensor | None:
    """Return no mask or, on the meta device, one whose last dimension is the window (or 0).

    transformers calls this to build a mask when it gets none from Packing.arguments().
    """
    if torch.device(device).type != "meta":
        return None
    return torch.empty(1, 1, 2, local_size or 0, device="meta")


AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", window_as_mask)
AttentionInterface.register("padded", padded_attention)
AttentionMaskInterface.register("padded", sdpa_mask)
