"""Which oversample and max_staleness of rollout.partial to choose: simulated times of generation.

    python benchmarks/long_tails_simulation.py [--replicas 8 64 512] [--sigma 0.5 1 1.5] \\
        [--oversample 1.25 1.5] [--max-staleness 1 2 4] \\
        [--groups 128] [--n 8] [--tokens 1024] [--longest 16384]

A replica of vLLM completes --groups groups of --n responses in a step. The lengths are log-normal
with a mean of --tokens and at most --longest. Groups begin, continue and end as in rollout/partial,
and those that would become too old are finished. A decoding step of b responses takes
2.0 + 0.0049 b ms, which fits what benchmarks/generation_profile.py measures for 0.5B on an H200. A
step of training begins when all replicas have stopped.

Prints a Markdown table: how long generation takes relative to responses of equal lengths, and the
share of this time that a replica waits for the slowest one, on average.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.harness import make_parser, print_header, print_row

STEP_SECONDS = 2.0e-3
SECONDS_PER_RESPONSE = 4.9e-6
NUM_STEPS = 16
NUM_SETTLING_STEPS = 6


@dataclass(frozen=True)
class Work:
    """What a replica generates in a step: see the options of the same names."""

    groups: int
    n: int
    tokens: int
    longest: int

    def draw_lengths(self, generator: np.random.Generator, sigma: float, num: int) -> np.ndarray:
        """Return log-normal lengths: [num, n] int64."""
        z = generator.normal(size=(num, self.n))
        lengths = np.rint(self.tokens * np.exp(sigma * z - sigma**2 / 2))
        return lengths.clip(1, self.longest).astype(np.int64)


@dataclass(frozen=True)
class Setting:
    """One setting of rollout.partial; oversample=1 is generation without it."""

    oversample: float
    max_staleness: int


class Replica:
    """The groups of one replica.

    Attributes:
        remaining: [groups, n] int64, the tokens that each response still lacks.
        age: [groups] int64, the steps since a group has begun.
    """

    def __init__(self, seed: int, work: Work, sigma: float, setting: Setting):
        self.generator = np.random.default_rng(seed)
        self.work = work
        self.sigma = sigma
        self.setting = setting
        self.remaining = np.zeros((0, work.n), np.int64)
        self.age = np.zeros(0, np.int64)

    def step(self) -> float:
        """Generate until enough groups are complete; return the seconds."""
        self.begin()
        steps_of_group = self.remaining.max(1)
        num_steps = np.sort(steps_of_group)[self.work.groups - 1]
        is_due = self.age >= self.setting.max_staleness
        num_steps = max(num_steps, steps_of_group[is_due].max(initial=0))
        seconds = decoding_seconds(self.remaining, num_steps)
        self.end(num_steps)
        return seconds

    def begin(self) -> None:
        num_new = math.ceil(self.setting.oversample * self.work.groups) - len(self.remaining)
        lengths = self.work.draw_lengths(self.generator, self.sigma, num_new)
        self.remaining = np.concatenate([self.remaining, lengths])
        self.age = np.concatenate([self.age, np.zeros(num_new, np.int64)])

    def end(self, num_steps: int) -> None:
        """Remove the groups that are trained, the oldest ones first; the others continue."""
        complete = np.flatnonzero(self.remaining.max(1) <= num_steps)
        order = np.argsort(-self.age[complete], kind="stable")
        trained = complete[order][: self.work.groups]
        self.remaining = np.delete(np.maximum(self.remaining - num_steps, 0), trained, axis=0)
        self.age = np.delete(self.age, trained) + 1


def decoding_seconds(remaining: np.ndarray, num_steps: int) -> float:
    """Return the time of some decoding steps.

    remaining: the tokens that each response lacks at their beginning.
    """
    num_tokens = np.minimum(remaining, num_steps).sum()
    return num_steps * STEP_SECONDS + num_tokens * SECONDS_PER_RESPONSE


@dataclass(frozen=True)
class Simulated:
    """Seconds of the slowest replica, and the share in which the mean one waits for it."""

    seconds: float
    waiting: float


def simulate(num_replicas: int, work: Work, sigma: float, setting: Setting) -> Simulated:
    """Return means over the steps after the first ones."""
    replicas = [Replica(seed, work, sigma, setting) for seed in range(num_replicas)]
    steps = np.zeros((NUM_STEPS, num_replicas))
    for step in steps:
        step[:] = [replica.step() for replica in replicas]
    steps = steps[NUM_SETTLING_STEPS:]
    slowest = steps.max(1)
    return Simulated(slowest.mean(), 1 - steps.mean() / slowest.mean())


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.5, 1.0, 1.5])
    parser.add_argument("--oversample", type=float, nargs="+", default=[1.25, 1.5])
    parser.add_argument("--max-staleness", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--longest", type=int, default=16384)
    return parser.parse_args()


def make_settings(arguments: argparse.Namespace) -> dict[str, Setting]:
    """Return the columns of the table."""
    settings = {"without": Setting(1.0, 0)}
    for oversample in arguments.oversample:
        for max_staleness in arguments.max_staleness:
            name = f"{oversample:g}, {max_staleness}"
            settings[name] = Setting(oversample, max_staleness)
    return settings


def main() -> None:
    arguments = parse_arguments()
    work = Work(arguments.groups, arguments.n, arguments.tokens, arguments.longest)
    equal_lengths = np.full((work.groups, work.n), work.tokens)
    equal = decoding_seconds(equal_lengths, work.tokens)
    settings = make_settings(arguments)
    print_header("replicas", "sigma", *settings)
    for num_replicas in arguments.replicas:
        for sigma in arguments.sigma:
            cells = []
            for setting in settings.values():
                simulated = simulate(num_replicas, work, sigma, setting)
                ratio = simulated.seconds / equal
                cells.append(f"{ratio:.2f} ({simulated.waiting:.0%})")
            print_row(f"{num_replicas}", f"{sigma:g}", *cells)


if __name__ == "__main__":
    main()
