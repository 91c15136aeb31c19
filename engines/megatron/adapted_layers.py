"""LoRA beside Megatron's linear layers, which fuse projections that Hugging Face has apart (q, k and v; gate and up): each
projection has an (A, B) pair of its own, so that files and results are PEFT's.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from omegaconf import DictConfig
from torch import Tensor, nn

from config import InputError
from engines.megatron.bridge import gather, on_all_stages, projections
from engines.megatron.layers import Adaptable, TorchRowParallelLinear
from engines.megatron.mapping import Mapping
from engines.model import lora
from engines.model.hf import stages_of_layers


class Adapter(nn.Module):
    """The adapters of one linear layer: lora_A[part] [rank, in features], lora_B[part] [out features, rank] of its parts
    q_proj, k_proj, ... A column-parallel layer divides B by rows, a row-parallel one A by columns; the other is whole on
    each tensor-parallel rank.

    All parts see the input through one dropout mask. It depends on the seed that stands when the pass begins (see
    DropoutSeeds), so that recomputation repeats it.
    """

    def __init__(
        self,
        layer: Adaptable,
        names: list[str],
        rows: list[int],
        tensors: dict[str, Tensor],
        settings: DictConfig,
    ):
        """names: of the layer's projections in the Hugging Face model. rows: how many of each lie one behind the other in the
        layer's matrix, again and again. tensors: what adapter matrices begin with, by name, whole; a projection that is not there
        gets none."""
        super().__init__()
        self.settings, self.enabled, self.generator = (
            settings,
            True,
            torch.Generator(layer.weight.device),
        )
        self.is_row, self.sequence_parallel = (
            isinstance(layer, TorchRowParallelLinear),
            layer.sequence_parallel,
        )
        self.group, self.in_turn = (
            layer.tp_group,
            {name.rpartition(".")[2]: number for name, number in zip(names, rows)},
        )
        self.num_turns = len(layer.weight) // sum(self.in_turn.values())
        self.lora_A, self.lora_B, self.names = nn.ParameterDict(), nn.ParameterDict(), {}
        for name, part in zip(names, self.in_turn):
            for kind, matrices, is_divided in (
                ("lora_A", self.lora_A, self.is_row),
                ("lora_B", self.lora_B, not self.is_row),
            ):
                full = tensors.get(f"{name}.{kind}.weight")
                if full is None:
                    continue
                dim = int(self.is_row)
                mine = full.chunk(self.group.size(), dim)[self.group.rank()] if is_divided else full
                matrix = nn.Parameter(
                    mine.to(layer.weight.device, getattr(torch, settings.dtype)).contiguous()
                )
                set_tensor_model_parallel_attributes(
                    matrix, is_divided, dim if is_divided else -1, 1
                )
                # A sees this rank's tokens alone: its gradients are added up.
                matrix.sequence_parallel = (
                    kind == "lora_A" and not self.is_row and self.sequence_parallel
                )
                matrices[part], self.names[matrix] = matrix, f"{name}.{kind}.weight"

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        """What the layer's matrix saw and what it made of it, [s, b, ...], of a row-parallel layer before ranks add it up ->
        the same and what adapters add."""
        if not self.enabled:
            return output
        a, b = (matrix.to(x.dtype) for matrix in self.matrices())
        x = F.linear(self.dropped(x), a)
        if self.is_row:
            b = copy_to_tensor_model_parallel_region(
                b, group=self.group
            )  # each rank's part of x: gradients are added up
        elif self.sequence_parallel:
            x = gather_from_sequence_parallel_region(x, group=self.group)
        else:
            x = copy_to_tensor_model_parallel_region(x, group=self.group)
        scale = self.settings.alpha / self.settings.rank
        return torch.addmm(output.flatten(0, 1), x.flatten(0, 1), b.t(), alpha=scale).view_as(
            output
        )

    def matrices(self) -> tuple[Tensor, Tensor]:
        """This rank's A [parts * rank, in], and B [out, parts * rank] with the rows of the fused matrix, where each has its own
        part's columns and is 0 in others: one product adds what all parts add."""
        rank, blocks, left = self.settings.rank, [], 0
        width = rank * len(self.lora_A)
        for part, rows in self.in_turn.items():
            if part in self.lora_B:
                block = F.pad(self.lora_B[part], (left, width - left - rank))
                left += rank
            else:
                block = next(iter(self.lora_B.values())).new_zeros(self.num_turns * rows, width)
            blocks.append(block.unflatten(0, (self.num_turns, rows)))
        return torch.cat(list(self.lora_A.values())), torch.cat(blocks, 1).flatten(0, 1)

    def dropped(self, x: Tensor) -> Tensor:
        p = self.settings.dropout
        if not self.training or not p:
            return x
        seed = int(torch.randint(2**62, ()))
        # Where the input is the same on all tensor-parallel ranks, so is the mask; else each has its own tokens or features.
        whole = not self.is_row and not self.sequence_parallel
        self.generator.manual_seed(seed if whole else seed + self.group.rank())
        return x * torch.empty_like(x).bernoulli_(1 - p, generator=self.generator).div_(1 - p)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        return lora.merge(weight, *self.matrices(), self.settings)


