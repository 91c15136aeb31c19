"""Where Megatron keeps the weights of a Hugging Face model: under which names, and which rows of which matrices in one.

Megatron fuses the query, key and value matrices: for each key-value head the rows of its queries, of the key, of the value.
It fuses the gate and up matrices too: each tensor-parallel rank has its rows of the one, then its rows of the other. Its
vocabulary is padded, so that the ranks have equal parts.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import torch
from megatron.core import parallel_state as mpu
from safetensors import safe_open
from torch import Tensor, nn

from engines.heads import Head
from engines.model.hf import head_dim
from engines.model.weights import weight_files

OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
# How names begin in a layer, and the beginnings that stand for them, in the order of their rows; the first that fits counts.
IN_LAYER = {
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
    # Of multi-token prediction alone.
    **{name: [name] for name in ("token_layernorm.", "hidden_layernorm.", "final_layernorm.")},
    "input_proj": ["input_proj.weight"],
}
MIXTRAL = {
    "mlp.router.": ["block_sparse_moe.gate."],
    "mlp.experts.linear_fc1": [
        "block_sparse_moe.experts.{}.w1.weight",
        "block_sparse_moe.experts.{}.w3.weight",
    ],
    "mlp.experts.linear_fc2": ["block_sparse_moe.experts.{}.w2.weight"],
}
# What transformers holds in other tensors than files do.
IN_TRANSFORMERS = {
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.experts.gate_up_proj": "mlp.experts.linear_fc1",
    "mlp.experts.down_proj": "mlp.experts.linear_fc2",
}


class Mapping:
    """Between the files of a model and Megatron's parameters, which are called as if one module had all layers."""

    def __init__(self, hf_config, head: Head = Head.LOG_PROBS):
        self.hf_config = hf_config
        self.outside, self.in_layer = (
            dict(OUTSIDE),
            IN_LAYER | (MIXTRAL if hf_config.model_type == "mixtral" else {}),
        )
        if hf_config.tie_word_embeddings and head is not Head.VALUES:
            self.outside["output_layer.weight"] = "model.embed_tokens.weight"

    def names(self, name: str, expert: int = 0) -> list[str]:
        """The names in files of what a Megatron parameter holds, in the order of its rows."""
        if name in self.outside:
            return [self.outside[name]]
        place, _, name = name.partition(".layers.")
        layer, _, inner = name.replace("transformer_layer.", "").partition(".")
        layer = f"model.{'mtp_' * (place == 'mtp')}layers.{layer}"
        begin = next(begin for begin in self.in_layer if inner.startswith(begin))
        return [
            f"{layer}.{hf_name.format(expert)}{inner.removeprefix(begin)}"
            for hf_name in self.in_layer[begin]
        ]

    def holder(self, name: str) -> str:
        """A name in files -> the same for all that one Megatron parameter holds."""
        name = re.sub(r"\.experts\.\d+\.", ".experts.{}.", name)
        found = (
            f"{before}{begin}{after}"
            for begin, parts in self.in_layer.items()
            for part in parts
            for before, found, after in [name.partition(part)]
            if found
        )
        return next(found, name)

    def in_turn(self, names: list[str], num_rows: int) -> list[int]:
        """How many rows of each matrix lie one behind the other, again and again, in a fused one of num_rows rows on a rank."""
        if len(names) < 3:
            return [num_rows // len(names)] * len(names)
        dim = head_dim(self.hf_config)
        return [
            self.hf_config.num_attention_heads // self.hf_config.num_key_value_heads * dim,
            dim,
            dim,
        ]

    def separate(
        self, name: str, parts: list[Tensor], dim: int = 0
    ) -> Iterator[tuple[str, Tensor]]:
        """(name in files, tensor) from a parameter's parts on the ranks that divide it by this dimension."""
        if ".experts." in name:
            for i, expert in enumerate(chain.from_iterable(parts)):
                names = self.names(name, i)
                yield from zip(names, expert.chunk(len(names)))
            return
        names = self.names(name)
        turns = self.in_turn(names, len(parts[0]))
        whole = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
        if len(names) == 1:
            padded = name in ("embedding.word_embeddings.weight", "output_layer.weight")
            yield names[0], whole[: self.hf_config.vocab_size] if padded else whole
        else:
            split = whole.unflatten(0, (-1, sum(turns))).split(turns, 1)
            yield from zip(names, (matrix.flatten(0, 1) for matrix in split))

    def in_files(self, hf: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of a transformers model's parameters as files hold them: every expert by itself."""
        for name, p in hf.named_parameters():
            layer, _, inner = name.removeprefix("model.layers.").partition(".")
            if inner in IN_TRANSFORMERS:
                yield from self.separate(f"decoder.layers.{layer}.{IN_TRANSFORMERS[inner]}", [p])
            else:
                yield name, p

    def load(self, models: list[nn.Module], path: Path) -> None:
        """Read what this rank holds of every parameter from the safetensors files, and no more."""
        rank, files = mpu.get_tensor_model_parallel_rank(), {}
        with ExitStack() as stack, torch.no_grad():
            for file in weight_files(path):
                tensors = stack.enter_context(safe_open(file, framework="pt"))
                files |= dict.fromkeys(tensors.keys(), tensors)
            for name, p in chain.from_iterable(map(global_parameters, models)):
                if ".experts." in name:
                    for i, expert in enumerate(p, len(p) * mpu.get_expert_model_parallel_rank()):
                        self.read(expert, self.names(name, i), files)
                else:
                    self.read(
                        p,
                        self.names(name),
                        files,
                        rank if p.tensor_model_parallel else 0,
                        p.partition_dim,
                    )

    def read(
        self, tensor: Tensor, names: list[str], files: dict, part: int = 0, dim: int = 0
    ) -> None:
        """Fill a tensor, the part-th of equal parts by this dimension. files: an open file for each name."""
        sources, size = [files[n].get_slice(n) for n in names], tensor.shape[max(dim, 0)]
        start, stop = part * size, (part + 1) * size
        if dim == 1:
            tensor.copy_(sources[0][:, start:stop])
            return
        tensor.zero_()  # the padding of the vocabulary
        for row, i, first, last in rows(self.in_turn(names, size), start, stop):
            found = sources[i][first : min(last, sources[i].get_shape()[0])]
            tensor[row : row + len(found)].copy_(found)


def rows(turns: list[int], start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """What the rows start:stop of a fused matrix are: (the first of them counted from start, which matrix, from which row of it,
    to which), one run of rows after another. turns: how many rows of each matrix lie one behind the other, again and again."""
    for turn in range(start // sum(turns), -(-stop // sum(turns))):
        begin = turn * sum(turns)
        for i, number in enumerate(turns):
            low, high = max(start, begin), min(stop, begin + number)
            if low < high:
                yield low - start, i, turn * number + low - begin, turn * number + high - begin
            begin += number


def global_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of a pipeline stage with its layers counted from the model's first; without adapters."""
    for name, p in model.named_parameters():
        if name.startswith("decoder.layers."):
            layer, _, inner = name.removeprefix("decoder.layers.").partition(".")
            name = f"decoder.layers.{model.decoder.layers[int(layer)].layer_number - 1}.{inner}"
        if ".adapter." not in name:
            yield name, p
