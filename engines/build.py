"""model_engine -> the class that builds it."""

from engines.base import Engine


def engine_class(name: str) -> type[Engine]:
    """The engine of this model_engine; its packages are imported only now."""
    if name == "megatron":
        from engines.megatron.engine import MegatronEngine
        return MegatronEngine
    from engines.fsdp.engine import FSDPEngine
    return FSDPEngine
