"""An engine that is only a dictionary of tensors, and a tokenizer that is only a file."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from engines.checkpoint.checkpointer import Checkpointer
from engines.checkpoint.storage import Writer


class Killed(BaseException):
    """Stands for kill -9: no handler of an ordinary exception sees it."""


class StubEngine:
    """The part of an engine that a checkpoint needs: named tensors of a model directory."""

    has_unused_weights = False
    is_classifier = False

    def __init__(self, model: Path):
        self.config = OmegaConf.create({"model": {"path": str(model), "lora": {"rank": 0}}})
        self.weights = load_file(model / "model.safetensors")

    def state(self, loading: bool = False) -> dict:
        return {"model": self.weights}

    def load_state(self, state: dict) -> None:
        self.weights = state["model"]

    def write(self, states: dict, directory: Path, group: dist.ProcessGroup | None) -> None:
        dcp.save(states, storage_writer=Writer(directory))

    def read(self, states: dict, directory: Path) -> dict:
        dcp.load(states, checkpoint_id=directory)
        return states

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()

    def save_config(self, directory: Path) -> None:
        shutil.copy(Path(self.config.model.path) / "config.json", directory)


class StubTokenizer:
    def save_pretrained(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text('{"tokens": "a b c"}')


def save(checkpointer: Checkpointer, step: int, engine: StubEngine) -> Path:
    progress = {"step": step, "export_dtype": "float32"}
    checkpointer.save(step, engine, progress, StubTokenizer())
    return checkpointer.directory / f"step_{step:08d}"
