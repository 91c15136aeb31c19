"""Tensors in msprobe's dumps, and how shards on several ranks make up the tensors of one model."""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

# Statistic -> its name in a dump.
STATISTICS = {"max": "Max", "min": "Min", "mean": "Mean", "l2norm": "Norm"}
# msprobe's name for a part of a call -> the name to use in tensor names.
PARTS = {"input_args": "input", "input_kwargs": "input"}
# Megatron module -> the equivalent Hugging Face module. Megatron fuses the qkv and
# gate-up projections with the norm before them, so these have no equivalent. Both engines have the
# same head.
SAME_MODULE = {
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
HEAD = "head"
MODULE_OUTPUT = re.compile(
    r"Module\.(?P<chunk>\d+)\.(?P<path>.*)\.(?!Identity)\w+"
    r"\.forward\.(?P<call>\d+)\.output\.(?P<index>\d+)"
)
LAYER = re.compile(r"(?:decoder|model)\.layers\.(?P<number>\d+)\.?(?P<module>.*)")
PADDING_MASK = re.compile(r"\.forward\.(?P<call>\d+)\.input\.padding_mask$")


# -- one rank --------------------------------------------------------------------------------------


@dataclass
class DumpedTensor:
    """A tensor in a dump.

    Attributes:
        statistics: name in STATISTICS -> value, or None if the dump has no such number.
        load: returns the tensor; None if the dump has only statistics.
    """

    name: str
    shape: list[int]
    dtype: str
    statistics: dict[str, float | None]
    load: Callable[[], Tensor] | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def read(rank: Path) -> dict[str, DumpedTensor]:
    """Return all tensors in one rank's dump by name, in the order in which they were computed."""
    tensors = {}
    calls = json.loads((rank / "dump.json").read_text())["data"]
    for name, call in calls.items():
        for part, value in call.items():
            for tensor in tensors_in(value, f"{name}.{PARTS.get(part, part)}", rank):
                tensors[tensor.name] = tensor
    return tensors


def tensors_in(value, name: str, rank: Path) -> Iterable[DumpedTensor]:
    """Yield the tensors in a value of a dump: a tensor's record, or nested lists and dicts."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return
    if "shape" in value:
        yield to_tensor(value, name, rank)
        return
    for key, inner in value.items():
        yield from tensors_in(inner, f"{name}.{key}", rank)


def to_tensor(record: dict, name: str, rank: Path) -> DumpedTensor:
    load = None
    if "data_name" in record:
        file = rank / "dump_tensor_data" / record["data_name"]
        load = partial(torch.load, file, map_location="cpu")
    statistics = {ours: to_number(record.get(theirs)) for ours, theirs in STATISTICS.items()}
    return DumpedTensor(name, record["shape"], record["dtype"], statistics, load)


def to_number(value) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def largest_difference(a: DumpedTensor, b: DumpedTensor) -> float | None:
    """Return the largest absolute difference between elements at the same index.

    None if a dump has only statistics, or the shapes differ.
    """
    if a.load is None or b.load is None or a.shape != b.shape or not a.size:
        return None
    return (a.load().double() - b.load().double()).abs().max().item()


# -- several ranks ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class AxisRank:
    """A rank's index along one axis of parallelism, and the number of ranks along it."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class Coordinates:
    """Where a rank's modules belong in the whole model, from a dump's coordinates.json.

    Attributes:
        engine: the name of the engine's class.
        dp, cp, tp, pp: data-, context-, tensor- and pipeline-parallel rank.
        first_layers: number of the first layer in each of the rank's modules.
        settings: other settings that determine how tensors are divided.
    """

    engine: str | None
    dp: AxisRank
    cp: AxisRank
    tp: AxisRank
    pp: AxisRank
    first_layers: Sequence[int]
    settings: dict

    @staticmethod
    def read(path: Path) -> "Coordinates":
        settings = json.loads(path.read_text())
        engine = settings.pop("of", None)
        axis_ranks = {axis: AxisRank(*settings.pop(axis, ())) for axis in ("dp", "cp", "tp", "pp")}
        first_layers = settings.pop("first_layers", ())
        return Coordinates(engine, **axis_ranks, first_layers=first_layers, settings=settings)

    @property
    def share(self) -> tuple[int, int]:
        """Data-parallel and context-parallel rank. Ranks with the same pair see the same tokens."""
        return self.dp.rank, self.cp.rank


@dataclass(frozen=True)
class RankDump:
    """A rank's dump of one run of a stage."""

    folder: Path
    coordinates: Coordinates

    @property
    def name(self) -> str:
        return self.folder.name


def read_ranks(stage: Path) -> list[RankDump]:
    """Return the dumps of all ranks in a stage's directory."""
    return [
        RankDump(folder, Coordinates.read(folder / "coordinates.json"))
        for folder in sorted(stage.iterdir())
    ]


@dataclass(frozen=True)
class Output:
    """An output of a module.

    Attributes:
        module: its Hugging Face name, with the layer's number in the whole model.
        index: the tensor's index among the module's outputs.
    """

    module: str
    index: int

    def __str__(self) -> str:
        return f"{self.module}.{self.index}"


@dataclass(frozen=True)
class OutputKey:
    """An output of a module in one of its calls."""

    call: int
    output: Output


@dataclass
class Share:
    """The outputs of forward passes on the ranks that see one share of the batch.

    Attributes:
        outputs: output -> its tensors, one per tensor-parallel rank. Ordered by call, then from the
            first pipeline stage to the last.
        padding: call -> masks [b, s], one per tensor-parallel rank; true where there is no token.
    """

    outputs: dict[OutputKey, list[DumpedTensor]] = field(default_factory=dict)
    padding: dict[int, list[DumpedTensor]] = field(default_factory=dict)


def gather(ranks: list[RankDump]) -> Share:
    """Gather the outputs of all ranks that see one share of the batch.

    ranks: the tensor- and pipeline-parallel ranks.
    """
    # Grouped by the module's first layer: chunks of a virtual pipeline alternate between ranks.
    outputs_of_module: dict[int, dict[OutputKey, list[DumpedTensor]]] = {}
    share = Share()
    for rank in sorted(ranks, key=lambda rank: rank.coordinates.tp.rank):
        first_layers = rank.coordinates.first_layers
        tensors = read(rank.folder)
        for name, tensor in tensors.items():
            key = canonical(name, first_layers)
            # Skip booleans (is_greedy): rounding can decide which of two tokens is the likeliest.
            if key is None or tensor.dtype == "torch.bool":
                continue
            first_layer = first_layers[chunk_of(name)]
            outputs = outputs_of_module.setdefault(first_layer, {})
            outputs.setdefault(key, []).append(tensor)
        if rank.coordinates.pp.rank == 0:
            for call, mask in padding_masks(tensors).items():
                share.padding.setdefault(call, []).append(mask)
    in_model_order = []
    for first_layer in sorted(outputs_of_module):
        in_model_order += outputs_of_module[first_layer].items()
    share.outputs = dict(sorted(in_model_order, key=lambda item: item[0].call))
    return share


def padding_masks(tensors: dict[str, DumpedTensor]) -> dict[int, DumpedTensor]:
    """Return the padding mask of each call, which is the same for every layer."""
    masks = {}
    for name, tensor in tensors.items():
        match = PADDING_MASK.search(name)
        if match:
            masks[int(match["call"])] = tensor
    return masks


def chunk_of(name: str) -> int:
    """Return the number of the rank's module, from a name like Module.{number}.{path}..."""
    return int(name.split(".")[1])


def canonical(name: str, first_layers: Sequence[int]) -> OutputKey | None:
    """Translate a tensor's name into an output of a Hugging Face module.

    The names of the module's class and of its wrappers are dropped. Returns None if the tensor is
    not an output of a forward pass, or if the module has no equivalent in the other engine.
    """
    match = MODULE_OUTPUT.fullmatch(name)
    if not match:
        return None
    path = match["path"].removeprefix("hf.")
    prefix = ""
    layer = LAYER.fullmatch(path)
    if layer:
        number = first_layers[int(match["chunk"])] + int(layer["number"])
        prefix = f"model.layers.{number}."
        path = layer["module"]
    module = SAME_MODULE.get(path, path)
    index = int(match["index"])
    if module not in SAME_MODULE.values() or (index and module != HEAD):
        return None
    return OutputKey(int(match["call"]), Output(prefix + module, index))


# -- shards of a tensor ----------------------------------------------------------------------------

TensorPair = tuple[DumpedTensor, DumpedTensor]


def pairs(a: Share, b: Share, key: OutputKey) -> list[TensorPair]:
    """Pair the tensors of an output that must hold the same numbers, perhaps in another order.

    The order may differ because padding moves the sequences of a micro-batch. If the sizes differ
    even after shards are joined, the padding that sequence parallelism adds to every sequence is
    removed. The list is empty if the sizes still differ.
    """
    shards_a = a.outputs[key]
    shards_b = b.outputs[key]
    matched = match_shards(shards_a, shards_b)
    if matched:
        return matched
    return match_shards(
        unpadded(shards_a, a.padding.get(key.call, [])),
        unpadded(shards_b, b.padding.get(key.call, [])),
    )


def match_shards(a: list[DumpedTensor], b: list[DumpedTensor]) -> list[TensorPair]:
    """Pair the shards of two runs, which are in the order of tensor-parallel ranks.

    If shards of both runs have the same size, they are paired directly. Otherwise, shards are
    joined if the sizes then match. The list is empty if no sizes match.
    """
    if a[0].size == b[0].size:
        return [(a[i % len(a)], b[i % len(b)]) for i in range(max(len(a), len(b)))]
    total_a = sum(shard.size for shard in a)
    total_b = sum(shard.size for shard in b)
    if a[0].size == total_b:
        return [(tensor, join(b)) for tensor in a]
    if total_a == b[0].size:
        return [(join(a), tensor) for tensor in b]
    if total_a == total_b:
        return [(join(a), join(b))]
    return []


def join(shards: list[DumpedTensor]) -> DumpedTensor:
    """Return a whole tensor's statistics, for shards along any dimension."""
    size = sum(shard.size for shard in shards)

    def mean(means: list[float]) -> float:
        return sum(value * shard.size for value, shard in zip(means, shards)) / size

    combine = {"max": max, "min": min, "mean": mean, "l2norm": lambda norms: math.hypot(*norms)}
    statistics = {}
    for name, function in combine.items():
        values = [shard.statistics[name] for shard in shards]
        statistics[name] = None if None in values else function(values)
    return DumpedTensor(shards[0].name, [size], shards[0].dtype, statistics, None)


def unpadded(shards: list[DumpedTensor], padding: list[DumpedTensor]) -> list[DumpedTensor]:
    """Return tensors [s, b, ...] without their padding.

    They stay as they are if the dump has only statistics, or if their lengths do not match the
    masks.
    """
    if shards[0].load is None or not any(mask.statistics["max"] for mask in padding):
        return shards
    total_length = sum(mask.shape[1] for mask in padding)
    length = shards[0].shape[0]
    if length * len(shards) == total_length:
        return [without_padding(shards, padding)]
    if length == total_length:
        return [without_padding([shard], padding) for shard in shards]
    return shards


def without_padding(shards: list[DumpedTensor], padding: list[DumpedTensor]) -> DumpedTensor:
    """Join shards [s, b, ...] along the sequence, and remove the padding."""
    is_padding = torch.cat([mask.load() for mask in padding], 1).T
    tensor = torch.cat([shard.load() for shard in shards])[~is_padding].float()
    statistics = dict.fromkeys(STATISTICS)
    if tensor.numel():
        statistics = {
            "max": tensor.max().item(),
            "min": tensor.min().item(),
            "mean": tensor.mean().item(),
            "l2norm": tensor.norm().item(),
        }
    return DumpedTensor(shards[0].name, list(tensor.shape), shards[0].dtype, statistics, None)
