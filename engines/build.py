"""model_engine -> the class that builds it."""

import warnings

from engines.base import Engine

# What each rank would be told by megatron-core about packages that are optional, and by torch about names that Megatron uses.
NOISE = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "`torch.distributed.[a-z_]*_tensor` is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
)


def engine_class(name: str) -> type[Engine]:
    """The engine of this model_engine; its packages are imported only now."""
    if name == "megatron":
        for message in NOISE:
            warnings.filterwarnings("ignore", message)
        from engines.megatron.engine import MegatronEngine

        return MegatronEngine
    from engines.fsdp.engine import FSDPEngine

    return FSDPEngine
