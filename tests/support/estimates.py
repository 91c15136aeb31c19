"""The engines' estimates of memory as dry_run prints them, by label."""

from omegaconf import DictConfig

from engines.build import engine_class
from engines.heads import Head
from engines.memory import GIB


def head_of(role: str) -> Head:
    return Head.VALUES if role == "critic" else Head.LOG_PROBS


def estimate_bytes(
    config: DictConfig, world_size: int, device_type: str, role: str = "actor"
) -> list[dict[str, float]]:
    """Return label -> bytes for each pipeline stage."""
    estimates = engine_class(config.model_engine).estimate_memory(
        config, world_size, device_type, head_of(role), is_trained=role != "reference"
    )
    return [estimate.rows() for estimate in estimates]


def estimate_gib(
    config: DictConfig, world_size: int, device_type: str, role: str = "actor"
) -> list[dict[str, float]]:
    """Return label -> GiB for each pipeline stage."""
    stages = []
    for stage in estimate_bytes(config, world_size, device_type, role):
        stages.append({label: size / GIB for label, size in stage.items()})
    return stages


def checkpoint_bytes(config: DictConfig, role: str = "actor") -> int:
    return engine_class(config.model_engine).checkpoint_bytes(config, head_of(role))
