"""Episodes whose course is fixed: how many turns, and where the agent edits its history."""

from dataclasses import asdict, dataclass, field

from tests.rollout.launches import Launch, make_prompts

MAX_TOKENS = 12
GROUP_SIZE = 5
EPISODE_LAUNCHES = {
    "episodes": Launch(1, "qwen3"),
    "episodes_dp2": Launch(2, "qwen3"),
    "episodes_tp2": Launch(2, "qwen3", tp=2),
}


@dataclass(frozen=True)
class Plan:
    """The course of an episode.

    Attributes:
        number: which plan this is.
        prompt_ids: of the first turn.
        num_turns: turns that the agent asks for. It may be more than rollout.max_turns.
        between: tokens that the agent adds after each turn.
        edits: turns after which the agent begins anew with the first prompt and `between`.
        repeats: turns that ask the same as the turn before.
        rewards: turns after which the agent gives a reward of 0.5.
        fails: whether the agent asks for another temperature at the end, which is rejected.
    """

    number: int
    prompt_ids: list[int]
    num_turns: int
    between: list[int]
    edits: list[int] = field(default_factory=list)
    repeats: list[int] = field(default_factory=list)
    rewards: list[int] = field(default_factory=list)
    fails: bool = False

    def row(self) -> dict:
        return asdict(self)

    def next_prompt(self, turn: int, prompt_ids: list[int], sampled: list[int]) -> list[int]:
        """Return the prompt of the turn after this one."""
        if turn in self.edits:
            return self.prompt_ids + self.between
        if turn + 1 in self.repeats:
            return prompt_ids
        return prompt_ids + sampled + self.between

    def begins_branch(self, turn: int) -> bool:
        return turn - 1 in self.edits or turn in self.repeats

    def repetition(self, turn: int) -> int:
        """Return how often the prompt of this turn was asked before."""
        return int(turn in self.repeats)


PROMPTS = make_prompts(10)
PLANS = [
    Plan(0, PROMPTS[0], 1, [20]),
    Plan(1, PROMPTS[1], 2, [21, 22]),
    Plan(2, PROMPTS[2], 3, [23], rewards=[0, 2]),
    Plan(3, PROMPTS[3], 4, [24, 25, 26]),
    Plan(4, PROMPTS[4], 3, [27], edits=[0]),
    Plan(5, PROMPTS[5], 4, [28], edits=[1], rewards=[1]),
    Plan(6, PROMPTS[6], 2, [29], repeats=[1]),
    Plan(7, PROMPTS[7], 5, [30, 31]),
    Plan(8, PROMPTS[8], 3, [32], repeats=[1], rewards=[0]),
    Plan(9, PROMPTS[9], 2, [33], fails=True),
]
