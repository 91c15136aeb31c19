"""Keep other packages from printing what tells a user nothing."""

import logging


def quiet_torchao() -> None:
    """Silence what torchao prints when it is imported. Call this before importing transformers.

    transformers imports torchao if it is installed, in every run. It then warns of kernels that it
    cannot load, which no run here needs, and torch warns about how it registers two enums.
    """
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").addFilter(is_not_about_enums)


def is_not_about_enums(record: logging.LogRecord) -> bool:
    return "is an Enum subclass" not in record.getMessage()
