"""Random numbers for adapter dropout, reproducible after a resume."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from omegaconf import DictConfig


class DropoutSeeds:
    """Seeds the random generators for the passes of each train_batch().

    The seed depends only on trainer.seed, the step, the number of earlier batches in this step, and
    the ranks. So a resumed run draws the same numbers. The state of the user's own generators is
    restored after the passes.
    """

    def __init__(self, config: DictConfig):
        lora = config.model.lora
        self.seed = config.trainer.seed
        self.has_dropout = bool(lora.rank and lora.dropout)
        self._step: int | None = None
        self._batch_of_step = 0

    @contextmanager
    def seeded(self, step: int, *ranks: int) -> Iterator[None]:
        """Within this block, random generators start from this step's seed.

        ranks: this rank's number in each group whose ranks need different dropout masks.
        """
        if step == self._step:
            self._batch_of_step += 1
        else:
            self._batch_of_step = 0
        self._step = step
        if not self.has_dropout:
            yield
            return
        accelerators = []
        if torch.accelerator.is_available():
            accelerators = [torch.accelerator.current_device_index()]
        key = repr((self.seed, step, self._batch_of_step, *ranks))
        with torch.random.fork_rng(accelerators):
            torch.manual_seed(zlib.crc32(key.encode()))
            yield
