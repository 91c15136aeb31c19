"""The tokens that end a response, according to a model's files."""

import json
from collections.abc import Iterable
from pathlib import Path

from common.json_files import read_object

GENERATION_CONFIG = "generation_config.json"


def read_end_ids(directory: Path) -> set[int]:
    """Return the values of eos_token_id in generation_config.json and in config.json.

    Raises InputError for a damaged file.
    """
    ids = set()
    for name in (GENERATION_CONFIG, "config.json"):
        file = directory / name
        if file.is_file():
            ids |= listed_ids(read_object(file))
    return ids


def add_end_ids(directory: Path, ids: Iterable[int]) -> None:
    """Add ids to eos_token_id in a model's generation_config.json, unless its files list them.

    If there is no such file, a new one gets these ids and those in config.json.
    """
    new_ids = sorted({*ids} - read_end_ids(directory))
    if not new_ids:
        return
    file = directory / GENERATION_CONFIG
    source = file if file.is_file() else directory / "config.json"
    values = json.loads(source.read_text())
    if source != file:
        special = ("bos_token_id", "pad_token_id", "eos_token_id")
        values = {key: values[key] for key in special if values.get(key) is not None}
    # With this mark, older versions of transformers replace the file's values by config.json's.
    values.pop("_from_model_config", None)
    values["eos_token_id"] = [*sorted(listed_ids(values)), *new_ids]
    file.write_text(json.dumps(values, indent=2) + "\n")


def listed_ids(values: dict) -> set[int]:
    """Return the ids in the eos_token_id of a configuration: a number, a list or null."""
    eos_token_id = values.get("eos_token_id")
    ids = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    return {*ids} - {None}
