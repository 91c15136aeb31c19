"""README.md, CONTRIBUTING.md and docs/*.md for the tests: blocks, commands and snippets."""

import re
import shlex
from dataclasses import dataclass

from tests.support.launch import ROOT

FILES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/*.md")),
    ROOT / "examples" / "recipes" / "README.md",
]
# Path from the root of the repository -> text.
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in FILES}
PROGRAMS = ("python", "torchrun", "bash", "make", "sbatch", "nsys", "pip", "source")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(text: str, *languages: str) -> list[str]:
    """Return the contents of the fenced blocks in these languages."""
    return [body for language, body in BLOCK.findall(text) if language in languages]


def block_containing(page: str, language: str, content: str) -> str:
    """Return the first block of a page in this language that contains `content`."""
    return next(block for block in blocks(PAGES[page], language) if content in block)


def without_blocks(text: str) -> str:
    return BLOCK.sub("", text)


def inline_code(text: str) -> list[str]:
    """Return the code spans outside of blocks."""
    return re.findall(r"`([^`\n]+)`", without_blocks(text))


def is_command(span: str) -> bool:
    return " " in span and span.split(maxsplit=1)[0] in PROGRAMS


def commands_in(text: str) -> list[str]:
    """Return the commands of a page, without comments and without repetitions.

    These are the lines of shell blocks, the lines after "$ " in console blocks, and inline code
    that begins with a program, where "..." stands for arguments left out.
    """
    shell = "\n".join(blocks(text, "bash", "sh"))
    lines = shell.replace("\\\n", " ").splitlines()
    for block in blocks(text, "console"):
        lines += [line[2:] for line in block.splitlines() if line.startswith("$ ")]
    lines += [span.replace("...", "") for span in inline_code(text) if is_command(span)]
    commands = [shlex.join(shlex.split(line, comments=True)) for line in lines]
    return list(dict.fromkeys(command for command in commands if command))


def all_commands() -> list[tuple[str, str]]:
    """Return (page, command) for every command of every page."""
    pairs = []
    for page, text in PAGES.items():
        pairs += [(page, command) for command in commands_in(text)]
    return pairs


def all_snippets() -> list[tuple[str, str]]:
    """Return (file name, code) for every Python block; its first line names the file."""
    code = [block for text in PAGES.values() for block in blocks(text, "python")]
    return [(block.split()[1], block) for block in code]


COMMANDS = all_commands()
SNIPPETS = all_snippets()


@dataclass
class Launch:
    """A Python script as a command runs it, perhaps under torchrun."""

    script: str
    arguments: list[str]
    num_ranks: int


def parse_launch(words: list[str]) -> Launch:
    """Return what a command launches; torchrun itself parses torchrun's options."""
    while "=" in words[0]:  # environment variables
        words = words[1:]
    if words[0] != "torchrun":
        return Launch(words[1], words[2:], 1)
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(words[1:])
    num_nodes = int(options.nnodes.partition(":")[0])
    num_ranks = num_nodes * int(options.nproc_per_node)
    return Launch(options.training_script, options.training_script_args, num_ranks)
