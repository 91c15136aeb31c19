"""Sampling: the parameters, seeds and end tokens of requests, and global random states."""

import hashlib
import random
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from common.end_tokens import read_end_ids
from config import InputError
from data.selection import validation_rows

# Up to this many tokens may tie with the least likely of the top_k. vLLM samples from all of them.
NUM_TIES = 8


def validation_sampling(config: DictConfig) -> DictConfig:
    """Return the group `validation`, with the values of `rollout` in place of null."""
    validation = config.validation
    unset = {key: config.rollout[key] for key, value in validation.items() if value is None}
    return OmegaConf.merge(validation, unset)


def sampling_groups(config: DictConfig) -> dict[str, DictConfig]:
    """Return the sampling settings of a run, by group: `validation` only if it validates."""
    groups = {"rollout": config.rollout}
    if validation_rows(config.data) is not None:
        groups["validation"] = validation_sampling(config)
    return groups


def count_candidates(sampling: DictConfig, vocab_size: int) -> int:
    """Return how many of the most likely tokens vLLM has to report for each sampled token.

    They include all tokens that top_k permits. The number is 0 if sampling is greedy or top_k is
    not set.
    """
    if sampling.temperature == 0 or sampling.top_k <= 0:
        return 0
    return min(sampling.top_k + NUM_TIES, vocab_size)


@dataclass(frozen=True)
class RequestSampling:
    """How a request samples: the keys of `rollout` and `validation` with the same names.

    Reading a DictConfig takes long. Where requests differ, this class saves a millisecond for each.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    stop: list[str]

    @staticmethod
    def of(sampling: DictConfig) -> "RequestSampling":
        """Return the values in a section of the configuration."""
        names = [field.name for field in fields(RequestSampling)]
        values = {name: sampling[name] for name in names}
        return RequestSampling(**values | {"stop": list(sampling.stop)})


def sampling_params(
    sampling: DictConfig | RequestSampling, seed: int, stop_token_ids: list[int], vocab_size: int
):
    """Return vLLM's SamplingParams for one request.

    Args:
        sampling: temperature (0: greedy), top_p, top_k (-1: all), min_p, max_tokens, stop.
    """
    from vllm import SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        # vLLM ignores these three in greedy decoding.
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop) or None,
        stop_token_ids=stop_token_ids,
        seed=seed,
        logprobs=count_candidates(sampling, vocab_size),
        flat_logprobs=True,
        # A stop string may contain special tokens.
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        skip_clone=True,  # vLLM may keep this object, which no other request uses
    )


def next_token_params(temperature: float, token_id: int):
    """Return vLLM's SamplingParams that report a token's log-probability as the next token."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=temperature,
        max_tokens=1,
        seed=0,
        detokenize=False,
        logprob_token_ids=[token_id],
    )


def find_stop_token_ids(model_path: Path) -> list[int]:
    """Return the ids that end a response, in ascending order.

    They are the values of eos_token_id in generation_config.json and in config.json.

    Raises:
        InputError: Neither file has one.
    """
    ids = read_end_ids(model_path)
    if not ids:
        raise InputError(
            f"model.path={model_path}: neither generation_config.json nor config.json has an "
            "eos_token_id: add the id of the token that ends a response to one of them"
        )
    return sorted(ids)


def request_seed(*numbers: int) -> int:
    """Compute a request's seed from numbers, e.g. (trainer.seed, step, prompt, sample).

    The seed is 62 bits of the numbers' SHA-256, so different responses have unrelated seeds.
    """
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


@contextmanager
def preserved_random_state():
    """Restore the states of Python's, NumPy's and torch's global random generators at the end.

    vLLM seeds these generators and draws from them, even if every request has its own seed.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    cpu_state = torch.get_rng_state()
    device_state = None
    if torch.accelerator.is_available():
        device_state = torch.get_device_module().get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu_state)
        if device_state is not None:
            torch.get_device_module().set_rng_state(device_state)
