"""Tensors in msprobe's dumps, and the place of a dump's rank in the layout."""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

# Statistic -> its name in a dump.
STATISTICS = {"max": "Max", "min": "Min", "mean": "Mean", "l2norm": "Norm"}
# msprobe's name for a part of a call -> the name to use in tensor names.
PARTS = {"input_args": "input", "input_kwargs": "input"}
LAYER_OF_CHUNK = re.compile(
    r"(?P<before>Module\.(?P<chunk>\d+)\.(?:.+?\.)?(?:decoder|model)\.layers\.)(?P<number>\d+)(?=\.)"
)


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


def in_whole_model(name: str, first_layers: Sequence[int]) -> str:
    """Return a tensor's name with its layer's number in the whole model.

    first_layers: the number of the first layer in each of the rank's modules.
    """
    match = LAYER_OF_CHUNK.match(name)
    chunk = int(match["chunk"]) if match else 0
    if match is None or chunk >= len(first_layers):
        return name
    number = first_layers[chunk] + int(match["number"])
    return f"{match['before']}{number}{name[match.end() :]}"


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
