"""End with one line where a package is missing: usually another Python has been started."""

import platform
import sys
import traceback
from typing import NoReturn

from configs.environment import is_first_of_node


def exit_without(error: ModuleNotFoundError) -> NoReturn:
    """Print which module is missing, once per node, and exit with code 2."""
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
