"""Layers of multi-token prediction in a Megatron model, on the pipeline stage of its last layer.

Of each place the k-th layer sees what the one before it made (the first: the last decoder layer), and the token k places behind,
and predicts the next one. megatron-core's own layer asks for whole logits on every pass, and divides its loss by the tokens of a
micro-batch.
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
from torch import Tensor

from engines.megatron.moe import new_weight


class MTPLayer(MegatronModule):
    """MiMo's. Every tensor-parallel rank has the whole matrix that joins hidden state and token: with sequence parallelism it
    joins those of its own places."""

    def __init__(
        self, config, decoder_layer: ModuleSpec, layer_number: int, vp_stage: int | None, **_
    ):
        super().__init__(config)
        self.layer_number = layer_number  # from 1; Megatron's block reads it
        self.token_layernorm, self.hidden_layernorm, self.final_layernorm = (
            gpt_layer_specs.TENorm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )
            for _ in range(3)
        )
        self.input_proj = new_weight(config, config.hidden_size, 2 * config.hidden_size)
        self.input_proj.sequence_parallel = (
            config.sequence_parallel
        )  # each rank sees its own tokens: gradients add up
        offset = get_transformer_layer_offset(
            config, vp_stage
        )  # which the layer adds to its number
        self.transformer_layer = build_module(
            decoder_layer,
            config=config,
            vp_stage=vp_stage,
            layer_number=config.num_layers + layer_number - offset,
        )

    def forward(self, hidden: Tensor, tokens: Tensor, **others) -> Tensor:
        """hidden, tokens (their embeddings): [s, b, h] of this rank's places -> [s, b, h]. others: as a decoder layer gets them"""
        compute = partial(self._compute, **others)
        if self.config.recompute_granularity == "full":
            return checkpoint(compute, False, hidden, tokens)
        return compute(hidden, tokens)

    def _compute(self, hidden: Tensor, tokens: Tensor, **others) -> Tensor:
        joined = torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(tokens)], -1)
        hidden, _ = self.transformer_layer(F.linear(joined, self.input_proj), None, **others)
        return self.final_layernorm(hidden)


def block_of(decoder_layer: ModuleSpec, number: int) -> MultiTokenPredictionBlockSubmodules:
    """The specification of so many layers."""
    layer = ModuleSpec(module=MTPLayer, params={"decoder_layer": decoder_layer})
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * number)


def hidden_ahead(model, hidden: Tensor, ids: list[Tensor], **others) -> list[Tensor]:
    """What each layer makes of its places, [s, b, h]. hidden: the last decoder layer's, before the last norm; ids [b, s] for each
    layer: the token behind each place, or -1 for none, whose embedding is zero."""
    group, results = mpu.get_tensor_model_parallel_group(), []
    # Recomputation needs inputs with a gradient.
    cut = (lambda x: x.detach().requires_grad_()) if model.detached else (lambda x: x)
    hidden = cut(hidden)
    for layer, behind in zip(model.mtp.layers, ids, strict=True):
        there = (behind >= 0).T[..., None]
        if model.config.sequence_parallel:
            there = there.chunk(group.size())[group.rank()]
        tokens = torch.where(there, model.embedding(behind.clamp(min=0), None), 0)
        hidden = layer(hidden, cut(tokens), **others)
        results.append(hidden)
    return results
