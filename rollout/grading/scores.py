"""Turn the value that a user's function returns into a score and its named parts.

This module needs only the standard library, because workers also run in other Python environments.
"""

import math
from collections.abc import Mapping
from numbers import Integral

FP32_MAX = (2 - 2**-23) * 2.0**127


def read_score(value, weights: dict[str, float]) -> dict:
    """Return the answer for a number or a mapping of named parts.

    Args:
        value: the value that the function returned.
        weights: part -> weight. Empty if the score is the sum of the parts.

    Returns:
        {"score", "parts"}, or {"kind", "trace"} for a failure.
    """
    parts = value if isinstance(value, Mapping) else {}
    return score_parts(value, parts, weights)


def score_parts(value, parts: Mapping, weights: dict[str, float]) -> dict:
    """As read_score(), but count only these parts of the value."""
    for name in weights:
        if name not in parts:
            trace = f"the function returned {value!r:.200}, without the part {name!r}"
            return {"kind": "missing part", "trace": trace}
    try:
        numbers = {str(name): finite(part) for name, part in parts.items()}
        score = weighted_sum(numbers, weights) if numbers else value
        return {"score": finite(score), "parts": numbers}
    except (TypeError, ValueError, OverflowError, RuntimeError):
        problem = "which is not a finite number in fp32"
        if parts:
            problem = "whose parts and sum are not all finite numbers in fp32"
        trace = f"the function returned {value!r:.200}, {problem}"
        return {"kind": "not a number", "trace": trace}


def weighted_sum(parts: dict[str, float], weights: dict[str, float]) -> float:
    """Return the weighted sum of the parts. If there are no weights, every weight is 1."""
    default = 0 if weights else 1
    return sum(weights.get(name, default) * part for name, part in parts.items())


def finite(value) -> float:
    """Convert a number of Python, numpy or torch to float. Rejects text, even if it is numeric.

    Raises:
        ValueError: the value is text, or not finite in fp32.
    """
    is_text = isinstance(value, str | bytes | bytearray)
    number = math.nan if is_text else float(value)
    if not abs(number) <= FP32_MAX:
        raise ValueError
    return number


def is_with_steps(value) -> bool:
    """Return whether a function returned a pair of a score and a list of steps."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], list)


def with_steps(answer: dict, steps: list, response: str, name: str) -> dict:
    """Return an answer with the rewards of steps, whose sum becomes a part of the score.

    Args:
        answer: from read_score(), for the score that the function returned with the steps.
        steps: pairs (end, reward): the step ends before character `end` of the response.
        name: the function, for the trace of a failure.

    Returns:
        {"score", "parts", "steps"}, or {"kind", "trace"} for a failure.
    """
    if "score" not in answer:
        return answer
    problem = problem_with_steps(steps, response)
    if problem:
        return {"kind": "wrong step", "trace": f"{name} returned {problem}"}
    placed = [[int(end), finite(reward)] for end, reward in steps]
    score = answer["score"] + sum(reward for _, reward in placed)
    return answer | {"score": score, "steps": placed}


def problem_with_steps(steps: list, response: str) -> str | None:
    """Return the problem with the steps of a response, or None."""
    last_end = 0
    for step in steps:
        if not isinstance(step, tuple | list) or len(step) != 2:
            return f"the step {step!r:.100}, which is not a pair (end, reward)"
        end, reward = step
        if not isinstance(end, Integral) or isinstance(end, bool):
            return f"a step that ends at {end!r:.100}, which is not a number of characters"
        if not 0 < end <= len(response):
            return f"a step that ends after {end} characters of a response that has {len(response)}"
        if end <= last_end:
            return f"a step that ends after {end} characters, after one that ends after {last_end}"
        try:
            finite(reward)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            return f"a step with the reward {reward!r:.100}, which is not a finite number in fp32"
        last_end = end
    return None
