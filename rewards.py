"""Reward functions: the file to edit first.

    def f(prompt, response, row)        two texts and the row of the data file
    def f(prompts, responses, rows)     lists over all responses to one prompt; returns a list
    async def f(...)                    either; a worker runs reward.concurrency calls at once

Parameters are bound by name, and a function takes only those that it needs. reward.kwargs adds
parameters that are columns of the row, or places in one. For each response a function returns a
number, or a dictionary of named parts, which are logged and weighted by reward.weights. Functions
written for verl and TRL work as they are (rollout/grading/signature.py). Add yours to REWARDS, or
keep it in a file of its own: reward.function=path/to/file.py:name.

Rewards run in worker processes that may be killed (rollout/grading/): a function that raises or
hangs costs its sample, and the run stops when too many do. What a module remembers belongs to its
worker alone and is lost when that is killed.
"""

import importlib
import logging
import re
from collections.abc import Callable

from common import plugins
from config import InputError

# The format of DeepSeek-R1: both parts, once each, and nothing around them.
INSIDE_TAGS = r"(?:(?!</?(?:think|answer)>).)*"
THINK_THEN_ANSWER = rf"<think>{INSIDE_TAGS}</think>\s*<answer>{INSIDE_TAGS}</answer>"


def exact_match(prompt: str, response: str, row: dict) -> float:
    """Return 1.0 when the response is row["answer"] or ends with it, else 0.0.

    At the end, the answer must be on a line of its own or after a comma and a space, as in
    "7+8=15, 4+3+1=8, 85". "4+3+1=85" is not the answer 85. White space around either is ignored.
    """
    text = response.strip()
    answer = str(value_of(row, "answer")).strip()
    last_part = re.split(r", |\n", text)[-1].strip()
    return float(answer in (text, last_part))


def math(prompt: str, response: str, row: dict) -> float:
    """Return 1.0 when math-verify finds the response's answer equal to row["answer"], else 0.0.

    row["answer"] is an expression, plain or in LaTeX, or a text with one in \\boxed{} or $...$.
    In the response, the last \\boxed{} counts (several close together are a set), else the last
    $...$ or plain number.

    Raises:
        ValueError: row["answer"] cannot be read.
    """
    from math_verify import parse, verify

    # Its own time limits are off, since the worker has one; it would warn about that every time.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    answer = str(value_of(row, "answer"))
    # math-verify does not look for bare LaTeX: it would read 2\sqrt{3} as the number 2.
    is_marked = "$" in answer or r"\boxed" in answer
    marked = answer if is_marked else rf"\boxed{{{answer}}}"
    gold = parse(marked, parsing_timeout=None)
    if not gold:
        raise ValueError(f'math-verify cannot read the row\'s "answer": {answer[:200]!r}')
    found = parse(response, parsing_timeout=None)
    return float(verify(gold, found, timeout_seconds=None))


def format(prompt: str, response: str, row: dict) -> float:
    """Return 1.0 when the whole response, stripped, matches the format, else 0.0.

    The format is the regular expression row["format"], in which a dot matches newlines too. Without
    one it is <think>...</think><answer>...</answer>, whose first tag the prompt may have opened.
    """
    pattern = row.get("format")
    text = response.strip()
    if pattern is None and prompt.rstrip().endswith("<think>"):
        text = "<think>" + text
    match = re.fullmatch(pattern or THINK_THEN_ANSWER, text, re.DOTALL)
    return float(match is not None)


REWARDS = {"exact_match": exact_match, "math": math, "format": format}


def value_of(row: dict, key: str):
    """Return row[key]; raises a KeyError that names the row's keys when it is missing or None."""
    if row.get(key) is None:
        available = ", ".join(name for name, value in row.items() if value is not None)
        raise KeyError(f'the row has no "{key}", only {available}')
    return row[key]


def find(function: str) -> Callable:
    """Return the reward function of this name: a key of REWARDS, or path/to/file.py:name.

    Called in workers, since it imports the file.

    Raises:
        InputError: there is no such name or file, or the file cannot be imported.
    """
    if function == "math":
        try:
            importlib.import_module("math_verify")
        except ImportError as error:
            raise InputError(f"reward.function=math: {error}; pip install math-verify") from error
    return plugins.find("reward.function", function, REWARDS)
