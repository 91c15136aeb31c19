"""Write a checkpoint's files, verify them with checksums, and read them without running code."""

import json
import os
import pickle
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from common import disk
from common.checksum import checksum
from config import InputError

# The classes that torch pickles into .metadata, by module. Dtypes are allowed as well.
METADATA_CLASSES = {
    "torch": ["Size"],
    "torch.serialization": ["_get_layout"],
    "pathlib": ["PosixPath"],
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch.distributed.checkpoint.metadata": [*metadata.__all__, "_MEM_FORMAT_ENCODING"],
}
# Environment variables that make torch.load() reject pickles with more than data.
WEIGHTS_ONLY = {
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0",
}


class Writer(FileSystemWriter):
    """torch's writer, but a full disk raises InputError on all ranks.

    If there is too little free space from the start, the error is raised before anything is
    written.
    """

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        disk.require(self.path, sum(map(num_bytes, plans)))
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner):
        with disk.writing(self.path, num_bytes(plan)):
            return super().write_data(plan, planner)


def num_bytes(plan: SavePlan) -> int:
    """Return the total size in bytes of the tensors in a rank's plan."""
    tensors = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    return sum(tensor.chunk.sizes.numel() * tensor.properties.dtype.itemsize for tensor in tensors)


@contextmanager
def original_errors() -> Iterator[None]:
    """Replace torch's CheckpointException by the error of the first rank that failed.

    CheckpointException is not a subclass of Exception, so the usual handlers would miss it.
    """
    try:
        yield
    except CheckpointException as error:
        first_failure = next(iter(error.failures.values()))
        raise first_failure[0] from error


def read_tensors(
    checkpoint: Path, prefix: str, is_skipped: Callable[[str], bool]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name without the prefix, tensor) for every stored name that starts with `prefix`.

    Tensors are read one at a time, in the dtype in which they were stored. No process group is
    needed.

    Args:
        is_skipped: takes a name without the prefix; returns True for a tensor to skip.
    """
    reader = FileSystemReader(checkpoint / "weights")
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        name = key.removeprefix(prefix)
        if name == key or is_skipped(name):
            continue
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        dcp.load({key: tensor}, storage_reader=reader, no_dist=True)
        yield name, tensor


# -- checksums -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    """The contents of trainer.json, the last file of a checkpoint to be written."""

    # The script's state: the step, the position in the data, the settings for adapters...
    progress: dict
    # Path relative to the checkpoint -> checksum, for all other files. Empty for checkpoints that
    # an early version wrote.
    checksums: dict[str, str]


def write_manifest(checkpoint: Path, progress: dict, checksums: dict[str, str]) -> None:
    """Write trainer.json, and wait until the whole checkpoint is on disk.

    The key "checksums" in trainer.json lists every file of the checkpoint. The entry for
    trainer.json itself is the checksum of `progress`.

    Args:
        checksums: checksums that are already known, by file name. This function adds the missing
            ones.
    """
    files = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    for name in files - checksums.keys():
        checksums[name] = checksum(checkpoint / name)
    checksums["trainer.json"] = progress_checksum(progress)

    trainer_file = checkpoint / "trainer.json"
    trainer_file.write_text(json.dumps(progress | {"checksums": checksums}, indent=1))
    # Called for its side effect: checksum() also calls fsync on the file.
    checksum(trainer_file)
    for directory in {checkpoint, *(path.parent for path in checkpoint.rglob("*"))}:
        sync_directory(directory)


def read_manifest(checkpoint: Path) -> Manifest:
    """Read trainer.json.

    Raises:
        InputError: if the file is missing, or has changed since it was written.
    """
    try:
        progress = json.loads((checkpoint / "trainer.json").read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{checkpoint} is not a checkpoint, or is damaged: cannot read trainer.json: {error}"
        ) from None
    checksums = progress.pop("checksums", {})
    if checksums and checksums.pop("trainer.json", None) != progress_checksum(progress):
        raise InputError(f"{checkpoint} is damaged: trainer.json has changed since it was written")
    return Manifest(progress, checksums)


def progress_checksum(progress: dict) -> str:
    return f"{zlib.crc32(json.dumps(progress).encode()):08x}"


def find_damage(
    checkpoint: Path, checksums: dict[str, str], rank: int = 0, world_size: int = 1
) -> list[str]:
    """Verify this rank's share of a checkpoint's files, and return one message per problem."""
    damage = []
    if rank == 0:
        damage += find_unlisted_files(checkpoint, checksums)
    for name in sorted(checksums)[rank::world_size]:
        try:
            is_intact = checksum(checkpoint / name) == checksums[name]
        except OSError as error:
            damage.append(f"{name}: {error.strerror}")
            continue
        if not is_intact:
            damage.append(f"{name} has changed since it was written")
    return damage


def find_unlisted_files(checkpoint: Path, checksums: dict[str, str]) -> list[str]:
    """Return one message for every weight file without a checksum."""
    if not checksums:
        print(
            f"{checkpoint} cannot be verified: an earlier version wrote it without checksums",
            flush=True,
        )
        return []
    files = {f"weights/{path.name}" for path in (checkpoint / "weights").glob("*")}
    return [f"{name} is not listed in trainer.json" for name in files - checksums.keys()]


def sync_directory(path: Path) -> None:
    """Wait until a directory's entries are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# -- pickles ---------------------------------------------------------------------------------------


class MetadataUnpickler(pickle.Unpickler):
    """Unpickles .metadata. A pickle can call functions by name; only harmless ones are allowed."""

    def find_class(self, module: str, name: str):
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


@contextmanager
def data_only(checkpoint: Path) -> Iterator[None]:
    """Within this block, which reads a checkpoint's weights, reject pickles that run code.

    torch and Megatron unpickle .metadata, common.pt and parts of other files, and a pickle can run
    any command.

    Raises:
        InputError: if a pickle contains more than tensors, numbers and text.
    """
    before = {name: os.environ.get(name, "0") for name in WEIGHTS_ONLY}
    os.environ.update(WEIGHTS_ONLY)
    try:
        with original_errors(), open(checkpoint / "weights" / ".metadata", "rb") as file:
            MetadataUnpickler(file).load()
            yield
    except pickle.UnpicklingError as error:
        function = re.search(r"GLOBAL (\S+)", str(error))
        call = function[1] if function else error
        raise InputError(
            f"{checkpoint} was not loaded: a pickle in it contains code, which calls {call}"
        ) from None
    finally:
        os.environ.update(before)
