"""The error for the user's mistakes. It needs only the standard library."""

import re
from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Mistakes of the user. Scripts print one line for each and exit with code 2.

    Attributes:
        problems: a sentence about each mistake. Usually there is one.
    """

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


@contextmanager
def errors_about_model(key: str, path: str) -> Iterator[None]:
    """Within this block, errors about a model name the key that gave its path.

    Engines call every model's path model.path, and some of their errors name no model.

    Args:
        key: such as "reference.path".
    """
    setting = f"{key}={path}"
    by_engine = re.compile(rf"(?<!\.)model\.path={re.escape(path)}")
    try:
        yield
    except InputError as error:
        if key == "model.path":
            raise
        problems = []
        for problem in error.problems:
            named = by_engine.sub(lambda _: setting, problem)
            problems.append(named if setting in named else f"{setting}: {problem}")
        raise InputError(*problems) from None
