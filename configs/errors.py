"""The error for the user's mistakes. It needs only the standard library."""


class InputError(ValueError):
    """Mistakes of the user. Scripts print one line for each and exit with code 2.

    Attributes:
        problems: a sentence about each mistake. Usually there is one.
    """

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems
