"""The text that --help prints: a script's docstring and its keys, or only some groups of keys."""

from pathlib import Path

from configs.arguments import YAML_FILE
from configs.files import CONFIGS, INDENT, KEY_LINE, InputError, engine_files
from configs.names import suggest


def help_text(defaults: str, doc: str, arguments: list[str]) -> str:
    """Return the docstring and all keys or, if arguments name groups or keys, only these.

    Args:
        defaults: the name of the script's file in configs/.
        arguments: the arguments of the command, with --help among them.

    Raises InputError for a group that does not exist.
    """
    files = [CONFIGS / defaults, *engine_files()]
    words = [word for argument in arguments for word in argument.removeprefix("--help=").split(",")]
    groups = [word for word in words if is_group(word)]
    if not groups:
        return "\n".join([doc, *(path.read_text() for path in files)])
    blocks = []
    for group in groups:
        blocks_of_files = [key_block(path, group) for path in files]
        if not any(blocks_of_files):
            raise InputError(unknown_group_problem(group, files))
        blocks += filter(None, blocks_of_files)
    return "\n".join(blocks)


def is_help(argument: str) -> bool:
    """Return whether an argument asks for help, perhaps with groups: --help=rollout."""
    return argument in ("-h", "--help") or argument.startswith("--help=")


def is_group(argument: str) -> bool:
    """Return whether an argument next to --help can name a group of keys."""
    return not argument.startswith("-") and "=" not in argument and not YAML_FILE.search(argument)


def key_block(path: Path, key: str) -> str:
    """Return the lines of a group or of a key in a file of configs/, "" if it has none."""
    lines = []
    for name, line in named_lines(path):
        if name == key or name.startswith(f"{key}."):
            lines.append(line)
    if not lines:
        return ""
    heading = f"# {key} in {path.relative_to(CONFIGS.parent)}"
    return "\n".join([heading, *lines, ""])


def named_lines(path: Path) -> list[tuple[str, str]]:
    """Return (key, line) for the lines of a file: those with a key, and comments that follow it."""
    named = []
    parents: list[str] = []
    for line in path.read_text().splitlines():
        match = KEY_LINE.match(line)
        if match:
            indent, name = match.groups()
            parents[len(indent) // INDENT :] = [name]
        elif not line.startswith(" "):
            parents = []
        if parents:
            named.append((".".join(parents), line))
    return named


def unknown_group_problem(group: str, files: list[Path]) -> str:
    """Return a sentence about a name that is neither a group nor a key."""
    keys = [key for path in files for key, _ in named_lines(path)]
    groups = dict.fromkeys(key.partition(".")[0] for key in keys if "." in key)
    target = suggest(group, dict.fromkeys(keys))
    advice = f"; the nearest is {target}" if target in keys else ""
    return f"--help {group}: there is no such group{advice}; the groups are {', '.join(groups)}"
