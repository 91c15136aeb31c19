"""Changes to a model before it is wrapped in DDP, in the order in which they are applied.

Features that are fields of Megatron's configuration must be set before the model is built: see
config_fields(). All others change the built modules: see TRANSFORMS. To add one, write a function
that takes a Changes, and append it to that list.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from omegaconf import DictConfig
from torch import Tensor, nn

from engines.heads import Head
from engines.megatron.adapters import Adapter, attach_adapters
from engines.megatron.bridge import WeightMapping
from engines.megatron.gpt import HiddenStates
from engines.megatron.mapping import global_parameters
from engines.model import lora
from engines.model.hf import keep_zero_padding_row

# engine.recompute -> fields of TransformerConfig.
RECOMPUTE_FIELDS = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


@dataclass
class Changes:
    """The model that transforms change, with their inputs and results.

    models: this rank's part of the model, one module per virtual pipeline stage
    hf: the model on the meta device, with PEFT's adapters if the run has adapters
    frozen: the names, in the files, of the weights that model.freeze matches
    adapters: adapted weight -> its adapter; filled by attach_lora()
    """

    config: DictConfig
    head: Head
    models: list[HiddenStates]
    mapping: WeightMapping
    hf: nn.Module
    frozen: set[str]
    adapters: dict[nn.Parameter, Adapter] = field(default_factory=dict)


def config_fields(
    config: DictConfig, device: torch.device, sequence_parallel: bool
) -> dict[str, Any]:
    """Return the fields of TransformerConfig for this run's features."""
    return {
        "sequence_parallel": sequence_parallel,
        # The loss is already divided, so neither the schedule nor DDP may divide it again.
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": device.type != "cpu",
        **RECOMPUTE_FIELDS[config.engine.recompute],
    }


def freeze(changes: Changes) -> None:
    """Freeze the parameters that model.freeze matches."""
    for model in changes.models:
        for name, parameter in global_parameters(model):
            hf_name = changes.mapping.hf_names(name)[0]
            parameter.requires_grad_(hf_name not in changes.frozen)


def attach_lora(changes: Changes) -> None:
    """Freeze the model except for a value head, and attach adapters to it."""
    settings = changes.config.model.lora
    if not settings.rank:
        return
    changes.adapters = attach_adapters(
        changes.mapping, changes.models, changes.config, lora.shapes(changes.hf)
    )
    has_value_head = changes.head is Head.VALUES
    if changes.adapters and has_value_head and mpu.is_pipeline_last_stage(ignore_virtual=True):
        value_head = changes.models[-1].output_layer
        value_head.to(getattr(torch, settings.dtype)).requires_grad_()


def require_embedding_gradient(changes: Changes) -> None:
    """Make the embedding's output require a gradient, for full recomputation.

    After a frozen embedding, Megatron would silently compute no gradients for recomputed layers.
    """
    if changes.config.engine.recompute != "full":
        return
    for model in changes.models:
        if model.pre_process:
            model.embedding.register_forward_hook(require_gradient)


def require_gradient(_: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    return output.requires_grad_()


def keep_padding_embedding(changes: Changes) -> None:
    """Block gradients to a padding token's row that is zero: see keep_zero_padding_row()."""
    padding_row = changes.hf.get_input_embeddings().padding_row
    for model in changes.models:
        if model.pre_process or model.mtp_process:
            keep_padding_row_of_shard(model.embedding.word_embeddings, padding_row)


def keep_padding_row_of_shard(embedding: nn.Module, padding_row: int | None) -> None:
    """Apply keep_zero_padding_row() to an embedding whose rows tensor-parallel ranks divide."""
    group = mpu.get_tensor_model_parallel_group()
    own_is_zero = (embedding.weight.detach() == 0).all(1)
    is_zero = [torch.empty_like(own_is_zero) for _ in range(group.size())]
    dist.all_gather(is_zero, own_is_zero, group=group)

    def to_output_layout(mask: Tensor) -> Tensor:
        """Convert a mask [b, s] to the layout of the embedding's output."""
        if embedding.reduce_scatter_embeddings:
            return mask.t().chunk(group.size())[group.rank()]
        return mask

    keep_zero_padding_row(embedding, padding_row, torch.cat(is_zero), to_output_layout)


TRANSFORMS: list[Callable[[Changes], None]] = [
    freeze,
    attach_lora,
    require_embedding_gradient,
    keep_padding_embedding,
]


def apply_transforms(changes: Changes) -> None:
    """Apply all transforms in order."""
    for transform in TRANSFORMS:
        transform(changes)
