"""Run train_ppo.py with responses of made-up lengths; benchmarks/long_tails.py starts it.

    torchrun --nproc-per-node 1 benchmarks/long_tails_case.py MEAN SIGMA [train_ppo.py's arguments]

A model with random weights hardly ever ends a response. Here, response i ends after a log-normal
number of tokens with this mean and sigma, which follows from the seed of the response, and at
rollout.max_tokens at the latest. With SIGMA=0, all responses have MEAN tokens.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import config
import train_ppo
from rollout.vllm.engine import Rollout
from rollout.vllm.sampling import RequestSampling

plain_sampling_params = Rollout.sampling_params


class Lengths:
    """The lengths of responses, by their seeds."""

    def __init__(self, mean: float, sigma: float):
        self.mean = mean
        self.sigma = sigma
        self.longest: int | None = None

    def of(self, seed: int) -> int:
        """Return the length of a response without its limit."""
        z = np.random.default_rng(seed).normal()
        return max(1, round(self.mean * math.exp(self.sigma * z - self.sigma**2 / 2)))

    def sampling_params(self, rollout: Rollout, sampling, seed: int):
        """Return the parameters of a request that generates what its response lacks."""
        self.longest = self.longest or sampling.max_tokens  # the first request begins a response
        num_drawn = self.longest - sampling.max_tokens
        num_tokens = min(self.of(seed), self.longest) - num_drawn
        if not isinstance(sampling, RequestSampling):
            sampling = RequestSampling.of(sampling)
        return plain_sampling_params(rollout, replace(sampling, max_tokens=num_tokens), seed)


def main() -> None:
    mean, sigma, *arguments = sys.argv[1:]
    lengths = Lengths(float(mean), float(sigma))
    Rollout.sampling_params = lambda *args: lengths.sampling_params(*args)
    sys.argv[1:] = arguments
    config.run(train_ppo.main, "ppo.yaml", __doc__)


if __name__ == "__main__":
    main()
