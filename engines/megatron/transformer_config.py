"""The Megatron configuration (TransformerConfig) of a Hugging Face model."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engines.model.shape import head_dim, stage_sizes


def make_transformer_config(
    hf: nn.Module, dtype: torch.dtype, num_mtp_layers: int, **fields
) -> TransformerConfig:
    """Return the configuration of a model for the current parallel layout (parallel_state).

    Args:
        hf: the model on the meta device.
        fields: further fields of TransformerConfig.
    """
    hf_config = hf.config
    in_first_layer = {name.removeprefix("model.layers.0.") for name, _ in hf.named_parameters()}
    return TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=hf_config.intermediate_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=head_dim(hf_config),
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        activation_func=F.silu,
        gated_linear_unit=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear="mlp.down_proj.bias" in in_first_layer,
        add_qkv_bias="self_attn.q_proj.bias" in in_first_layer,
        qk_layernorm="self_attn.q_norm.weight" in in_first_layer,
        softmax_scale=softmax_scale(hf_config),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        **layout_fields(hf_config, num_mtp_layers),
        **expert_fields(hf_config),
        **window_fields(hf_config),
        **initialization_fields(),
        **fields,
    )


def num_expert_ranks(hf_config) -> int:
    """Return how many ranks share a layer's experts: 1 if there are none.

    If the policy has experts, the process groups for them exist, and a dense critic, reference,
    teacher or reward model does not use them.
    """
    if getattr(hf_config, "num_experts", None):
        return mpu.get_expert_model_parallel_world_size()
    return 1


def layout_fields(hf_config, num_mtp_layers: int) -> dict[str, Any]:
    """Return the fields for dividing the model over ranks, and for pipeline communication."""
    pp = mpu.get_pipeline_model_parallel_world_size()
    vpp = mpu.get_virtual_pipeline_model_parallel_world_size()
    fields = {
        "tensor_model_parallel_size": mpu.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "context_parallel_size": mpu.get_context_parallel_world_size(),
        "expert_model_parallel_size": num_expert_ranks(hf_config),
        "variable_seq_lengths": True,
        "overlap_p2p_comm": vpp is not None,
        "batch_p2p_comm": False,
    }
    if pp > 1:
        layers_per_stage = stage_sizes(hf_config.num_hidden_layers, pp * (vpp or 1))
        stages = [["decoder"] * num_layers for num_layers in layers_per_stage]
        stages[0] = ["embedding", *stages[0]]
        stages[-1] = [*stages[-1], *["mtp"] * num_mtp_layers, "loss"]
        fields["pipeline_model_parallel_layout"] = stages
    if num_mtp_layers:
        # With this, Megatron keeps the copies of the embedding on different stages equal.
        fields["mtp_num_layers"] = num_mtp_layers
    return fields


def expert_fields(hf_config) -> dict[str, Any]:
    """Return the fields for a mixture of experts."""
    # The other dispatchers need sequences of equal length.
    fields = {"moe_token_dispatcher_type": "alltoall"}
    num_experts = getattr(hf_config, "num_experts", None)
    if num_experts:
        fields |= {
            "num_moe_experts": num_experts,
            "moe_router_topk": hf_config.num_experts_per_tok,
            "moe_grouped_gemm": False,
            "moe_ffn_hidden_size": getattr(
                hf_config, "moe_intermediate_size", hf_config.intermediate_size
            ),
            "expert_tensor_parallel_size": 1,
            "moe_router_load_balancing_type": "none",
            "moe_router_pre_softmax": not getattr(hf_config, "norm_topk_prob", True),
        }
    return fields


def window_fields(hf_config) -> dict[str, Any]:
    """Return the fields for layers with a sliding attention window."""
    window_of_layer = windows_of_layers(hf_config)
    if window_of_layer is None:
        return {}
    return {
        "window_size": (hf_config.sliding_window - 1, 0),
        "window_attn_skip_freq": window_of_layer,
    }


def windows_of_layers(hf_config) -> list[int] | None:
    """Return 1 for each layer with a sliding window and 0 for the others; None if none has one."""
    if hf_config.model_type == "llama" or not getattr(hf_config, "sliding_window", None):
        return None
    if hf_config.model_type in ("mimo", "qwen2", "qwen3"):
        return [int(kind == "sliding_attention") for kind in hf_config.layer_types]
    return [1] * hf_config.num_hidden_layers


def initialization_fields() -> dict[str, Any]:
    """Return initializers that do nothing, since weights are read from files.

    Initialization cannot be turned off (perform_initialization=False): parameters would then lack
    the attributes that describe how ranks divide them.
    """

    def keep(weight: Tensor) -> Tensor:
        return weight

    return {"init_method": keep, "output_layer_init_method": keep, "embedding_init_method": keep}


def rope_parameters(hf_config, device: torch.device | None = None) -> tuple[Tensor | None, float]:
    """Return a model's inverse frequencies [dim / 2], and the factor for rotated queries and keys.

    The frequencies are None for the default rope type.
    """
    rope_type = hf_config.rope_parameters.get("rope_type", "default")
    if rope_type == "default":
        return None, 1.0
    return ROPE_INIT_FUNCTIONS[rope_type](hf_config, device)


def softmax_scale(hf_config) -> float | None:
    """Return the factor for attention scores, or None for the default, 1 / sqrt(head_dim).

    The rotary embedding scales queries and keys by the same factor, which is squared in the scores.
    """
    _, factor = rope_parameters(hf_config)
    if factor == 1:
        return None
    return factor**2 * head_dim(hf_config) ** -0.5
