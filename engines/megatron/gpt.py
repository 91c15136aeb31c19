"""Builds this rank's part of a model: Megatron's GPTModel up to the last hidden states."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from safetensors import safe_open
from torch import Tensor, nn

from engines.heads import Head
from engines.megatron.bridge import WeightMapping
from engines.megatron.moe import MixtureOfExperts
from engines.megatron.mtp_layers import mtp_block_spec, mtp_hidden_states
from engines.megatron.torch_layers import PackedRotaryEmbedding, install_torch_layers
from engines.megatron.transformer_config import make_transformer_config, rope_parameters
from engines.model.classifier import SCORE
from engines.model.model_files import weight_files

install_torch_layers()


@dataclass
class ModelDescription:
    """The model to build.

    hf: the model on the meta device
    path: the directory with the model's weights
    head: Head.VALUES for a value head in place of the output matrix
    dtype: the dtype of the parameters
    num_mtp_layers: the number of layers for multi-token prediction
    detach_mtp: whether the MTP layers' loss trains only these layers
    fields: further fields of TransformerConfig
    """

    hf: nn.Module
    path: Path
    head: Head
    dtype: torch.dtype
    num_mtp_layers: int = 0
    detach_mtp: bool = False
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def has_value_head(self) -> bool:
        return self.head is Head.VALUES


class HiddenStates(GPTModel):
    """A model up to its last norm. Its output matrix holds a weight, but is not called.

    Every pipeline stage returns [s, b, h], where s is this rank's share of the tokens under
    sequence or context parallelism. With labels (see mtp_hidden_states()), the last stage appends
    the MTP layers' hidden states: [(1 + layers) * s, b, h].

    detach_mtp: whether the MTP layers' loss trains only these layers
    """

    def __init__(self, detach_mtp: bool, **kwargs):
        super().__init__(**kwargs)
        self.detach_mtp = detach_mtp
        self.before_final_norm: Tensor | None = None
        if not self.mtp_process:
            return
        # As in vLLM's drafter, MTP layers read the hidden states from before the last norm.
        self.decoder.final_layernorm.register_forward_pre_hook(self._keep_input_of_final_norm)
        if self.share_embeddings_and_output_weights:
            # This stage holds a copy of the embedding, whose weight is the output matrix.
            self.output_layer.weight = None

    def _keep_input_of_final_norm(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.before_final_norm = inputs[0]

    def _preprocess(self, *, padding_mask: Tensor, **kwargs) -> tuple:
        """Divide the padding mask over tensor-parallel ranks on every pipeline stage.

        Megatron would divide it on the first stage only. add_routes() describes its contents.
        """
        results = super()._preprocess(**kwargs)
        if self.config.sequence_parallel:
            group = mpu.get_tensor_model_parallel_group()
            padding_mask = padding_mask.chunk(group.size(), dim=1)[group.rank()]
        return *results[:5], padding_mask, *results[6:]

    def _postprocess(
        self,
        hidden_states: Tensor,
        labels: list[Tensor] | None,
        rotary_pos_emb: Tensor,
        packed_seq_params,
        **_,
    ) -> Tensor:
        if not self.mtp_process:
            return hidden_states
        before_final_norm = self.before_final_norm
        self.before_final_norm = None
        if not labels:
            return hidden_states
        mtp_outputs = mtp_hidden_states(
            self,
            before_final_norm,
            labels,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
        )
        return torch.cat([hidden_states, *mtp_outputs])


class ValueMatrix(nn.Linear):
    """An output matrix with one row, which is zero at first. Tensor-parallel ranks all hold it."""

    def __init__(self, config: TransformerConfig):
        device = torch.cuda.current_device()
        super().__init__(
            config.hidden_size, 1, bias=False, dtype=config.params_dtype, device=device
        )
        nn.init.zeros_(self.weight)


class Attention(SelfAttention):
    """Attention in which has_output_bias, not the MLP's setting, controls the output's bias."""

    def __init__(self, config: TransformerConfig, *args, has_output_bias: bool, **kwargs):
        config = copy.copy(config)
        config.add_bias_linear = has_output_bias
        super().__init__(config, *args, **kwargs)


def build_models(mapping: WeightMapping, description: ModelDescription) -> list[HiddenStates]:
    """Build this rank's part of a model, and load its weights.

    A value head is read from the files if they have an output matrix with one row; otherwise it is
    zero.

    Returns:
        One module per virtual pipeline stage.
    """
    config = make_transformer_config(
        description.hf, description.dtype, description.num_mtp_layers, **description.fields
    )
    num_virtual_stages = config.virtual_pipeline_model_parallel_size
    vp_stages = [None] if num_virtual_stages is None else list(range(num_virtual_stages))
    models = [build_stage(config, description, vp_stage) for vp_stage in vp_stages]
    for model in models:
        set_rotary_embedding(model, description.hf.config)
        if description.has_value_head and model.post_process:
            # Hide the output matrix, so that its weight is not looked up in the files.
            model.output_layer = nn.Identity()
        set_partition_attributes(model)
    mapping.load(models, description.path)
    for model in models:
        if description.has_value_head and model.post_process:
            model.output_layer = ValueMatrix(config)
            load_value_head(model.output_layer, description.path)
            set_partition_attributes(model.output_layer)
    return models


def build_stage(
    config: TransformerConfig, description: ModelDescription, vp_stage: int | None
) -> HiddenStates:
    """Build the module of a virtual pipeline stage, without loading weights.

    Args:
        vp_stage: the number of the virtual stage, or None if there is only one.
    """
    hf_config = description.hf.config
    layers = layer_specs(config, description.hf, vp_stage)
    is_last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    mtp_block = None
    if description.num_mtp_layers and is_last:
        mtp_block = mtp_block_spec(layers.layer_specs[-1], description.num_mtp_layers)
    is_tied = hf_config.tie_word_embeddings and not description.has_value_head
    multiple = config.tensor_model_parallel_size
    return HiddenStates(
        description.detach_mtp,
        config=config,
        transformer_layer_spec=layers,
        mtp_block_spec=mtp_block,
        vp_stage=vp_stage,
        position_embedding_type="rope",
        rotary_base=hf_config.rope_parameters["rope_theta"],
        vocab_size=-(-hf_config.vocab_size // multiple) * multiple,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=is_last,
        share_embeddings_and_output_weights=is_tied,
    )


def layer_specs(
    config: TransformerConfig, hf: nn.Module, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return the specification of a stage's decoder layers."""
    output_projection = hf.get_submodule("model.layers.0.self_attn.o_proj")
    layers = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=True, vp_stage=vp_stage
    )
    for layer in layers.layer_specs:
        attention = layer.submodules.self_attention
        attention.module = Attention
        has_output_bias = output_projection.bias is not None
        attention.params = {**attention.params, "has_output_bias": has_output_bias}
        if config.num_moe_experts:
            layer.submodules.mlp = MixtureOfExperts
    return layers


def set_rotary_embedding(model: HiddenStates, hf_config) -> None:
    """Set a stage's rotary embedding according to config.json."""
    if not gpt_layer_specs.HAVE_TE:
        model.rotary_pos_emb = PackedRotaryEmbedding(
            model.config.kv_channels, 1.0, rotary_base=hf_config.rope_parameters["rope_theta"]
        )
    frequencies, _ = rope_parameters(hf_config, model.rotary_pos_emb.inv_freq.device)
    if frequencies is not None:
        model.rotary_pos_emb.inv_freq = frequencies


def set_partition_attributes(module: nn.Module) -> None:
    """Set Megatron's attributes on the parameters that tensor-parallel ranks do not divide."""
    for parameter in module.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)


def load_value_head(head: ValueMatrix, path: Path) -> None:
    """Read the value head from the files: an output matrix with one row, or a score head."""
    shape = list(head.weight.shape)
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            names = set(tensors.keys())
            for name in names & {"lm_head.weight", SCORE}:
                if tensors.get_slice(name).get_shape() == shape:
                    head.weight.data.copy_(tensors.get_tensor(name))
