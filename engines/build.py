"""The engine class for each value of model_engine."""

import warnings

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
