"""LoRA adapters next to Megatron's linear layers.

Megatron fuses projections that Hugging Face keeps separate (q, k and v; gate and up). Each of these
projections has its own pair (A, B), so that files and results are the same as PEFT's.
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
from engines.megatron.bridge import (
    WeightMapping,
    adaptable_layers,
    gather_parts,
    parameters_of_all_stages,
)
from engines.megatron.torch_layers import AdaptableLinear, TorchRowParallelLinear
from engines.model import lora
from engines.model.shape import stage_sizes


class Adapter(nn.Module):
    """The adapters of one linear layer, which may fuse several projections.

    lora_A[projection] is [rank, in features], lora_B[projection] is [out features, rank], where a
    projection is named q_proj, k_proj, ... Tensor-parallel ranks divide the rows of B in a
    column-parallel layer, and the columns of A in a row-parallel layer. The other matrix is whole
    on every rank.

    All projections share one dropout mask on the input. It depends on torch's seed at the start of
    the pass (see DropoutSeeds), so recomputation repeats it.
    """

    def __init__(
        self,
        layer: AdaptableLinear,
        names: list[str],
        rows_per_group: list[int],
        tensors: dict[str, Tensor],
        settings: DictConfig,
    ):
        """Create this rank's parts of a layer's adapters.

        Args:
            names: the names of the layer's projections in the Hugging Face model.
            rows_per_group: see Mapping.rows_per_group().
            tensors: name -> initial value of the whole matrix. A projection that is not in it gets
                no adapter.
            settings: model.lora.
        """
        super().__init__()
        self.settings = settings
        self.enabled = True
        self.generator = torch.Generator(layer.weight.device)
        self.is_row_parallel = isinstance(layer, TorchRowParallelLinear)
        self.sequence_parallel = layer.sequence_parallel
        self.group = layer.tp_group
        self.num_groups = len(layer.weight) // sum(rows_per_group)
        self.lora_A = nn.ParameterDict()
        self.lora_B = nn.ParameterDict()
        self.rows_per_group: dict[str, int] = {}
        self.names: dict[nn.Parameter, str] = {}
        for name, num_rows in zip(names, rows_per_group):
            projection = name.rpartition(".")[2]
            self.rows_per_group[projection] = num_rows
            for kind, matrices in (("lora_A", self.lora_A), ("lora_B", self.lora_B)):
                matrix_name = f"{name}.{kind}.weight"
                if matrix_name in tensors:
                    matrix = self._own_part(tensors[matrix_name], kind)
                    matrices[projection] = matrix
                    self.names[matrix] = matrix_name

    def _own_part(self, whole: Tensor, kind: str) -> nn.Parameter:
        """Return this rank's part of an adapter matrix, with Megatron's attributes.

        Args:
            kind: "lora_A" or "lora_B".
        """
        is_divided = (kind == "lora_A") == self.is_row_parallel
        dim = int(self.is_row_parallel)
        part = whole.chunk(self.group.size(), dim)[self.group.rank()] if is_divided else whole
        dtype = getattr(torch, self.settings.dtype)
        matrix = nn.Parameter(part.to(self.generator.device, dtype).contiguous())
        set_tensor_model_parallel_attributes(matrix, is_divided, dim if is_divided else -1, 1)
        # With sequence parallelism, A in a column-parallel layer sees only this rank's tokens, so
        # its gradients are summed over the ranks.
        sees_own_tokens = kind == "lora_A" and not self.is_row_parallel
        matrix.sequence_parallel = sees_own_tokens and self.sequence_parallel
        return matrix

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        """Add the adapters' contribution to a layer's output.

        Args:
            x: [s, b, in], the input of the layer's matrix.
            output: [s, b, out]. A row-parallel layer has not yet summed it over ranks.
        """
        if not self.enabled:
            return output
        a, b = (matrix.to(x.dtype) for matrix in self.matrices())
        x = F.linear(self.dropped(x), a)
        if self.is_row_parallel:
            # Each rank has its own part of x, so the gradients of B are summed over the ranks.
            b = copy_to_tensor_model_parallel_region(b, group=self.group)
        elif self.sequence_parallel:
            x = gather_from_sequence_parallel_region(x, group=self.group)
        else:
            x = copy_to_tensor_model_parallel_region(x, group=self.group)
        scale = self.settings.alpha / self.settings.rank
        added = torch.addmm(output.flatten(0, 1), x.flatten(0, 1), b.t(), alpha=scale)
        return added.view_as(output)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return this rank's matrices for all projections together.

        They are A [projections * rank, in] and B [out, projections * rank]. B has the rows of the
        fused matrix. Each row is nonzero only in the columns of its own projection, so one product
        computes the contributions of all projections.
        """
        rank = self.settings.rank
        width = rank * len(self.lora_A)
        blocks = []
        left = 0
        for projection, num_rows in self.rows_per_group.items():
            if projection in self.lora_B:
                block = F.pad(self.lora_B[projection], (left, width - left - rank))
                left += rank
            else:
                any_matrix = next(iter(self.lora_B.values()))
                block = any_matrix.new_zeros(self.num_groups * num_rows, width)
            blocks.append(block.unflatten(0, (self.num_groups, num_rows)))
        return torch.cat(list(self.lora_A.values())), torch.cat(blocks, 1).flatten(0, 1)

    def dropped(self, x: Tensor) -> Tensor:
        """Apply dropout to the input of a layer's matrix."""
        p = self.settings.dropout
        if not self.training or not p:
            return x
        seed = int(torch.randint(2**62, ()))
        # If all tensor-parallel ranks have the same input, they need the same mask. Otherwise each
        # rank has its own tokens or features, and needs its own mask.
        is_input_shared = not self.is_row_parallel and not self.sequence_parallel
        self.generator.manual_seed(seed if is_input_shared else seed + self.group.rank())
        mask = torch.empty_like(x).bernoulli_(1 - p, generator=self.generator)
        return x * mask.div_(1 - p)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return the layer's weight with the adapters merged into it."""
        return lora.merge(weight, *self.matrices(), self.settings)


