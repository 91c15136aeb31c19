"""How Megatron parameters correspond to the weights in a Hugging Face model's files.

Megatron fuses matrices that the files keep separate:

* Query, key and value: for each key-value head, first the rows of its query heads, then its key
  rows, then its value rows.
* Gate and up: for each tensor-parallel rank, first its rows of the gate matrix, then its rows of
  the up matrix.

Megatron also pads the vocabulary so that all tensor-parallel ranks hold equally many rows.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from megatron.core import parallel_state as mpu
from safetensors import safe_open
from torch import Tensor, nn

from engines.heads import Head
from engines.model.model_files import weight_files
from engines.model.shape import head_dim

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
# Megatron name -> name in the files, for weights outside layers.
NAMES_OUTSIDE_LAYERS = {
    EMBEDDING: "model.embed_tokens.weight",
    OUTPUT_LAYER: "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
# Prefix of a Megatron name within a layer -> prefixes of the names in the files, in the order of
# their rows. The first matching prefix applies.
NAMES_IN_LAYERS = {
    "self_attention.linear_qkv.layer_norm_": ["input_layernorm."],
    "self_attention.linear_qkv.": ["self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."],
    "self_attention.linear_proj.": ["self_attn.o_proj."],
    "self_attention.q_layernorm.": ["self_attn.q_norm."],
    "self_attention.k_layernorm.": ["self_attn.k_norm."],
    "mlp.linear_fc1.layer_norm_": ["post_attention_layernorm."],
    "mlp.linear_fc1.": ["mlp.gate_proj.", "mlp.up_proj."],
    "mlp.linear_fc2.": ["mlp.down_proj."],
    "pre_mlp_layernorm.": ["post_attention_layernorm."],
    "mlp.router.": ["mlp.gate."],
    "mlp.experts.linear_fc1": ["mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"],
    "mlp.experts.linear_fc2": ["mlp.experts.{}.down_proj.weight"],
    # Only in layers for multi-token prediction.
    "token_layernorm.": ["token_layernorm."],
    "hidden_layernorm.": ["hidden_layernorm."],
    "final_layernorm.": ["final_layernorm."],
    "input_proj": ["input_proj.weight"],
}
MIXTRAL_NAMES = {
    "mlp.router.": ["block_sparse_moe.gate."],
    "mlp.experts.linear_fc1": [
        "block_sparse_moe.experts.{}.w1.weight",
        "block_sparse_moe.experts.{}.w3.weight",
    ],
    "mlp.experts.linear_fc2": ["block_sparse_moe.experts.{}.w2.weight"],
}
# Name in transformers -> Megatron name, for the weights that transformers renames or stacks when it
# loads them.
NAMES_IN_TRANSFORMERS = {
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.experts.gate_up_proj": "mlp.experts.linear_fc1",
    "mlp.experts.down_proj": "mlp.experts.linear_fc2",
}


@dataclass(frozen=True)
class Shard:
    """A rank's part of a parameter that is divided into equal parts.

    index: the number of the part
    dim: the dimension that is divided; negative if the parameter is not divided
    """

    index: int = 0
    dim: int = 0


WHOLE = Shard()


@dataclass(frozen=True)
class RowRun:
    """Consecutive rows of a fused matrix that come from the same source matrix.

    start: the first of these rows, counted from the start of this rank's part of the fused matrix
    source: the number of the source matrix
    first, last: the same rows in the source matrix are first:last
    """

    start: int
    source: int
    first: int
    last: int


class Mapping:
    """Maps between the weights in a model's files and Megatron parameters.

    Megatron parameters are named as if one module had all layers: see global_parameters().

    head: with Head.VALUES, the output matrix is never tied to the embedding
    """

    def __init__(self, hf_config, head: Head = Head.LOG_PROBS):
        self.hf_config = hf_config
        self.outside_layers = dict(NAMES_OUTSIDE_LAYERS)
        self.in_layers = dict(NAMES_IN_LAYERS)
        if hf_config.model_type == "mixtral":
            self.in_layers |= MIXTRAL_NAMES
        if hf_config.tie_word_embeddings and head is not Head.VALUES:
            self.outside_layers[OUTPUT_LAYER] = self.outside_layers[EMBEDDING]

    def hf_names(self, name: str, expert: int = 0) -> list[str]:
        """Return the file names of the weights that a Megatron parameter holds, in row order.

        Args:
            name: the parameter's name.
            expert: the number of the expert, for a parameter that stacks experts.
        """
        if name in self.outside_layers:
            return [self.outside_layers[name]]
        block, _, inside_block = name.partition(".layers.")
        inside_block = inside_block.replace("transformer_layer.", "")
        number, _, inside_layer = inside_block.partition(".")
        layers = "mtp_layers" if block == "mtp" else "layers"
        prefix = next(prefix for prefix in self.in_layers if inside_layer.startswith(prefix))
        suffix = inside_layer.removeprefix(prefix)
        return [
            f"model.{layers}.{number}.{hf_prefix.format(expert)}{suffix}"
            for hf_prefix in self.in_layers[prefix]
        ]

    def parameter_key(self, hf_name: str) -> str:
        """Return a key that identifies the Megatron parameter that holds a weight of the files."""
        hf_name = re.sub(r"\.experts\.\d+\.", ".experts.{}.", hf_name)
        for prefix, hf_prefixes in self.in_layers.items():
            for hf_prefix in hf_prefixes:
                before, separator, after = hf_name.partition(hf_prefix)
                if separator:
                    return f"{before}{prefix}{after}"
        return hf_name

    def rows_per_group(self, hf_names: list[str], num_rows: int) -> list[int]:
        """Return the number of rows of each source matrix in one group of a fused matrix.

        A rank's part of a fused matrix consists of such groups. For query, key and value, a group
        is a key-value head; for gate and up, it is the whole part.

        Args:
            num_rows: the number of rows in a rank's part.
        """
        if len(hf_names) < 3:
            return [num_rows // len(hf_names)] * len(hf_names)
        dim = head_dim(self.hf_config)
        queries_per_key = self.hf_config.num_attention_heads // self.hf_config.num_key_value_heads
        return [queries_per_key * dim, dim, dim]

    def to_hf(self, name: str, parts: list[Tensor], dim: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the files, tensor) for all weights that a parameter holds.

        Args:
            parts: the parameter's parts from the ranks that divide it.
            dim: the dimension that they divide.
        """
        if ".experts." in name:
            yield from self._experts_to_hf(name, parts)
            return
        hf_names = self.hf_names(name)
        group = self.rows_per_group(hf_names, len(parts[0]))
        whole = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
        if len(hf_names) == 1:
            if name in (EMBEDDING, OUTPUT_LAYER):
                whole = whole[: self.hf_config.vocab_size]
            yield hf_names[0], whole
        else:
            groups = whole.unflatten(0, (-1, sum(group)))
            for hf_name, matrix in zip(hf_names, groups.split(group, 1)):
                yield hf_name, matrix.flatten(0, 1)

    def _experts_to_hf(self, name: str, parts: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        for number, expert in enumerate(chain.from_iterable(parts)):
            hf_names = self.hf_names(name, number)
            yield from zip(hf_names, expert.chunk(len(hf_names)))

    def hf_parameters(self, hf: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the files, tensor) for the parameters of a transformers model.

        Experts are yielded one by one, as in the files; transformers stacks them.
        """
        for name, parameter in hf.named_parameters():
            number, _, inside_layer = name.removeprefix("model.layers.").partition(".")
            if inside_layer in NAMES_IN_TRANSFORMERS:
                megatron_name = f"decoder.layers.{number}.{NAMES_IN_TRANSFORMERS[inside_layer]}"
                yield from self.to_hf(megatron_name, [parameter])
            else:
                yield name, parameter

    def load(self, models: list[nn.Module], path: Path) -> None:
        """Fill the models' parameters from safetensors files. Only this rank's parts are read."""
        with ExitStack() as stack, torch.no_grad():
            files = {}
            for path_of_file in weight_files(path):
                file = stack.enter_context(safe_open(path_of_file, framework="pt"))
                files |= dict.fromkeys(file.keys(), file)
            for name, parameter in chain.from_iterable(map(global_parameters, models)):
                if ".experts." in name:
                    self._load_experts(name, parameter, files)
                else:
                    self._load_parameter(name, parameter, files)

    def _load_experts(self, name: str, parameter: nn.Parameter, files: dict) -> None:
        first_expert = len(parameter) * mpu.get_expert_model_parallel_rank()
        for number, expert in enumerate(parameter, first_expert):
            self._read(expert, self.hf_names(name, number), files, WHOLE)

    def _load_parameter(self, name: str, parameter: nn.Parameter, files: dict) -> None:
        rank = 0
        if parameter.tensor_model_parallel:
            rank = mpu.get_tensor_model_parallel_rank()
        shard = Shard(rank, parameter.partition_dim)
        self._read(parameter, self.hf_names(name), files, shard)

    def _read(self, tensor: Tensor, hf_names: list[str], files: dict, shard: Shard) -> None:
        """Fill a tensor with its shard of the named weights.

        Args:
            files: name of a weight -> the open safetensors file that contains it.
        """
        sources = [files[hf_name].get_slice(hf_name) for hf_name in hf_names]
        size = tensor.shape[max(shard.dim, 0)]
        start = shard.index * size
        stop = start + size
        if shard.dim == 1:
            tensor.copy_(sources[0][:, start:stop])
            return
        # Rows that pad the vocabulary are not in the files; they stay zero.
        tensor.zero_()
        for run in row_runs(self.rows_per_group(hf_names, size), start, stop):
            source = sources[run.source]
            num_source_rows = source.get_shape()[0]
            rows = source[run.first : min(run.last, num_source_rows)]
            tensor[run.start : run.start + len(rows)].copy_(rows)


def row_runs(rows_per_group: list[int], start: int, stop: int) -> Iterator[RowRun]:
    """Yield the runs that make up the rows start:stop of a fused matrix, in order.

    Args:
        rows_per_group: the number of rows of each source matrix in a group.
    """
    group_size = sum(rows_per_group)
    num_groups = -(-stop // group_size)
    for group in range(start // group_size, num_groups):
        begin = group * group_size
        for source, num_rows in enumerate(rows_per_group):
            low = max(start, begin)
            high = min(stop, begin + num_rows)
            if low < high:
                offset = group * num_rows - begin
                yield RowRun(low - start, source, low + offset, high + offset)
            begin += num_rows


def global_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) for a pipeline stage, without adapters.

    Layers in names are numbered from the first layer of the whole model, not of the stage.
    """
    prefix = "decoder.layers."
    for name, parameter in model.named_parameters():
        if name.startswith(prefix):
            local_number, _, inside_layer = name.removeprefix(prefix).partition(".")
            number = model.decoder.layers[int(local_number)].layer_number - 1
            name = f"{prefix}{number}.{inside_layer}"
        if ".adapter." not in name:
            yield name, parameter
