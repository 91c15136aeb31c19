"""Report missing packages, and silence a package that prints needless warnings."""

import logging
import platform
import sys
import traceback
from typing import NoReturn

from configs.environment import is_first_of_node


def exit_without(error: ModuleNotFoundError) -> NoReturn:
    """Print which module is missing, once per node, and exit with code 2.

    Usually the command was started with the wrong Python.
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
    """Silence the warnings of importing torchao. Call this before importing transformers.

    transformers imports torchao in every run, if it is installed. torchao then warns that it cannot
    load some kernels, which no run here needs. torch warns about two enums that torchao registers.
    """
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").addFilter(is_not_about_enums)


def is_not_about_enums(record: logging.LogRecord) -> bool:
    return "is an Enum subclass" not in record.getMessage()
