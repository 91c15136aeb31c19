"""The engine class for each value of model_engine."""

import warnings

from omegaconf import DictConfig

from engines.base import Engine

# Every rank would print these warnings: from megatron-core about optional packages, and from torch
# about deprecated names that Megatron uses.
HARMLESS_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "`torch.distributed.[a-z_]*_tensor` is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
)


def engine_class(model_engine: str) -> type[Engine]:
    """Return the class of an engine. The engine's packages are imported only in this call."""
    if model_engine == "megatron":
        for message in HARMLESS_WARNINGS:
            warnings.filterwarnings("ignore", message)
        from engines.megatron.engine import MegatronEngine

        return MegatronEngine
    from engines.fsdp.engine import FSDPEngine

    return FSDPEngine


def create_groups(config: DictConfig) -> None:
    """Create the process groups that all engines of a run share.

    Only Megatron has such groups. Its first engine creates them, so call this if that engine is
    not the trained model's.

    Args:
        config: the trained model's configuration.
    """
    if config.model_engine == "megatron":
        # Imported here, since megatron-core is not installed in every environment.
        from engines.megatron.layout import initialize
        from engines.megatron.without_cuda import cuda_is_cpu

        with cuda_is_cpu():
            initialize(config.engine)
