"""The ranks and devices that a run is planned for: its own or, in a dry run, assumed ones."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from common.counting import count_of
from config import InputError
from engines.memory import GIB
from engines.parallel import device as devices


@dataclass(frozen=True)
class Hardware:
    """The devices of a run, one for each rank.

    Attributes:
        world_size: the number of ranks.
        device_type: for example "cuda".
        device_bytes: the memory of each device; 0 for a CPU.
        is_assumed: whether the dry run plans for other hardware than it runs on.
    """

    world_size: int
    device_type: str
    device_bytes: int
    is_assumed: bool = False

    @classmethod
    def of(cls, config: DictConfig, device: torch.device) -> "Hardware":
        """Return this process group's hardware or, with `assume`, a planned run's hardware.

        Raises:
            InputError: if GPUs are assumed but not their memory, on a machine without GPUs.
        """
        own = cls(dist.get_world_size(), device.type, devices.capacity(device))
        assumed = config.assume
        if assumed.num_gpus is None and assumed.gpu_memory_gib is None:
            return own
        device_bytes = own.device_bytes
        if assumed.gpu_memory_gib is not None:
            device_bytes = int(assumed.gpu_memory_gib * GIB)
        if not device_bytes:
            raise InputError(
                f"assume.num_gpus={assumed.num_gpus} needs assume.gpu_memory_gib on a machine "
                "without GPUs: for an H100 of 80 GB, set assume.gpu_memory_gib=79"
            )
        device_type = "cuda" if own.device_type == "cpu" else own.device_type
        return cls(assumed.num_gpus or own.world_size, device_type, device_bytes, is_assumed=True)

    def describe(self) -> str:
        """Describe the ranks and their devices, as "8 ranks on cuda"."""
        text = f"{count_of(self.world_size, 'rank')} on {self.device_type}"
        if self.device_bytes:
            text += f" with {self.device_bytes / GIB:.1f} GiB each"
        return text + " (assumed)" * self.is_assumed


def check_assumptions(config: DictConfig) -> None:
    """Raise InputError if hardware is assumed for a run that is not a dry run."""
    for key, value in config.assume.items():
        if value is not None and not config.dry_run:
            raise InputError(
                f"assume.{key}={value} does nothing without dry_run=true: set it, or leave out "
                f"assume.{key}"
            )
