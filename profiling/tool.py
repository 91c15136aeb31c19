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
        is_nested: whether it runs inside another stage.
    """

    name: str
    step: int
    directory: Path
    engine: object
    is_nested: bool


class Tool:
    """What a tool may do. This class records nothing."""

    def __init__(self, settings, directory: Path, rank: int, model_stages: Sequence[str]):
        """Check that the tool can record here, and start nothing.

        Raises:
            ValueError: it cannot; one line says what to change.
        """

    def open(self, step: int) -> None:
        """Called before the first recorded step."""

    def stage(self, stage: Stage) -> AbstractContextManager:
        """Return a context manager around a stage."""
        return nullcontext()

    def end_step(self, seconds: dict[str, float]) -> dict[str, float]:
        """Return metrics of a step whose stages took these seconds."""
        return {}

    def close(self) -> None:
        """Called after the last recorded step, or when the process ends."""