def check_adapters(config: DictConfig, hf_config, hf: nn.Module) -> None:
    """Raise InputError for adapters that this engine does not support.

    Args:
        hf: the model on the meta device. This function adds PEFT's adapters to it.
    """
    settings = config.model.lora
    tp = config.engine.tensor_model_parallel_size
    lora.check_config(config, hf)
    if not settings.rank:
        return
    if gpt_layer_specs.HAVE_TE:
        raise InputError(
            "model.lora with model_engine=megatron needs an environment without TransformerEngine: "
            "TransformerEngine's layers do not expose the normalized input that adapters read"
        )
    names = lora.shapes(hf)
    adapts_attention_input = any(
        f".{projection}." in name for name in names for projection in ("q_proj", "k_proj", "v_proj")
    )
    if adapts_attention_input and hf_config.num_key_value_heads % tp:
        raise InputError(
            f"engine.tensor_model_parallel_size={tp} does not divide the model's "
            f"{hf_config.num_key_value_heads} key-value heads, as model.lora requires. Lower "
            "engine.tensor_model_parallel_size, or leave q_proj, k_proj and v_proj out of "
            "model.lora.target_modules."
        )
    check_stages_have_adapters(config, hf_config.num_hidden_layers, list(names))


def layer_number(name: str) -> int:
    """Return the number of the layer in a name such as model.layers.3.mlp.up_proj.lora_A.weight."""
    after_layers = name.split(".layers.")[1]
    return int(after_layers.split(".")[0])


def check_stages_have_adapters(config: DictConfig, num_layers: int, names: list[str]) -> None:
    """Raise InputError if a pipeline stage would have nothing to train.

    Args:
        names: the names of all adapter matrices.
    """
    engine = config.engine
    adapted_layers = {layer_number(name) for name in names}
    num_stages = engine.pipeline_model_parallel_size * engine.virtual_pipeline_model_parallel_size
    for stage in torch.arange(num_layers).split(stage_sizes(num_layers, num_stages)):
        if not adapted_layers & set(stage.tolist()):
            raise InputError(
                f"model.lora.target_modules={config.model.lora.target_modules} leaves the pipeline "
                f"stage of layers {stage[0]} to {stage[-1]} without adapters. Adapt layers of "
                "every stage."
            )


def attach_adapters(
    mapping: WeightMapping,
    models: list[nn.Module],
    config: DictConfig,
    shapes: dict[str, tuple[int, ...]],
) -> dict[nn.Parameter, Adapter]:
    """Freeze the models, and attach adapters to their layers.

    Args:
        shapes: name of an adapter matrix -> its unsharded shape.

    Returns:
        {adapted weight: its adapter}.
    """
    settings = config.model.lora
    tensors = lora.initial_adapter(settings, shapes, config.trainer.seed)
    adapters = {}
    for model in models:
        model.requires_grad_(False)
        for layer, names in adaptable_layers(mapping, model):
            if any(f"{name}.lora_A.weight" in shapes for name in names):
                rows_per_group = mapping.rows_per_group(names, len(layer.weight))
                layer.adapter = Adapter(layer, names, rows_per_group, tensors, settings)
                adapters[layer.weight] = layer.adapter
    return adapters


def adapter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return {adapter matrix: its name in PEFT's files} for a model."""
    names = {}
    for module in model.modules():
        if isinstance(module, Adapter):
            names |= module.names
    return names


def export_adapters(
    models: list[nn.Module], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name as in engines/model/lora.py, full tensor), in the same order on all ranks.

    Only for models with adapters. A value head, which is trained as well, keeps its Megatron name.
    """
    matrices = {}
    for model in models:
        names = adapter_names(model)
        for local_name, parameter in model.named_parameters():
            if parameter.requires_grad:
                matrices[names.get(parameter, local_name)] = parameter
    tp_group = mpu.get_tensor_model_parallel_group()
    for part in parameters_of_all_stages(matrices, dtype, device):
        parts = gather_parts(part.value, tp_group) if part.is_divided else [part.value]
        yield part.name, torch.cat(parts, part.dim) if len(parts) > 1 else parts[0]


def sharded_adapter_state(model: nn.Module) -> dict[str, ShardedTensor]:
    """Return the checkpoint state of a model with adapters: its trained parameters only.

    These are the adapters, stored under their names in PEFT's files, and a value head if there is
    one.
    """
    names = adapter_names(model)
    tp_group = mpu.get_tensor_model_parallel_group()
    dp_rank = mpu.get_data_parallel_rank(with_context_parallel=True)
    state = {}
    for local_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        offsets = []
        tp_replica = tp_group.rank()
        if parameter.tensor_model_parallel:
            offsets = [(parameter.partition_dim, tp_group.rank(), tp_group.size())]
            tp_replica = 0
        state[local_name] = ShardedTensor.from_rank_offsets(
            names.get(parameter, local_name),
            parameter,
            *offsets,
            replica_id=(0, tp_replica, dp_rank),
        )
    return state
