"""The layers of a Megatron model in plain PyTorch, on CPU and CUDA, for machines without TransformerEngine.

They carry the parameter names of TransformerEngine's modules (linear_qkv.layer_norm_weight), so that weights,
checkpoints and their mapping are the same with either. Where TransformerEngine is installed it is used.
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

from engines.parallel.varlen import Zigzag


def install() -> None:
    """Let Megatron's "transformer_engine" layer specification build this file's modules."""
    if not gpt_layer_specs.HAVE_TE:
        gpt_layer_specs.TESpecProvider = TorchSpecProvider
        gpt_layer_specs.TENorm = TorchNorm
        # One kernel instead of seven; on a CPU nothing is compiled.
        rope_utils._apply_rotary_pos_emb_bshd = torch.compile(rope_utils._apply_rotary_pos_emb_bshd)


class TorchSpecProvider(LocalSpecProvider):
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


# -- linear layers and norms -------------------------------------------------------------------------------------------


def norm_weight(size: int, config) -> nn.Parameter:
    weight = nn.Parameter(
        torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device())
    )
    weight.sequence_parallel = (
        config.sequence_parallel
    )  # each rank sees its own tokens: gradients are added up
    return weight


class TorchNorm(nn.Module):
    """RMSNorm, instead of TENorm."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        self.weight, self.eps = norm_weight(hidden_size, config), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Adaptable:
    """A parallel linear layer that may have an adapter (engines/megatron/adapted_layers.py), which sees what the layer's matrix sees."""

    def __init__(self, *args, **others):
        super().__init__(*args, **others)
        self.adapter = None

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **others) -> Tensor:
        # Beside a frozen matrix Megatron gives the bias no gradient.
        apart = bias is not None and not weight.requires_grad
        output = super()._forward_impl(input, weight, bias=None if apart else bias, **others)
        output = output + bias if apart else output
        return output if self.adapter is None else self.adapter(input, output)


class TorchRowParallelLinear(Adaptable, RowParallelLinear):
    pass


class TorchLayerNormColumnParallelLinear(Adaptable, ColumnParallelLinear):
    """RMSNorm and a column-parallel linear layer, instead of TELayerNormColumnParallelLinear."""

    def __init__(self, input_size: int, output_size: int, *, config, **others):
        super().__init__(input_size, output_size, config=config, **others)
        self.layer_norm_weight = norm_weight(input_size, config)

    def forward(self, x: Tensor, *args, **kwargs):
        weight = self.layer_norm_weight
        return super().forward(
            F.rms_norm(x, weight.shape, weight, self.config.layernorm_epsilon), *args, **kwargs
        )


# -- positions ---------------------------------------------------------------------------------------------------------


@dataclass
class Packing(PackedSeqParams):
    """Where the sequences of a micro-batch lie, padding included: one behind the other, or one in each row.

    zigzag     which of their tokens context-parallel ranks have
    positions  [tokens of this rank] int64: the place of each in its sequence
    """

    zigzag: Zigzag | None = None
    positions: Tensor | None = None

    @staticmethod
    def of(lengths: list[int], group, device: torch.device) -> "Packing":
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        cu, longest, zigzag = (
            bounds.to(device),
            max(lengths),
            Zigzag(bounds.tolist(), group, device),
        )
        # With "thd" Megatron rotates one sequence after another, and in every layer waits for the device to know their lengths.
        return Packing(
            qkv_format="thd" if gpt_layer_specs.HAVE_TE else "packed",
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            cu_seqlens_q_padded=cu,
            cu_seqlens_kv_padded=cu,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            zigzag=zigzag,
            positions=zigzag.positions.to(device),
        )


class PackedRotaryEmbedding(RotaryEmbedding):
    """Megatron's rotary embedding; for packed micro-batches, the angles of every token at its own position."""

    def get_rotary_seq_len(
        self,
        inference_context,
        transformer,
        transformer_input,
        transformer_config,
        packed_seq_params: Packing | None = None,
        **others,
    ):
        return packed_seq_params or super().get_rotary_seq_len(
            inference_context,
            transformer,
            transformer_input,
            transformer_config,
            packed_seq_params,
            **others,
        )

    def forward(
        self, length: int | Packing, offset: int = 0, packed_seq: bool = False, cp_group=None
    ) -> Tensor:
        """What get_rotary_seq_len returned -> [tokens of this rank, 1, 1, dim] fp32"""
        if isinstance(length, Packing):
            return self.get_emb(length.max_seqlen_q).index_select(0, length.positions)
        return super().forward(length, offset, packed_seq, cp_group)


# -- attention ---------------------------------------------------------------------------------------------------------


class TorchAttention(nn.Module):
    """Causal attention over sequences in rows or packed, in a sliding window where the configuration has one for the layer, instead
    of TEDotProductAttention. Context-parallel ranks gather each other's keys and values."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
        **_,
    ):
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        self.scale = softmax_scale
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window = (
            config.window_size[0] + 1 if windowed else 0
        )  # keys that a query sees, itself among them

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: Packing | None = None,
    ) -> Tensor:
        """query [s, b, heads, dim], key and value [s, b, kv_heads, dim] -> [s, b, heads * dim]; packed: b = 1.

        s counts this context-parallel rank's tokens. Padding stands behind a sequence, where causal attention lets
        no real token see it, so that there is nothing to mask.
        """
        return packed_seq_params.zigzag.attention(
            query, key, value, self.scale, self.window
        ).flatten(2)
