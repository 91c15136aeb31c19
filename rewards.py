"""Reward functions: the file to edit first.

    def f(prompt, response, row)        texts, and the row of the data file; any of the three, bound by name
    def f(prompts, responses, rows)     lists over all responses to one prompt; it returns a list
    async def f(...)                    either; up to reward.concurrency calls are in flight in one worker

reward.kwargs adds parameters that are columns of the row, or places in one. For each response a function returns a number,
or a dictionary of named parts, which are logged and weighted by reward.weights. Functions written for verl and TRL are
called as these do (rollout/grading/signature.py). Add yours to REWARDS, or keep it in a file of its own:
reward.function=path/to/file.py:name.

They run in workers, processes that may be killed (rollout/grading/grader.py): a function that raises or hangs costs its sample,
and the run stops when too many do. What a module remembers is its worker's alone, and lost when that is killed.
"""

import importlib
import logging
import re
from collections.abc import Callable

from common import plugins
from config import InputError

# DeepSeek-R1's shape: both parts, once each, and nothing around them.
THINK_THEN_ANSWER = r"<think>{0}</think>\s*<answer>{0}</answer>".format(
    r"(?:(?!</?(?:think|answer)>).)*"
)


def exact_match(prompt: str, response: str, row: dict) -> float:
    """1.0 when the response is row["answer"], or ends with it on a line of its own or behind a comma and a space, as in
    "7+8=15, 4+3+1=8, 85"; else 0.0. "4+3+1=85" is not the answer 85. White space around either does not count."""
    text, answer = response.strip(), str(value_of(row, "answer")).strip()
    return float(answer in (text, re.split(r", |\n", text)[-1].strip()))


def math(prompt: str, response: str, row: dict) -> float:
    """1.0 when math-verify finds the response's answer equal to row["answer"], an expression, plain or LaTeX, or a text
    with one in \\boxed{} or $...$; else 0.0. Of a response it takes the last \\boxed{} (with others close before it, a
    set), else the last $...$ or plain number.

    Raises ValueError when row["answer"] cannot be read.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns that its own time limits are off
    answer = str(value_of(row, "answer"))
    # Bare LaTeX is not looked for: 2\sqrt{3} would be read as the number 2.
    gold = parse(
        answer if "$" in answer or r"\boxed" in answer else rf"\boxed{{{answer}}}",
        parsing_timeout=None,
    )
    if not gold:
        raise ValueError(f'math-verify cannot read the row\'s "answer": {answer[:200]!r}')
    return float(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))


def format(prompt: str, response: str, row: dict) -> float:
    """1.0 when the whole response, stripped, matches the regular expression row["format"], in which a dot matches
    newlines too; without one, <think>...</think><answer>...</answer>, whose first tag the prompt may have opened; else
    0.0."""
    pattern, text = row.get("format"), response.strip()
    if pattern is None and prompt.rstrip().endswith("<think>"):
        text = "<think>" + text
    return float(re.fullmatch(pattern or THINK_THEN_ANSWER, text, re.DOTALL) is not None)


REWARDS = {"exact_match": exact_match, "math": math, "format": format}


def value_of(row: dict, key: str):
    """row[key]; a KeyError that names the row's keys when it is missing or None."""
    if row.get(key) is None:
        raise KeyError(
            f'the row has no "{key}", only {", ".join(k for k, v in row.items() if v is not None)}'
        )
    return row[key]


def find(function: str) -> Callable:
    """The reward function of this name: one of REWARDS, or path/to/file.py:name. For workers: it imports the file.

    Raises InputError when there is no such name or file, and when the file cannot be imported.
    """
    if function == "math":
        try:
            importlib.import_module("math_verify")
        except ImportError as error:
            raise InputError(f"reward.function=math: {error}; pip install math-verify") from error
    return plugins.find("reward.function", function, REWARDS)
