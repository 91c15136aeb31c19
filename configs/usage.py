"""How a module of a command line ends when its arguments are not those that it takes."""

import sys
from typing import NoReturn

HELP = {"-h", "--help"}


def exit_with_usage(doc: str, arguments: list[str]) -> NoReturn:
    """Print a module's docstring and exit: with code 0 if the arguments ask for help, else with 2.

    Args:
        doc: the docstring, which shows the commands.
    """
    if HELP & set(arguments):
        print(doc)
        sys.exit(0)
    shown = " ".join(arguments)
    problem = f"these arguments are not understood: {shown}" if arguments else "arguments missing"
    print(f"error: {problem}\n\n{doc}", file=sys.stderr)
    sys.exit(2)
