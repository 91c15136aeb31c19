"""The results of calling a user's function: a reward, or a failure with its trace."""

import re
from dataclasses import dataclass, field

# Matches in a traceback in every frame of a worker's own program.
OWN_FILES = "grading/worker|episodes/worker|episodes/environments|episodes/threads"
WORKER_FRAME = re.compile(rf'(?:{OWN_FILES})\.py", line ')


@dataclass(frozen=True)
class Reward:
    """The reward of one response.

    Attributes:
        score: the number that advantages are computed from.
        parts: the named parts, whose weighted sum is the score. Empty if there are none.
        steps: with reward.step_rewards, pairs [end, reward]: the reward of the step that ends
            before character `end` of the response. The score includes their sum.
    """

    score: float
    parts: dict[str, float]
    steps: list[list] = field(default_factory=list)


@dataclass(frozen=True)
class Failure:
    """A sample that could not be graded, which is not the same as a reward of 0.

    Attributes:
        kind: raised, timed out, died, forged, not a number, not a list, missing part, different
            parts, no steps, or wrong step.
        trace: the traceback, or a sentence that describes the failure.
    """

    kind: str
    trace: str
    row: dict
    response: str

    @property
    def summary(self) -> str:
        """The kind and the error in one line, with the user's file and line that raised it."""
        user_frames = WORKER_FRAME.split(self.trace)[-1]
        place = re.search(r'File "(.*)", line (\d+)', user_frames)
        after_last_frame = re.split(r'(?m)^  File ".*\n(?:  .*\n)*', self.trace)[-1]
        error = " ".join(after_last_frame.split())
        location = f" ({place[1]}:{place[2]})" if place else ""
        return f"{self.kind}: {error}{location}"


Result = Reward | Failure
