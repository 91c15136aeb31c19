"""What a run does about other packages: name one that is missing, and silence one that warns."""

import logging
import platform
import sys
import traceback
from typing import NoReturn

from configs.environment import is_first_of_node


def exit_without(error: ModuleNotFoundError) -> NoReturn:
    """Print which module is missing, once per node, and exit with code 2.

    Usually another Python has been started.
    """
    if is_first_of_node():
        print(f"error: {describe(error)}", file=sys.stderr)
    sys.exit(2)


def describe(error: ModuleNotFoundError) -> str:
    """Return which module is missing, in which Python, for which file, and what to do."""
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame.filename for frame in frames if not frame.filename.startswith("<frozen")]
    return (
        f"{sys.executable} (Python {platform.python_version()}) has no module {error.name!r}, "
        f"which {files[-1]} imports: activate the environment that has rankwise's packages (source "
        ".venv/bin/activate; make .venv makes it), or install the missing one; rankwise needs "
        "Python 3.11 or 3.12"
    )


def quiet_torchao() -> None:
    """Silence what torchao prints when it is imported. Call this before importing transformers.

    transformers imports torchao if it is installed, in every run. torchao then warns of kernels
    that it cannot load, which no run here needs, and torch of how torchao registers two enums.
    """
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").addFilter(is_not_about_enums)


def is_not_about_enums(record: logging.LogRecord) -> bool:
    return "is an Enum subclass" not in record.getMessage()
