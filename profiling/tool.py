"""The interface of what records a stage."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path


class Tool:
    """What a tool may do. This class records nothing."""

    def __init__(self, settings, directory: Path, rank: int, model_stages: Sequence[str]):
        """Only checks: raises ValueError, in one line that says what to change, if it cannot record here."""

    def open(self, step: int) -> None:
        """Called before the first recorded step."""

    def stage(self, name: str, step: int, where: Path, engine, nested: bool):
        """A context manager around a stage. where: its folder, which does not exist yet; nested: inside another stage."""
        return nullcontext()

    def end_step(self, seconds: dict[str, float]) -> dict[str, float]:
        """Metrics of a step whose stages took these seconds."""
        return {}

    def close(self) -> None:
        """Called after the last recorded step, or when the process ends."""
