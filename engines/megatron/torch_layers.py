"""The layers of a Megatron model in plain PyTorch, for machines without TransformerEngine.

They run on CPU and CUDA, and carry the parameter names of TransformerEngine's modules (such as
linear_qkv.layer_norm_weight), so that weights, checkpoints and their mapping are the same with
either. Where TransformerEngine is installed, it is used instead.
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
    """Let Megatron's "transformer_engine" layer specification build this file's modules."""
    if not gpt_layer_specs.HAVE_TE:
        gpt_layer_specs.TESpecProvider = TorchSpecProvider
        gpt_layer_specs.TENorm = TorchNorm
        # One kernel instead of seven. On a CPU nothing is compiled.
        rope_utils._apply_rotary_pos_emb_bshd = torch.compile(rope_utils._apply_rotary_pos_emb_bshd)


class TorchSpecProvider(LocalSpecProvider):
    """Names the modules of this file to Megatron's layer specifications."""

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
    # With sequence parallelism each rank sees its own tokens, so gradients are summed.
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
    """A parallel linear layer that may have an adapter, which reads the input of its matrix.

    adapter: None, or an engines.megatron.adapters.Adapter
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.adapter = None

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **kwargs) -> Tensor:
        # Megatron gives the bias of a frozen matrix no gradient, so add it separately.
        add_bias = bias is not None and not weight.requires_grad
        if add_bias:
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
    """Where the sequences of a micro-batch lie, padding included: end to end, or one per row.

    zigzag: how context-parallel ranks divide the sequences
    positions: [tokens of this rank] int64, the position of each in its sequence
    """

    zigzag: Zigzag | None = None
    positions: Tensor | None = None

    @staticmethod
    def from_lengths(lengths: list[int], group, device: torch.device) -> "Packing":
        """Return the packing of sequences of these lengths, shared by a context-parallel group."""
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        cu_seqlens = bounds.to(device)
        zigzag = Zigzag(bounds.tolist(), group, device)
        # With "thd" Megatron would rotate one sequence after another, and wait in every layer for
        # the device to report their lengths.
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
    """Megatron's rotary embedding; for a Packing, with the angles of each token's own position."""

    def get_rotary_seq_len(
        self,
        inference_context,
        transformer,
        transformer_input,
        transformer_config,
        packed_seq_params: Packing | None = None,
        **kwargs,
    ):
        """Return the Packing itself, if there is one, for forward() to read."""
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

        length: as returned by get_rotary_seq_len()
        """
        if isinstance(length, Packing):
            return self.get_emb(length.max_seqlen_q).index_select(0, length.positions)
        return super().forward(length, offset, packed_seq, cp_group)


# -- attention -------------------------------------------------------------------------------------


class TorchAttention(nn.Module):
    """Causal attention over packed or padded sequences, in place of TEDotProductAttention.

    It looks through a sliding window where the configuration has one for the layer.
    Context-parallel ranks gather each other's keys and values.
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

        query: [s, b, heads, dim]
        key, value: [s, b, kv_heads, dim]
        Returns [s, b, heads * dim]. s counts this context-parallel rank's tokens; packed
        sequences have b = 1.

        Padding follows a sequence, where causal attention hides it from all tokens. So there is
        nothing to mask.
        """
        scoring = Scoring(self.scale, self.window)
        attended = packed_seq_params.zigzag.attention(query, key, value, scoring)
        return attended.flatten(2)
