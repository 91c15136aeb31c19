"""Configurations and samples for tests of a step, made by hand."""

import math

import torch

from config import load
from data.batching.batch import Batch
from data.batching.plan import Plan
from data.prompts import Prompt
from rl.estimation import set_advantages
from rollout.grading.grader import Failure
from rollout.samples import Samples
from rollout.sharing import Share


def configure(*more, path="unused"):
    """Return the configuration of train_ppo.py with some settings."""
    return load(
        "ppo.yaml",
        [f"model.path={path}", "data.train_files=unused", "engine.compute_dtype=float32", *more],
    )


def make_samples(lengths, scores, group, baseline=None, failures=()):
    """Return samples with prompts of two tokens and responses of these lengths.

    Every token has a log-probability of -1 in vLLM.
    """
    masks = [torch.tensor([0.0, 0.0] + [1.0] * length) for length in lengths]
    mask = torch.cat([torch.empty(0), *masks])
    cu_seqlens = torch.tensor([0, *map(len, masks)]).cumsum(0)
    batch = Batch(
        torch.arange(len(mask)), cu_seqlens, {"loss_mask": mask, "rollout_log_probs": -mask}
    )
    return Samples(
        batch,
        [f"response {i}" for i in range(len(lengths))],
        [Prompt([1, 2], f"prompt {g}", {}) for g in group],
        **on_one_rank(batch),
        group=torch.tensor(group),
        scores=torch.tensor(scores, dtype=torch.float32),
        truncated=torch.tensor([length > 3 for length in lengths], dtype=torch.bool),
        failures=list(failures),
        num_drawn=len(lengths) + len(failures),
        baseline=None if baseline is None else torch.tensor(baseline),
    )


def on_one_rank(batch):
    """Return the fields of Samples for a batch that this process has alone."""
    sums = torch.cat([torch.zeros(1), batch.fields["loss_mask"].cumsum(0)])[batch.cu_seqlens]
    return {
        "owner": torch.zeros(len(batch), dtype=torch.int64),
        "rank": 0,
        "lengths": batch.cu_seqlens.diff(),
        "response_lengths": sums.diff().long(),
    }


def whole(samples, minis=None):
    """Return the share of a process alone.

    minis: the mini-batch of each response, in order; None: all are in one.
    """
    minis = torch.tensor(minis or [0] * len(samples))
    n = len(samples)
    plans = [
        Plan(list(range(k)), [(1, list(range(k)))], torch.zeros(k), torch.ones(k))
        for k in minis.bincount().tolist()
    ]
    return Share(samples.batch, torch.arange(n), minis, plans, torch.ones(n, dtype=torch.bool))


def failure(number):
    """Return a failure with a number by which to tell it from others."""
    return Failure("raised", f"trace {number}", {"number": number}, "text")


def on_responses(samples, values):
    """Return the values of the response tokens."""
    return values[samples.batch.fields["loss_mask"] > 0].tolist()


def advantages(samples, *more, minis=None, kl_coef=0.001, **fields):
    """Return the fields and metrics of set_advantages().

    fields: values of the response tokens, in order.
    """
    for name, values in fields.items():
        mask = samples.batch.fields["loss_mask"]
        samples.batch.fields[name] = torch.zeros_like(mask).masked_scatter(
            mask > 0, torch.tensor(values)
        )
    config = configure(*more)
    metrics = set_advantages(config, samples, whole(samples, minis), kl_coef)
    return samples.batch.fields, metrics


# By name: log_prob - ref_log_prob -> the estimate, and its derivative.
DIVERGENCES = {
    "k1": lambda d: (d, 1),
    "k2": lambda d: (d * d / 2, d),
    "abs": lambda d: (abs(d), math.copysign(1, d)),
    "k3": lambda d: (math.exp(-d) - 1 + d, 1 - math.exp(-d)),
}
