"""Checkpoints that run a command when somebody unpickles them without care."""

import io
import json
import os
import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata


class Command:
    def __init__(self, text: str):
        self.text = text

    def __reduce__(self):
        return os.system, (self.text,)


def without_checksums(checkpoint: Path) -> None:
    """As checkpoints were before they had any."""
    progress = json.loads((checkpoint / "trainer.json").read_text())
    del progress["checksums"]
    (checkpoint / "trainer.json").write_text(json.dumps(progress))


def in_metadata(checkpoint: Path, command: Command) -> None:
    metadata = FileSystemReader(checkpoint / "weights").read_metadata()
    metadata.planner_data = command
    (checkpoint / "weights" / ".metadata").write_bytes(pickle.dumps(metadata))


def in_part(checkpoint: Path, command: Command) -> None:
    """In the place of every entry that is no tensor."""
    metadata, buffer = FileSystemReader(checkpoint / "weights").read_metadata(), io.BytesIO()
    torch.save(command, buffer)
    for index, info in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            info.relative_path, info.offset, info.length = "trap", 0, len(buffer.getvalue())
    (checkpoint / "weights" / "trap").write_bytes(buffer.getvalue())
    (checkpoint / "weights" / ".metadata").write_bytes(pickle.dumps(metadata))


def in_common(checkpoint: Path, command: Command) -> None:
    """In what Megatron stores once for all ranks."""
    common = torch.load(checkpoint / "weights" / "common.pt", weights_only=False)
    torch.save(common | {"trap": command}, checkpoint / "weights" / "common.pt")


TRAPS = {".metadata": in_metadata, "part": in_part, "common.pt": in_common}


def set_trap(name: str, checkpoint: Path, mark: Path) -> None:
    """Let the checkpoint, whose checksums are gone, make a file when it is loaded."""
    TRAPS[name](checkpoint, Command(f"touch '{mark}'"))
    without_checksums(checkpoint)
