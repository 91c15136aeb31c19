"""How Megatron parameters correspond to the weights in a Hugging Face model's files.

Megatron fuses matrices that the files keep separate:

* Query, key and value: for each key-value head, the rows of its query heads, then of the key, then
  of the value.
* Gate and up: each tensor-parallel rank has its rows of the gate matrix, then its rows of the up
  matrix.

It also pads the vocabulary, so that all tensor-parallel ranks hold equally many rows.
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
# Megatron name -> name in the files, outside of layers.
NAMES_OUTSIDE_LAYERS = {
    EMBEDDING: "model.embed_tokens.weight",
    OUTPUT_LAYER: "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
# Within a layer: prefix of the Megatron name -> prefixes of the names in the files, in the order
# of their rows. The first prefix that fits counts.
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
# transformers keeps these under other names than the files do, with all experts in one tensor:
# name in transformers -> Megatron name.
NAMES_IN_TRANSFORMERS = {
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.experts.gate_up_proj": "mlp.experts.linear_fc1",
    "mlp.experts.down_proj": "mlp.experts.linear_fc2",
}


@dataclass(frozen=True)
class Shard:
    """Which of several equal parts of a parameter a rank holds.

    index: the number of the part
    dim: the dimension that is divided; negative if none is
    """

    index: int = 0
    dim: int = 0


WHOLE = Shard()


@dataclass(frozen=True)
class RowRun:
    """Consecutive rows of a fused matrix that come from one of its source matrices.

    start: the first row, counted within the part of the fused matrix that is being filled
    source: the number of the source matrix
    first, last: the rows first:last of the source matrix
    """

    start: int
    source: int
    first: int
    last: int


class Mapping:
    """Maps between a model's files and Megatron parameters, named as if one module had all layers.

    head: with Head.VALUES the output matrix is never tied to the embedding.
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
        """Return the names in the files of the weights that a parameter holds, in row order.

        expert: the number of the expert, for a parameter that stacks several
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
        """Return a key that is equal for all weights in the files that one parameter holds."""
        hf_name = re.sub(r"\.experts\.\d+\.", ".experts.{}.", hf_name)
        for prefix, hf_prefixes in self.in_layers.items():
            for hf_prefix in hf_prefixes:
                before, separator, after = hf_name.partition(hf_prefix)
                if separator:
                    return f"{before}{prefix}{after}"
        return hf_name

    def rows_per_group(self, hf_names: list[str], num_rows: int) -> list[int]:
        """Return how many rows of each source matrix alternate in a rank's part of a fused matrix.

        num_rows: the number of rows of that part, which repeats the group until it is full
        """
        if len(hf_names) < 3:
            return [num_rows // len(hf_names)] * len(hf_names)
        dim = head_dim(self.hf_config)
        queries_per_key = self.hf_config.num_attention_heads // self.hf_config.num_key_value_heads
        return [queries_per_key * dim, dim, dim]

    def to_hf(self, name: str, parts: list[Tensor], dim: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the files, tensor) for everything that a parameter holds.

        parts: the parameter's parts on the ranks that divide it
        dim: the dimension by which they divide it
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
        """Yield (name, tensor) of a transformers model's parameters as the files name them.

        Experts, which transformers stacks, are separate there.
        """
        for name, parameter in hf.named_parameters():
            number, _, inside_layer = name.removeprefix("model.layers.").partition(".")
            if inside_layer in NAMES_IN_TRANSFORMERS:
                megatron_name = f"decoder.layers.{number}.{NAMES_IN_TRANSFORMERS[inside_layer]}"
                yield from self.to_hf(megatron_name, [parameter])
            else:
                yield name, parameter

    def load(self, models: list[nn.Module], path: Path) -> None:
        """Fill the models' parameters from safetensors files, reading only what this rank holds."""
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

        files: name -> the open safetensors file that holds it
        """
        sources = [files[hf_name].get_slice(hf_name) for hf_name in hf_names]
        size = tensor.shape[max(shard.dim, 0)]
        start = shard.index * size
        stop = start + size
        if shard.dim == 1:
            tensor.copy_(sources[0][:, start:stop])
            return
        tensor.zero_()  # Rows that pad the vocabulary are in no file.
        for run in row_runs(self.rows_per_group(hf_names, size), start, stop):
            source = sources[run.source]
            num_source_rows = source.get_shape()[0]
            rows = source[run.first : min(run.last, num_source_rows)]
            tensor[run.start : run.start + len(rows)].copy_(rows)


def row_runs(rows_per_group: list[int], start: int, stop: int) -> Iterator[RowRun]:
    """Yield the runs that make up the rows start:stop of a fused matrix, in order.

    rows_per_group: how many rows of each source matrix follow each other, repeatedly
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
    """Yield (name, parameter) of a pipeline stage, without adapters.

    Names count layers from the first layer of the whole model.
    """
    prefix = "decoder.layers."
    for name, parameter in model.named_parameters():
        if name.startswith(prefix):
            local_number, _, inside_layer = name.removeprefix(prefix).partition(".")
            number = model.decoder.layers[int(local_number)].layer_number - 1
            name = f"{prefix}{number}.{inside_layer}"
        if ".adapter." not in name:
            yield name, parameter
