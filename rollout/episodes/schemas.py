"""Make schemas of tools from their type hints and docstrings.

The schemas equal transformers.utils.get_json_schema's, but need only the standard library.
"""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable

BASIC_TYPES = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
    list: "array",
    tuple: "array",
    dict: "object",
}
SECTION = re.compile(r"(?:^|\n)[ \t]*(Args|Returns|Raises):[ \t]*(?:\n|$)")
ARGUMENT = re.compile(r"\s*(\w+):\s*(.*)")
CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


class SchemaError(ValueError):
    """A function whose schema cannot be made. The message says what its author should add."""


def tool_schema(function: Callable) -> dict:
    """Return the schema of a tool, in the form of OpenAI's requests.

    The function needs a docstring in Google's form, a type hint for each parameter, and a
    description of each in the section `Args:`. "(choices: ["a", "b"])" at the end of a description
    lists the only values that are allowed. The parameter `self` is left out.

    Raises:
        SchemaError: something is missing, or a type hint has no equivalent in JSON.
    """
    name = function.__name__
    docstring = inspect.getdoc(function)
    if not docstring:
        raise SchemaError(f"the tool {name} has no docstring: describe what it does")
    sections = split_docstring(docstring)
    descriptions = read_arguments(sections.get("Args", ""))
    hints = read_hints(function)
    parameters = [p for p in inspect.signature(function).parameters.values() if not is_self(p)]
    properties = {}
    for parameter in parameters:
        if parameter.annotation is parameter.empty:
            raise SchemaError(f"the parameter {parameter.name} of the tool {name} has no type hint")
        if parameter.name not in descriptions:
            raise SchemaError(
                f"the docstring of the tool {name} does not describe the parameter "
                f"{parameter.name}: add it to the section Args"
            )
        schema = type_schema(hints[parameter.name])
        properties[parameter.name] = describe(schema, descriptions[parameter.name])
    required = [p.name for p in parameters if p.default is p.empty]
    schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    tool = {"name": name, "description": sections["description"], "parameters": schema}
    if "return" in hints:
        tool["return"] = type_schema(hints["return"])
        if "Returns" in sections:
            tool["return"]["description"] = sections["Returns"]
    return {"type": "function", "function": tool}


def is_self(parameter: inspect.Parameter) -> bool:
    return parameter.name in ("self", "cls") and parameter.annotation is parameter.empty


def read_hints(function: Callable) -> dict:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise SchemaError(f"the type hints of the tool {function.__name__}: {error}") from error


def split_docstring(docstring: str) -> dict[str, str]:
    """Return the sections of a docstring by their titles; the first one is the description."""
    description, *rest = SECTION.split(docstring)
    sections = {"description": description.strip()}
    for title, text in zip(rest[::2], rest[1::2], strict=True):
        sections.setdefault(title, text.strip())
    return sections


def read_arguments(section: str) -> dict[str, str]:
    """Return the descriptions of the section `Args:`, each on one line."""
    descriptions = {}
    name = None
    for line in section.splitlines():
        match = ARGUMENT.match(line)
        if match:
            name, text = match.groups()
            descriptions[name] = text.strip()
        elif name is not None and line.strip():
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
    return descriptions


def describe(schema: dict, description: str) -> dict:
    """Add a description, and the choices at its end, to the schema of a parameter."""
    choices = CHOICES.search(description)
    if choices is None:
        return {**schema, "description": description}
    try:
        values = json.loads(choices[1])
    except ValueError as error:
        raise SchemaError(f"{choices[0]} is not a list in JSON: {error}") from error
    values = [value.strip() if isinstance(value, str) else value for value in values]
    return {**schema, "enum": values, "description": description[: choices.start()].strip()}


def type_schema(hint) -> dict:
    """Return the schema of a type hint.

    Raises:
        SchemaError: it has no equivalent in JSON.
    """
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hint is typing.Any:
        return {}
    if origin is None:
        return {"type": BASIC_TYPES.get(hint, "object")}
    if origin in (typing.Union, types.UnionType):
        return union_schema(arguments)
    if origin is typing.Literal:
        return literal_schema(arguments)
    if origin is list:
        return {"type": "array", "items": type_schema(arguments[0])}
    if origin is tuple:
        if len(arguments) == 1 or ... in arguments:
            raise SchemaError(f"the type hint {hint} has no equivalent in JSON: use list[...]")
        return {"type": "array", "prefixItems": [type_schema(part) for part in arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": type_schema(arguments[1])}
    raise SchemaError(f"the type hint {hint} has no equivalent in JSON")


def union_schema(alternatives: tuple) -> dict:
    """Return the schema of a union: a list of names if all are plain types, else `anyOf`."""
    parts = [type_schema(part) for part in alternatives if part is not type(None)]
    are_plain = all(part.keys() == {"type"} and isinstance(part["type"], str) for part in parts)
    if len(parts) == 1:
        schema = parts[0]
    elif are_plain:
        names = sorted({part["type"] for part in parts})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": parts}
    if type(None) in alternatives:
        schema["nullable"] = True
    return schema


def literal_schema(values: tuple) -> dict:
    """Return the schema of typing.Literal."""
    names = []
    for value in values:
        name = BASIC_TYPES.get(type(value))
        if name is None:
            raise SchemaError(f"the value {value!r} of a Literal has no equivalent in JSON")
        if name not in names:
            names.append(name)
    return {"type": names[0] if len(names) == 1 else names, "enum": list(values)}
