"""Layers for multi-token prediction (MTP), on the pipeline stage of the last decoder layer.

At each position, the k-th MTP layer reads the previous layer's hidden state and the token k
positions ahead, and predicts the token after that one. The layer before the first MTP layer is the
last decoder layer.

We do not use megatron-core's own MTP loss: it computes full logits on every pass, and divides the
loss by one micro-batch's number of tokens.
"""

from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from engines.megatron.moe import new_weight


class MTPLayer(MegatronModule):
    """An MTP layer of MiMo.

    input_proj combines a hidden state with a token's embedding. It is whole on every
    tensor-parallel rank. With sequence parallelism, each rank applies it to its own positions.
    """

    def __init__(
        self, config, decoder_layer: ModuleSpec, layer_number: int, vp_stage: int | None, **_
    ):
        super().__init__(config)
        self.layer_number = layer_number  # from 1; Megatron's block reads it
        self.token_layernorm = self._new_norm()
        self.hidden_layernorm = self._new_norm()
        self.final_layernorm = self._new_norm()
        self.input_proj = new_weight(config, config.hidden_size, 2 * config.hidden_size)
        # Each tensor-parallel rank sees its own tokens, so gradients are summed over the ranks.
        self.input_proj.sequence_parallel = config.sequence_parallel
        # The layer adds the offset to its number, so it is subtracted here.
        offset = get_transformer_layer_offset(config, vp_stage)
        self.transformer_layer = build_module(
            decoder_layer,
            config=config,
            vp_stage=vp_stage,
            layer_number=config.num_layers + layer_number - offset,
        )

    def _new_norm(self) -> nn.Module:
        return gpt_layer_specs.TENorm(
            config=self.config,
            hidden_size=self.config.hidden_size,
            eps=self.config.layernorm_epsilon,
        )

    def forward(self, hidden: Tensor, tokens: Tensor, **layer_inputs) -> Tensor:
        """Return the layer's hidden states [s, b, h]. All tensors are for this rank's positions.

        Args:
            hidden: [s, b, h], the hidden states of the previous layer.
            tokens: [s, b, h], the embeddings of the tokens ahead.
            layer_inputs: further arguments of a decoder layer.
        """
        compute = partial(self._compute, **layer_inputs)
        if self.config.recompute_granularity == "full":
            return checkpoint(compute, False, hidden, tokens)
        return compute(hidden, tokens)

    def _compute(self, hidden: Tensor, tokens: Tensor, **layer_inputs) -> Tensor:
        joined = torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(tokens)], -1)
        projected = F.linear(joined, self.input_proj)
        hidden, _ = self.transformer_layer(projected, None, **layer_inputs)
        return self.final_layernorm(hidden)


def mtp_block_spec(
    decoder_layer: ModuleSpec, num_layers: int
) -> MultiTokenPredictionBlockSubmodules:
    """Return the specification of a block of MTP layers.

    Args:
        decoder_layer: the specification of the decoder layer inside each MTP layer.
    """
    layer = ModuleSpec(module=MTPLayer, params={"decoder_layer": decoder_layer})
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * num_layers)


def mtp_hidden_states(
    model, hidden: Tensor, ids_ahead: list[Tensor], **layer_inputs
) -> list[Tensor]:
    """Return the hidden states [s, b, h] of each MTP layer in a model.

    Args:
        hidden: [s, b, h], the output of the last decoder layer before the last norm.
        ids_ahead: for each MTP layer, [b, s] int64, the token that it reads at each position. -1
            means that there is no such token; its embedding is zero.
        layer_inputs: further arguments of a decoder layer.
    """
    group = mpu.get_tensor_model_parallel_group()
    results = []
    hidden = detach_inputs(model, hidden)
    for layer, ids in zip(model.mtp.layers, ids_ahead, strict=True):
        has_token = (ids >= 0).T[..., None]
        if model.config.sequence_parallel:
            has_token = has_token.chunk(group.size())[group.rank()]
        tokens = torch.where(has_token, model.embedding(ids.clamp(min=0), None), 0)
        hidden = layer(hidden, detach_inputs(model, tokens), **layer_inputs)
        results.append(hidden)
    return results


def detach_inputs(model, x: Tensor) -> Tensor:
    """Stop the gradient from MTP layers to the rest of the model if model.detach_mtp is set."""
    if not model.detach_mtp:
        return x
    return x.detach().requires_grad_()  # Recomputation needs inputs that require a gradient.
