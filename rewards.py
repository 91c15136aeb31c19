"""Reward functions: the file to edit first.

    def f(prompt, response, row)        two texts and the row of the data file
    def f(prompts, responses, rows)     lists over all responses to one prompt; returns a list
    async def f(...)                    either of these, for reward.concurrency calls at once

Parameters are bound by name, and a function takes only those that it needs. A parameter `answer`
gets the row's column of this name. reward.kwargs binds further parameters to columns of the row or
to paths into one, and can take the answer from another place, as in
reward.kwargs.answer=reward_model.ground_truth. The response lacks the string that ended it
(rollout.stop) and, unless reward.skip_special_tokens=false, special tokens.

For each response a function returns a number, or a dictionary of named parts, which are logged and
weighted by reward.weights. With reward.step_rewards=true it returns a pair: one of these, and a
list of steps (number of characters up to the step's end, reward). Functions written for verl and
TRL work as they are (rollout/grading/signature.py). Add yours to REWARDS, or keep it in a file of
its own: reward.function=path/to/file.py:name.

Reward functions run in worker processes that may be killed (rollout/grading/). If a function raises
or hangs, its sample is dropped, and the run stops if too many samples are. Each worker has its own
copy of a module's variables, which are lost when the worker is killed.
"""

import importlib
import logging
import re
from collections.abc import Callable

from common import plugins
from configs.errors import InputError

# The format of DeepSeek-R1: each part exactly once, and nothing else.
INSIDE_TAGS = r"(?:(?!</?(?:think|answer)>).)*"
THINK_THEN_ANSWER = rf"<think>{INSIDE_TAGS}</think>\s*<answer>{INSIDE_TAGS}</answer>"


def exact_match(response: str, answer) -> float:
    """Return 1.0 if the response is the row's answer or ends with it, else 0.0.

    At the end of a longer response, the answer must be on its own line or follow a comma and a
    space: "7+8=15, 4+3+1=8, 85" ends with 85, but "4+3+1=85" does not. White space around response
    and answer is ignored.
    """
    text = response.strip()
    last_part = re.split(r", |\n", text)[-1].strip()
    return float(str(answer).strip() in (text, last_part))


def math(response: str, answer) -> float:
    """Return 1.0 if math-verify finds the response's answer equal to the row's, else 0.0.

    The row's answer is an expression, plain or in LaTeX, or a text with one in \\boxed{} or $...$.
    In the response, the last \\boxed{} counts (several close together are a set), else the last
    $...$ or plain number.

    Raises:
        ValueError: the row's answer cannot be read.
    """
    from math_verify import parse, verify

    # The worker has a time limit, so turn off math-verify's own, and the warning about that.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    answer = str(answer)
    # math-verify does not look for bare LaTeX: it would read 2\sqrt{3} as the number 2.
    is_marked = "$" in answer or r"\boxed" in answer
    marked = answer if is_marked else rf"\boxed{{{answer}}}"
    gold = parse(marked, parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify cannot read the row's answer {answer[:200]!r}")
    prediction = parse(response, parsing_timeout=None)
    return float(verify(gold, prediction, timeout_seconds=None))


def format(prompt: str, response: str, row: dict) -> float:
    """Return 1.0 if the whole response, stripped, matches the format, else 0.0.

    The format is the regular expression row["format"], in which a dot also matches newlines. The
    default is <think>...</think><answer>...</answer>, whose <think> may be the end of the prompt.

    Raises:
        ValueError: the row's format is not a regular expression.
    """
    pattern = row.get("format")
    text = response.strip()
    if pattern is None and prompt.rstrip().endswith("<think>"):
        text = "<think>" + text
    try:
        match = re.fullmatch(pattern or THINK_THEN_ANSWER, text, re.DOTALL)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"the row's format {pattern!r:.200} is not a regular expression: {error}"
        ) from error
    return float(match is not None)


def none(response: str) -> float:
    """Return 0.0, for rows without an answer: with a teacher, a policy learns without rewards."""
    return 0.0


REWARDS = {"exact_match": exact_match, "math": math, "format": format, "none": none}


def find(function: str) -> Callable:
    """Return the reward function with this name: a key of REWARDS, or path/to/file.py:name.

    Only workers call this, since it imports the file.

    Raises:
        InputError: there is no such name or file, or the file cannot be imported.
    """
    if function == "math":
        try:
            importlib.import_module("math_verify")
        except ImportError as error:
            raise InputError(f"reward.function=math: {error}; pip install math-verify") from error
    return plugins.find("reward.function", function, REWARDS)
