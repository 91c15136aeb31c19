"""Configurations and samples for tests of a step, made by hand."""

import math
from dataclasses import dataclass, field

import torch

from config import load
from data.batching.batch import Batch
from data.batching.plan import Plan
from data.prompts import Prompt
from rl.estimation import set_advantages
from rl.losses import ActorLoss
from rl.settings import check_settings
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


@dataclass
class Episode:
    """An episode, made by hand.

    branches      its sequences, one character per token: x if it was sampled, otherwise a dot
    turn_rewards  (branch, position) -> the reward of the turn that ends there
    """

    group: int
    score: float
    branches: list[str]
    turn_rewards: dict[tuple[int, int], float] = field(default_factory=dict)
    is_truncated: bool = False

    @property
    def num_sampled(self) -> int:
        """The number of sampled tokens."""
        return "".join(self.branches).count("x")


def sequences_of(episodes):
    """Return the sequences in the order of make_episodes(), as pairs (episode, branch).

    The branches of an episode are not neighbours if its group has other episodes.
    """
    pairs = [(e, b) for e, episode in enumerate(episodes) for b in range(len(episode.branches))]
    return sorted(pairs, key=lambda pair: (episodes[pair[0]].group, pair[1], pair[0]))


def make_episodes(episodes, baseline=None, failures=()):
    """Return the samples of these episodes.

    The numbers of the episodes are in none of the orders of episodes and of sequences. baseline:
    group -> score. Every token has a log-probability of -1 in vLLM.
    """
    sequences = sequences_of(episodes)
    texts = [episodes[e].branches[b] for e, b in sequences]
    mask = torch.tensor([float(token == "x") for token in "".join(texts)])
    cu_seqlens = torch.tensor([0, *map(len, texts)]).cumsum(0)
    fields = {"loss_mask": mask, "rollout_log_probs": -mask}
    if any(episode.turn_rewards for episode in episodes):
        fields["turn_rewards"] = torch.zeros(len(mask))
        for start, (e, b) in zip(cu_seqlens.tolist(), sequences):
            for (branch, position), reward in episodes[e].turn_rewards.items():
                if branch == b:
                    fields["turn_rewards"][start + position] = reward
    batch = Batch(torch.arange(len(mask)), cu_seqlens, fields)
    group = [episodes[e].group for e, _ in sequences]
    return Samples(
        batch,
        texts,
        [Prompt([1, 2], f"prompt {g}", {}) for g in group],
        **on_one_rank(batch),
        group=torch.tensor(group),
        scores=torch.tensor([float(episodes[e].score) for e, _ in sequences]),
        truncated=torch.tensor([episodes[e].is_truncated for e, _ in sequences]),
        failures=list(failures),
        num_drawn=len(episodes) + len(failures),
        baseline=None if baseline is None else torch.tensor([baseline[g] for g in group]),
        episode=torch.tensor([5 * e % 23 for e, _ in sequences]),
    )


def on_one_rank(batch):
    """Return the fields of Samples for a batch that only this process holds."""
    sums = torch.cat([torch.zeros(1), batch.fields["loss_mask"].cumsum(0)])[batch.cu_seqlens]
    return {
        "owner": torch.zeros(len(batch), dtype=torch.int64),
        "rank": 0,
        "lengths": batch.cu_seqlens.diff(),
        "response_lengths": sums.diff().long(),
    }


def whole(samples, minis=None):
    """Return the share of a single process.

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
    """Return a failure that contains this number, so that tests can tell failures apart."""
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


@dataclass
class LossOfTokens:
    """The actor's loss, its metrics, and its gradient by the log-probabilities."""

    loss: float
    metrics: dict[str, float]
    gradient: list[float]


def loss_of_two_tokens(config, **fields) -> LossOfTokens:
    """Return the actor's loss for two responses of one token each, with weight 0.5 each.

    fields: values of the two tokens by name. The log-probabilities are -1.5 and -0.5.
    """
    check_settings(config)
    half = torch.tensor([0.5, 0.5])
    log_probs = torch.tensor([-1.5, -0.5], requires_grad=True)
    entropy = torch.tensor([1.0, 3.0])
    tensors = {
        "loss_weight": half,
        "token_weight": half,
        "sequence": torch.tensor([0, 1]),
        "loss_mask": torch.ones(2),
        "rollout_log_probs": log_probs.detach(),
    }
    for name, values in fields.items():
        tensors[name] = torch.tensor(values)
    loss, amounts = ActorLoss(config, 2)(log_probs, entropy, tensors)
    loss.backward()
    metrics = {name: amount.item() for name, amount in amounts.items()}
    return LossOfTokens(loss.item(), metrics, log_probs.grad.tolist())


# Name -> the estimate and its derivative, as functions of log_prob - ref_log_prob.
DIVERGENCES = {
    "k1": lambda d: (d, 1),
    "k2": lambda d: (d * d / 2, d),
    "abs": lambda d: (abs(d), math.copysign(1, d)),
    "k3": lambda d: (math.exp(-d) - 1 + d, 1 - math.exp(-d)),
}


def on_tokens(is_sampled, values):
    """Return the numbers of the sampled tokens, among zeros for all other tokens: a leaf."""
    everywhere = torch.zeros(len(is_sampled))
    return everywhere.masked_scatter(is_sampled, torch.tensor(values)).requires_grad_()


def assert_same_gradient(ours, theirs):
    """Assert that two gradients differ by at most 1e-5 of the largest number."""
    largest = theirs.abs().max().item()
    assert largest > 0
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * largest)
