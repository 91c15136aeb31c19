"""Read JSON files that a user may have damaged or cut off."""

import json
from pathlib import Path

from configs.errors import InputError


def read_object(path: Path) -> dict:
    """Return the object in a JSON file.

    Raises:
        InputError: the file cannot be read, is not JSON, or holds another value.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise InputError(f"{path} is damaged or incomplete: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value
