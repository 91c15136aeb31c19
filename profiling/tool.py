"""The interface of what records a stage."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path


class Tool:
    """What a tool may do; by itself it records nothing."""

    def __init__(self, settings, directory: Path, rank: int, model_stages: Sequence[str]):
        """Only check: raises ValueError, in a line that says what to change, for what cannot be recorded here."""

    def open(self, step: int) -> None:
        """Before the first step that is recorded."""

    def stage(self, name: str, step: int, where: Path, engine, nested: bool):
        """A context manager around a stage; where: its folder, not made yet; nested: inside another stage."""
        return nullcontext()

    def end_step(self, seconds: dict[str, float]) -> dict[str, float]:
        """Metrics of a step, whose stages took these seconds."""
        return {}

    def close(self) -> None:
        """After the last step that was recorded, or when the process ends."""
