"""Tensors of msprobe's dumps, and how those of several ranks make up the tensors of one."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

STATISTICS = {"max": "Max", "min": "Min", "mean": "Mean", "l2norm": "Norm"}
PARTS = {"input_args": "input", "input_kwargs": "input"}
# Megatron's module -> Hugging Face's that computes the same. Its qkv and gate-up projections, fused with the norm before
# them, have no partner. The head is the engines' own.
SAME = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "input_layernorm": "input_layernorm",
    "self_attention": "self_attn",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp": "mlp",
    "mlp.linear_fc2": "mlp.down_proj",
    "": "",
    "head": "head",
}


@dataclass
class Dumped:
    """A tensor of a dump; load() returns it, and is None where the dump has statistics alone."""

    name: str
    shape: list[int]
    dtype: str
    statistics: dict[str, float | None]
    load: Callable[[], Tensor] | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def read(rank: Path) -> dict[str, Dumped]:
    """All tensors of one rank's dump by name, in the order in which they were computed."""
    found = {}

    def add(name: str, value) -> None:
        if isinstance(value, list):
            value = dict(enumerate(value))
        if not isinstance(value, dict):
            return
        if "shape" not in value:
            for key, inner in value.items():
                add(f"{name}.{key}", inner)
            return
        file = rank / "dump_tensor_data" / value["data_name"] if "data_name" in value else None
        found[name] = Dumped(
            name,
            value["shape"],
            value["dtype"],
            {k: number(value.get(v)) for k, v in STATISTICS.items()},
            partial(torch.load, file, map_location="cpu") if file else None,
        )

    for name, call in json.loads((rank / "dump.json").read_text())["data"].items():
        for part, value in call.items():
            add(f"{name}.{PARTS.get(part, part)}", value)
    return found


def largest_difference(a: Dumped, b: Dumped) -> float | None:
    """Of any two elements; None where a dump has statistics alone, or the shapes differ."""
    if a.load is None or b.load is None or a.shape != b.shape or not a.size:
        return None
    return (a.load().double() - b.load().double()).abs().max().item()


def number(value) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


# -- several ranks -----------------------------------------------------------------------------------------------------


@dataclass
class Share:
    """What the tensor and pipeline parallel ranks of one share of the batch dumped of the outputs of forward passes, call by
    call from the first pipeline stage to the last.

    outputs   {(call, module in Hugging Face's terms, index): tensors of the tensor-parallel ranks}
    padding   {call: masks [b, s] of the tensor-parallel ranks, where there is no token}
    """

    outputs: dict[tuple[int, str, int], list[Dumped]]
    padding: dict[int, list[Dumped]]


def gather(ranks: dict[Path, dict]) -> Share:
    """ranks: {folder of a rank: its coordinates}."""
    chunks, padding = {}, {}
    for rank, place in sorted(ranks.items(), key=lambda item: item[1]["tp"]):
        masks = {}
        for name, tensor in read(rank).items():
            key, mask = (
                canonical(name, place["first_layers"]),
                re.search(r"\.forward\.(\d+)\.input\.padding_mask$", name),
            )
            if mask and place["pp"][0] == 0:
                masks[int(mask[1])] = tensor  # the same for every layer
            if (
                key and tensor.dtype != "torch.bool"
            ):  # the likeliest word may be another where two are near
                chunk = place["first_layers"][int(name.split(".")[1])]
                chunks.setdefault(chunk, {}).setdefault(key, []).append(tensor)
        for call, mask in masks.items():
            padding.setdefault(call, []).append(mask)
    outputs = [item for chunk in sorted(chunks) for item in chunks[chunk].items()]
    return Share(dict(sorted(outputs, key=lambda item: item[0][0])), padding)


def canonical(name: str, first_layers: list[int]) -> tuple[int, str, int] | None:
    """(call, module, index) of a tensor that a module's forward pass outputs, in Hugging Face's terms with the layer's number
    in the whole model, without classes and wrappers. None for one that has no partner."""
    match = re.fullmatch(
        r"Module\.(\d+)\.(.*)\.(?!Identity)\w+\.forward\.(\d+)\.output\.(\d+)", name
    )
    if not match:
        return None
    chunk, path, call, index = (
        int(match[1]),
        match[2].removeprefix("hf."),
        int(match[3]),
        int(match[4]),
    )
    layer = re.fullmatch(r"(?:decoder|model)\.layers\.(\d+)\.?(.*)", path)
    prefix, last = (
        (f"model.layers.{first_layers[chunk] + int(layer[1])}.", layer[2]) if layer else ("", path)
    )
    last = SAME.get(last, last if last in SAME.values() else None)
    return None if last is None or index and last != "head" else (call, prefix + last, index)


def pairs(a: Share, b: Share, key: tuple[int, str, int]) -> list[tuple[Dumped, Dumped]]:
    """The tensors of this output that must hold the same numbers, perhaps in another order: sequences of a micro-batch change
    places with their padding. Empty: their sizes fit neither as they are, nor joined, nor without the padding that sequence
    parallelism adds to every sequence."""
    left, right = a.outputs[key], b.outputs[key]
    return whole(left, right) or whole(
        unpadded(left, a.padding.get(key[0], [])), unpadded(right, b.padding.get(key[0], []))
    )


def whole(a: list[Dumped], b: list[Dumped]) -> list[tuple[Dumped, Dumped]]:
    """Pairs out of tensors by tensor-parallel rank: as they are where both are whole or divided alike, joined where their
    sizes say that only together they are whole."""
    if a[0].size == b[0].size:
        return [(a[i % len(a)], b[i % len(b)]) for i in range(max(len(a), len(b)))]
    totals = [sum(x.size for x in side) for side in (a, b)]
    if a[0].size == totals[1]:
        return [(x, join(b)) for x in a]
    if totals[0] == b[0].size:
        return [(join(a), y) for y in b]
    return [(join(a), join(b))] if totals[0] == totals[1] else []


def join(parts: list[Dumped]) -> Dumped:
    """What disjoint parts of a tensor say of the whole, whichever dimension divides them."""
    size = sum(x.size for x in parts)

    def combine(name: str, of: Callable[[list[float]], float]) -> float | None:
        values = [x.statistics[name] for x in parts]
        return None if None in values else of(values)

    statistics = {
        "max": combine("max", max),
        "min": combine("min", min),
        "mean": combine(
            "mean", lambda means: sum(mean * x.size for mean, x in zip(means, parts)) / size
        ),
        "l2norm": combine("l2norm", lambda norms: math.hypot(*norms)),
    }
    return Dumped(parts[0].name, [size], parts[0].dtype, statistics, None)


def unpadded(parts: list[Dumped], padding: list[Dumped]) -> list[Dumped]:
    """Tensors [s, b, ...] without the places of padding; as they are where the dump has statistics alone."""
    length = sum(mask.shape[1] for mask in padding)
    rows = (
        [parts]
        if parts[0].shape[0] * len(parts) == length
        else [[x] for x in parts]
        if parts[0].shape[0] == length
        else []
    )
    if not rows or parts[0].load is None or not any(mask.statistics["max"] for mask in padding):
        return parts

    def describe(some: list[Dumped]) -> Dumped:
        x = torch.cat([x.load() for x in some])[
            ~torch.cat([mask.load() for mask in padding], 1).T
        ].float()
        values = (
            (x.max().item(), x.min().item(), x.mean().item(), x.norm().item())
            if x.numel()
            else [None] * len(STATISTICS)
        )
        return Dumped(
            some[0].name, list(x.shape), some[0].dtype, dict(zip(STATISTICS, values)), None
        )

    return [describe(some) for some in rows]
