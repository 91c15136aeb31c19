"""Changes to the weights in a model's file."""

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor


def add_weight(directory: Path, name: str, tensor: Tensor) -> None:
    """Add a tensor to a model's file."""
    file = directory / "model.safetensors"
    save_file({**load_file(file), name: tensor}, file, metadata={"format": "pt"})


def rewrite_weights(directory: Path, change: Callable[[str, Tensor], tuple[str, Tensor]]) -> None:
    """Replace each weight's (name, tensor) in a model's file by change(name, tensor)."""
    file = directory / "model.safetensors"
    weights = dict(change(name, tensor) for name, tensor in load_file(file).items())
    save_file(weights, file, metadata={"format": "pt"})
