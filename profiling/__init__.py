"""Wall time by stage: `with profiler.stage("train_batch"):`."""

import time
from contextlib import contextmanager


class Profiler:
    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str):
        """Add the wall time [s] of the block to the stage `name`; stages may nest."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def pop(self) -> dict[str, float]:
        """{timing/<stage>: seconds} since the last call."""
        seconds, self.seconds = self.seconds, {}
        return {f"timing/{name}": value for name, value in seconds.items()}
