"""The messages that docs/troubleshooting.md quotes are those of the code.

Messages in console blocks come from commands that test_docs_commands.py runs. Those in text blocks
are compared here with the texts in the code.
"""

import ast
import re
from functools import cache

import pytest

from tests.repository.pages import PAGES, blocks
from tests.repository.test_house import PRODUCT

PAGE = PAGES["docs/troubleshooting.md"]
MESSAGES = "".join(blocks(PAGE, "text")).splitlines()
# Parts of messages that come from libraries.
FROM_LIBRARIES = [
    r"The server socket has failed to listen on any local network address\. .* in use",  # torch
    r"Timed out after \d+ seconds waiting for clients\. \d+/\d+ clients joined",  # torch
    r"\[\S*gloo\S*\] Connection closed by peer \[\S+\]:\d+",  # gloo
    r"Timed out waiting \d+ms for recv operation to complete",  # gloo
    r"No available memory for the cache blocks\. .* for more details\.",  # vLLM
]
# The shortest fixed part of a message that is searched for.
SHORTEST_PART = 5
# Between fixed parts are values, such as a path or a date.
MOST_SPACES_IN_A_VALUE = 3


@cache
def fixed_parts() -> list[str]:
    """Return the parts between the values of every string of the product, the longest first."""
    parts = set()
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text())):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and len(node.value) >= SHORTEST_PART:
                parts.add(node.value)
    return sorted(parts, key=len, reverse=True)


def unknown_parts(message: str, known: list[str]) -> list[str]:
    """Return the parts of a message that are neither texts of the code nor values."""
    rest = message
    for pattern in FROM_LIBRARIES:
        rest = re.sub(pattern, "\n", rest)
    for part in known:
        rest = rest.replace(part, "\n")
    return [part for part in rest.split("\n") if part.count(" ") > MOST_SPACES_IN_A_VALUE]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_one_of_the_code(message):
    assert unknown_parts(message, fixed_parts()) == []


@pytest.mark.parametrize("message", MESSAGES)
def test_a_change_of_the_message_in_the_code_would_be_found(message):
    longest = next(part for part in fixed_parts() if part in message)
    assert unknown_parts(message, [p for p in fixed_parts() if p not in longest]) != []


def test_the_page_has_at_least_twenty_problems():
    assert PAGE.count("\n### ") >= 20
