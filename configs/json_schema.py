"""Write JSON schemas of the YAML files. Editors use them to complete and check keys."""

import json
from pathlib import Path

from omegaconf import OmegaConf

from configs.files import CONFIGS, SCRIPTS, engine_files, read, read_comments
from configs.rules import REQUIRED, TYPES, rule_of

DIALECT = "https://json-schema.org/draft/2020-12/schema"
INTERPOLATION = {"type": "string", "pattern": r"\$\{"}
DIRECTORY = CONFIGS / "schema"


def schema(script: str) -> dict:
    """Return the schema of the YAML files that train_{script}.py reads.

    No key is required in a file. The keys of the group `engine` depend on model_engine.
    """
    root = file_schema(CONFIGS / f"{script}.yaml")
    engines = {path.stem: file_schema(path)["properties"]["engine"] for path in engine_files()}
    references = {name: {"$ref": f"#/$defs/{name}"} for name in engines}
    root["properties"]["model_engine"]["enum"] = [*engines]
    root["properties"]["engine"] = {"anyOf": [*references.values()]}
    conditions = [
        {
            "if": {"properties": {"model_engine": {"const": name}}, "required": ["model_engine"]},
            "then": {"properties": {"engine": reference}},
        }
        for name, reference in references.items()
    ]
    return {
        "$schema": DIALECT,
        "title": f"configuration of train_{script}.py",
        **root,
        "allOf": conditions,
        "$defs": {**engines, "interpolation": INTERPOLATION},
    }


def file_schema(path: Path) -> dict:
    """Return the schema of the keys in one file of configs/."""
    tree = OmegaConf.to_container(read(path), resolve=False)
    return group_schema(tree, read_comments(path))


def group_schema(tree: dict, descriptions: dict[str, str], prefix: str = "") -> dict:
    """Return the schema of a group of keys.

    Args:
        tree: the defaults of the group.
        descriptions: the comment of every key, by its full name.
        prefix: the name of the group, followed by a dot.
    """
    properties = {}
    for name, default in tree.items():
        key = f"{prefix}{name}"
        if isinstance(default, dict) and default:
            value = group_schema(default, descriptions, f"{key}.")
        else:
            value = value_schema(key, default)
        description = {"description": descriptions[key]} if descriptions[key] else {}
        properties[name] = description | value
    return {"type": "object", "additionalProperties": False, "properties": properties}


def value_schema(key: str, default) -> dict:
    """Return the schema of one key: its type, rule and default.

    Except for strings, the schema also allows an interpolation.
    """
    rule = rule_of(key)
    has_type = default is not None and not rule.allows_null
    value = {"type": TYPES[type(default)][1]} if has_type else {}
    value |= rule.schema
    if value != {"type": "string"}:
        value = {"anyOf": [value, {"$ref": "#/$defs/interpolation"}]}
    return value if default == REQUIRED else {"default": default} | value


def write_schemas(directory: Path = DIRECTORY) -> None:
    """Write {script}.json for every script."""
    directory.mkdir(exist_ok=True)
    for script in SCRIPTS:
        path = directory / f"{script}.json"
        path.write_text(json.dumps(schema(script), indent=1) + "\n")
        print(path)
