"""The layers of a Megatron model in plain PyTorch, for machines without TransformerEngine.

They run on CPU and CUDA. Their parameters have the same names as in TransformerEngine's modules
(such as linear_qkv.layer_norm_weight), so weights and checkpoints are interchangeable. If
TransformerEngine is installed, it is used instead.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from engines.parallel.varlen import Scoring, Zigzag


def install_torch_layers() -> None:
    """Make Megatron's "transformer_engine" layer specification build the modules in this file."""
    if not gpt_layer_specs.HAVE_TE:
        gpt_layer_specs.TESpecProvider = TorchSpecProvider
        gpt_layer_specs.TENorm = TorchNorm
        # Compiling makes one kernel of seven. On a CPU, nothing is compiled: see without_cuda.py.
        rope_utils._apply_rotary_pos_emb_bshd = torch.compile(rope_utils._apply_rotary_pos_emb_bshd)


class TorchSpecProvider(LocalSpecProvider):
    """Tells Megatron's layer specifications which modules to use: those in this file."""

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return TorchLayerNormColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return TorchRowParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return TorchNorm

    def core_attention(self) -> type:
        return TorchAttention


# -- linear layers and norms -----------------------------------------------------------------------


def new_norm_weight(size: int, config) -> nn.Parameter:
    """Return the weight of an RMSNorm, all ones."""
    device = torch.cuda.current_device()
    weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=device))
    # With sequence parallelism, each rank sees its own tokens, so gradients are summed over ranks.
    weight.sequence_parallel = config.sequence_parallel
    return weight


class TorchNorm(nn.Module):
    """RMSNorm, in place of TENorm."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        self.weight = new_norm_weight(hidden_size, config)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class AdaptableLinear:
    """A mixin for a parallel linear layer that may have an adapter.

    adapter: None, or an engines.megatron.adapters.Adapter, which reads the matrix's input
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.adapter = None

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **kwargs) -> Tensor:
        # With a frozen matrix, Megatron computes no gradient for the bias, so add it separately.
        adds_bias_separately = bias is not None and not weight.requires_grad
        if adds_bias_separately:
            output = super()._forward_impl(input, weight, bias=None, **kwargs) + bias
        else:
            output = super()._forward_impl(input, weight, bias=bias, **kwargs)
        if self.adapter is None:
            return output
        return self.adapter(input, output)


class TorchRowParallelLinear(AdaptableLinear, RowParallelLinear):
    pass


class TorchLayerNormColumnParallelLinear(AdaptableLinear, ColumnParallelLinear):
    """RMSNorm and a column-parallel linear layer, in place of TELayerNormColumnParallelLinear."""

    def __init__(self, input_size: int, output_size: int, *, config, **kwargs):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = new_norm_weight(input_size, config)

    def forward(self, x: Tensor, *args, **kwargs):
        weight = self.layer_norm_weight
        normed = F.rms_norm(x, weight.shape, weight, self.config.layernorm_epsilon)
        return super().forward(normed, *args, **kwargs)


# -- positions -------------------------------------------------------------------------------------


@dataclass
class Packing(PackedSeqParams):
    """The layout of a micro-batch's sequences, including padding: end to end, or one per row.

    zigzag: how context-parallel ranks divide the sequences
    positions: [tokens of this rank] int64, each token's position in its sequence
    """

    zigzag: Zigzag | None = None
    positions: Tensor | None = None

    @staticmethod
    def from_lengths(lengths: list[int], group, device: torch.device) -> "Packing":
        """Return the packing of sequences of these lengths, shared by a context-parallel group."""
        offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        cu_seqlens = offsets.to(device)
        zigzag = Zigzag(offsets.tolist(), group, device)
        # With "thd", Megatron would apply rotary embeddings one sequence at a time, and every layer
        # would wait for the device to report the sequences' lengths.
        qkv_format = "thd" if gpt_layer_specs.HAVE_TE else "packed"
        return Packing(
            qkv_format=qkv_format,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_seqlens,
            cu_seqlens_kv_padded=cu_seqlens,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            zigzag=zigzag,
            positions=zigzag.positions.to(device),
        )


class PackedRotaryEmbedding(RotaryEmbedding):
    """Megatron's rotary embedding. For a Packing, angles follow each token's own position."""

    def get_rotary_seq_len(
        self,
        inference_context,
        transformer,
        transformer_input,
        transformer_config,
        packed_seq_params: Packing | None = None,
        **kwargs,
    ):
        """Return the Packing, if there is one, in place of a length. forward() reads it."""
        return packed_seq_params or super().get_rotary_seq_len(
            inference_context,
            transformer,
            transformer_input,
            transformer_config,
            packed_seq_params,
            **kwargs,
        )

    def forward(
        self, length: int | Packing, offset: int = 0, packed_seq: bool = False, cp_group=None
    ) -> Tensor:
        """Return the angles [tokens of this rank, 1, 1, dim] fp32.

        Args:
            length: as returned by get_rotary_seq_len().
        """
        if isinstance(length, Packing):
            return self.get_emb(length.max_seqlen_q).index_select(0, length.positions)
        return super().forward(length, offset, packed_seq, cp_group)


# -- attention -------------------------------------------------------------------------------------


class TorchAttention(nn.Module):
    """Causal attention over packed or padded sequences, in place of TEDotProductAttention.

    It has a sliding window if the configuration sets one for the layer. Context-parallel ranks
    gather each other's keys and values.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        softmax_scale=None,
        **_,
    ):
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal
        assert attention_type == "self"
        self.scale = softmax_scale
        # The number of keys that a query sees, its own included; 0 for all.
        self.window = 0
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            self.window = config.window_size[0] + 1

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask=None,
        packed_seq_params: Packing | None = None,
        **_,
    ) -> Tensor:
        """Attend within each sequence.

        s is the number of tokens on this context-parallel rank. Packed sequences have b = 1. No
        mask is needed for padding: it comes after a sequence's tokens, and attention is causal.

        Args:
            query: [s, b, heads, dim].
            key, value: [s, b, kv_heads, dim].

        Returns:
            [s, b, heads * dim].
        """
        scoring = Scoring(self.scale, self.window)
        attended = packed_seq_params.zigzag.attention(query, key, value, scoring)
        return attended.flatten(2)
