"""End a command that was called with wrong arguments or asked for help, and print its usage."""

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
