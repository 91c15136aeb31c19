"""Turn the value that a user's function returns into a score and its named parts.

This module needs only the standard library, because workers also run in other Python environments.
"""

import math
from collections.abc import Mapping

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
    """As read_score(), for a value of which only these parts count."""
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
