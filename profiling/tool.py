"""The interface of a tool that records stages."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stage:
    """One run of a stage.

    Attributes:
        step: counted from 1.
        directory: the stage's folder, which does not exist yet.
        engine: the engine whose modules run in the stage, or None.
        is_nested: whether the stage runs inside another stage.
    """

    name: str
    step: int
    directory: Path
    engine: object
    is_nested: bool


class Tool:
    """The base class of tools, which itself records nothing."""

    def __init__(self, settings, directory: Path, rank: int, model_stages: Sequence[str]):
        """Check that the tool can record on this machine, without starting it.

        Args:
            settings: the group `profiler` of the configuration.
            directory: for the tool's files.
            rank: this process's rank.
            model_stages: the stages of this run in which a model computes.

        Raises:
            ValueError: the tool cannot record; the message tells what to change.
        """

    def open(self, step: int) -> None:
        """Called before the first recorded step."""

    def stage(self, stage: Stage) -> AbstractContextManager:
        """Return a context manager around a stage."""
        return nullcontext()

    def end_step(self, seconds: dict[str, float]) -> dict[str, float]:
        """Return the tool's metrics at the end of a step. seconds: stage -> its wall time."""
        return {}

    def close(self) -> None:
        """Called after the last recorded step, or when the process ends."""