def check(config: DictConfig, hf_config, hf: nn.Module) -> None:
    """Raise InputError for adapters that this engine has none of. hf: the model on the meta device, which gets them."""
    settings, engine, tp = (
        config.model.lora,
        config.engine,
        config.engine.tensor_model_parallel_size,
    )
    lora.check(config, hf)
    if not settings.rank:
        return
    if gpt_layer_specs.HAVE_TE:
        raise InputError(
            "model.lora with model_engine=megatron needs an environment without TransformerEngine, whose layers do "
            "not show the normed input that adapters need"
        )
    names = lora.shapes(hf)
    if hf_config.num_key_value_heads % tp and any(
        f".{part}_proj." in name for name in names for part in "qkv"
    ):
        raise InputError(
            f"model.lora with engine.tensor_model_parallel_size={tp} needs as many key-value heads, the model has "
            f"{hf_config.num_key_value_heads}: lower it, or leave q_proj, k_proj and v_proj out of "
            "model.lora.target_modules"
        )
    adapted = {int(name.split(".layers.")[1].split(".")[0]) for name in names}
    num_stages = engine.pipeline_model_parallel_size * engine.virtual_pipeline_model_parallel_size
    num_layers = hf_config.num_hidden_layers
    for stage in torch.arange(num_layers).split(stages_of_layers(num_layers, num_stages)):
        if not adapted & set(stage.tolist()):
            raise InputError(
                f"model.lora.target_modules={settings.target_modules} leaves the pipeline stage of layers "
                f"{stage[0]} to {stage[-1]} without adapters"
            )


def attach(
    mapping: Mapping,
    models: list[nn.Module],
    config: DictConfig,
    shapes: dict[str, tuple[int, ...]],
) -> dict[nn.Parameter, Adapter]:
    """Freeze the models and put adapters of these shapes (whole, by name) beside their layers. Returns them by the weight that
    they adapt."""
    settings, adapters = config.model.lora, {}
    tensors = lora.start(settings, shapes, config.trainer.seed)
    for model in models:
        model.requires_grad_(False)
        for layer, names in projections(mapping, model):
            if any(f"{name}.lora_A.weight" in shapes for name in names):
                rows = mapping.in_turn(names, len(layer.weight))
                layer.adapter = adapters[layer.weight] = Adapter(
                    layer, names, rows, tensors, settings
                )
    return adapters


def names_in(model: nn.Module) -> dict[nn.Parameter, str]:
    return {
        p: name for m in model.modules() if isinstance(m, Adapter) for p, name in m.names.items()
    }


def export(
    models: list[nn.Module], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """(name as engines/model/lora.py has it, full tensor) of each adapter matrix, in the same order on all ranks."""
    found = {name: p for model in models for p, name in names_in(model).items()}
    for name, matrix, is_divided, dim in on_all_stages(found, dtype, device):
        parts = gather(matrix, mpu.get_tensor_model_parallel_group()) if is_divided else [matrix]
        yield name, torch.cat(parts, dim) if len(parts) > 1 else matrix


def sharded_state(model: nn.Module) -> dict[str, ShardedTensor]:
    """What a checkpoint holds of a model with adapters, named as in files: its adapters, and of a critic the value head."""
    names, tp, state = names_in(model), mpu.get_tensor_model_parallel_group(), {}
    for local, p in model.named_parameters():
        if p.requires_grad:
            division = [(p.partition_dim, tp.rank(), tp.size())] if p.tensor_model_parallel else []
            state[local] = ShardedTensor.from_rank_offsets(
                names.get(p, local),
                p,
                *division,
                replica_id=(
                    0,
                    0 if division else tp.rank(),
                    mpu.get_data_parallel_rank(with_context_parallel=True),
                ),
            )
    return state
