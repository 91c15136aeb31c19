"""Makes torchao importable for the tests of engine.float8."""

import importlib.util
import sys
from pathlib import Path

# Where `make .venv` installs it on a CPU, in the environment of this Python. transformers would
# import it in every run otherwise.
DIRECTORY = Path(sys.prefix) / "float8"


def make_importable() -> None:
    """Call this after transformers has been imported, in every process that uses engine.float8."""
    if importlib.util.find_spec("torchao") is None:
        sys.path.append(str(DIRECTORY))
