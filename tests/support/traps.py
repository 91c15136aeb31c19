"""Checkpoints that run a command when they are unpickled carelessly."""

import io
import json
import os
import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata


class Command:
    """An object whose pickle runs a shell command."""

    def __init__(self, text: str):
        self.text = text

    def __reduce__(self):
        return os.system, (self.text,)


def without_checksums(checkpoint: Path) -> None:
    """Remove the checksums, which early versions did not write."""
    progress = json.loads((checkpoint / "trainer.json").read_text())
    del progress["checksums"]
    (checkpoint / "trainer.json").write_text(json.dumps(progress))


def in_metadata(checkpoint: Path, command: Command) -> None:
    """Put the command into .metadata."""
    metadata = FileSystemReader(checkpoint / "weights").read_metadata()
    metadata.planner_data = command
    (checkpoint / "weights" / ".metadata").write_bytes(pickle.dumps(metadata))


def in_part(checkpoint: Path, command: Command) -> None:
    """Put the command in place of every entry that is not a tensor."""
    metadata = FileSystemReader(checkpoint / "weights").read_metadata()
    buffer = io.BytesIO()
    torch.save(command, buffer)
    for index, info in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            info.relative_path = "trap"
            info.offset = 0
            info.length = len(buffer.getvalue())
    (checkpoint / "weights" / "trap").write_bytes(buffer.getvalue())
    (checkpoint / "weights" / ".metadata").write_bytes(pickle.dumps(metadata))


def in_common(checkpoint: Path, command: Command) -> None:
    """Put the command into the file that Megatron writes once for all ranks."""
    common = torch.load(checkpoint / "weights" / "common.pt", weights_only=False)
    torch.save(common | {"trap": command}, checkpoint / "weights" / "common.pt")


TRAPS = {".metadata": in_metadata, "part": in_part, "common.pt": in_common}


def set_trap(name: str, checkpoint: Path, mark: Path) -> None:
    """Make a checkpoint create the file `mark` when it is loaded carelessly.

    It loses its checksums, which would reveal the change.
    """
    TRAPS[name](checkpoint, Command(f"touch '{mark}'"))
    without_checksums(checkpoint)
