"""The files of a checkpoint: written, verified by checksums, and read as data."""

import json
import os
import pickle
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from common import disk
from config import InputError

# What torch writes into .metadata besides its dtypes.
METADATA = {
    "torch": ["Size"],
    "torch.serialization": ["_get_layout"],
    "pathlib": ["PosixPath"],
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch.distributed.checkpoint.metadata": [*metadata.__all__, "_MEM_FORMAT_ENCODING"],
}


class Writer(FileSystemWriter):
    """torch's, which raises InputError on all ranks if the disk is full; before the first byte if free space shows it."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        disk.require(self.path, sum(map(num_bytes, plans)))
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner):
        with disk.writing(self.path, num_bytes(plan)):
            return super().write_data(plan, planner)


def num_bytes(plan: SavePlan) -> int:
    """Bytes of the tensors that one rank writes."""
    tensors = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    return sum(tensor.chunk.sizes.numel() * tensor.properties.dtype.itemsize for tensor in tensors)


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise what the first rank that failed raised instead of torch's CheckpointException, which is no Exception."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


# -- checksums ---------------------------------------------------------------------------------------------------------


def checksum(path: Path) -> str:
    """crc32 and length of a file, which is on the disk when this returns."""
    size = crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(2**22):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        os.fsync(file.fileno())
    return f"{crc:08x} {size}"


def sync_directory(path: Path) -> None:
    """Return when the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_trainer(checkpoint: Path, progress: dict, checksums: dict[str, str]) -> None:
    """Write trainer.json, the last file of a checkpoint: progress and, under "checksums", the checksum of every file, its own
    being that of progress. checksums: those that are known already."""
    rest = {
        str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()
    } - checksums.keys()
    checksums |= {name: checksum(checkpoint / name) for name in rest} | {
        "trainer.json": checksum_of(progress)
    }
    (checkpoint / "trainer.json").write_text(
        json.dumps(progress | {"checksums": checksums}, indent=1)
    )
    checksum(checkpoint / "trainer.json")
    for directory in {checkpoint, *(path.parent for path in checkpoint.rglob("*"))}:
        sync_directory(directory)


def read_trainer(checkpoint: Path) -> tuple[dict, dict[str, str]]:
    """progress and the checksums of the other files ({}: an earlier version wrote none). Raises InputError if trainer.json is
    not as it was written."""
    try:
        progress = json.loads((checkpoint / "trainer.json").read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{checkpoint} is no checkpoint, or damaged: trainer.json: {error}"
        ) from None
    checksums = progress.pop("checksums", {})
    if checksums and checksums.pop("trainer.json", None) != checksum_of(progress):
        raise InputError(f"{checkpoint} is damaged: trainer.json is not as it was written")
    return progress, checksums


def checksum_of(progress: dict) -> str:
    return f"{zlib.crc32(json.dumps(progress).encode()):08x}"


def find_damage(
    checkpoint: Path, checksums: dict[str, str], rank: int = 0, world_size: int = 1
) -> list[str]:
    """What is wrong with this rank's share of the files."""
    damage = []
    if rank == 0 and not checksums:
        print(
            f"{checkpoint} has no checksums, an earlier version wrote it: it is not verified",
            flush=True,
        )
    elif rank == 0:
        there = {f"weights/{path.name}" for path in (checkpoint / "weights").glob("*")}
        damage += [f"{name} was not written with it" for name in there - checksums.keys()]
    for name in sorted(checksums)[rank::world_size]:
        try:
            if checksum(checkpoint / name) != checksums[name]:
                damage.append(f"{name} is not as it was written")
        except OSError as error:
            damage.append(f"{name}: {error.strerror}")
    return damage


def stored_tensors(
    checkpoint: Path, prefix: str, left_out: Callable[[str], bool]
) -> Iterator[tuple[str, Tensor]]:
    """(name without the prefix, tensor as it was stored), one at a time, without a process group."""
    reader = FileSystemReader(checkpoint / "weights")
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        name = key.removeprefix(prefix)
        if name != key and not left_out(name):
            tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
            dcp.load({key: tensor}, storage_reader=reader, no_dist=True)
            yield name, tensor


# -- pickles -----------------------------------------------------------------------------------------------------------


class MetadataUnpickler(pickle.Unpickler):
    """For .metadata. A pickle names functions to call: only harmless ones are allowed."""

    def find_class(self, module: str, name: str):
        if (
            name in METADATA.get(module, ())
            or module == "torch"
            and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


@contextmanager
def data_alone(checkpoint: Path) -> Iterator[None]:
    """Around code that reads a checkpoint's weights. torch and Megatron unpickle .metadata, common.pt and parts of other
    files, and a pickle can run commands: raises InputError for one that holds more than tensors, numbers and text."""
    forced = {
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0",
    }  # for torch.load
    before = {name: os.environ.get(name, "0") for name in forced}
    os.environ.update(forced)
    try:
        with unwrapped(), open(checkpoint / "weights" / ".metadata", "rb") as file:
            MetadataUnpickler(file).load()
            yield
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise InputError(
            f"{checkpoint} is not loaded: it is not data alone, a pickle in it calls "
            f"{named[1] if named else error}"
        ) from None
    finally:
        os.environ.update(before)
