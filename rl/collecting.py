"""The samples of a step: draw prompts until there are enough groups to learn from."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from algorithms.advantages import grpo_steps, sum_of_normalized
from algorithms.dapo import informative, overlong_penalty
from algorithms.packed import sum_by_sequence
from config import InputError
from data.batching.order import RowsOfBatch
from data.prompts import PromptDataset
from profiling import Profiler
from rl.functions import find_function, inputs_read
from rl.models import longest_response
from rl.reward_model import PART as REWARD_MODEL_PART, uses_reward_model
from rollout.drawing import Request
from rollout.exchange import sum_over_ranks
from rollout.partial.drawing import PartialSampler
from rollout.samples import Samples, concat

# Metrics of a draw that count something in it.
COUNTS = ("episodes/tool_errors",)


class Source(Protocol):
    """Where the samples of a step come from."""

    def draw(self, num_groups: int, first_group: int) -> Samples:
        """Return graded responses to prompts, with greedy baselines if the estimator reads them.

        Args:
            num_groups: how many groups are missing. The result may have more of them, or fewer at
                the end of a run.
            first_group: the number of the first group.
        """

    def end_step(self) -> dict[str, float]:
        """Return metrics of the step, after its last draw."""


@dataclass
class BatchSource:
    """Draws the responses to whole batches of prompts.

    Attributes:
        respond: returns the graded responses to a request.
        batch_index: the number of the next batch.
    """

    config: DictConfig
    respond: Callable[[Request], Samples]
    dataset: PromptDataset
    rows_of_batch: RowsOfBatch
    batch_index: int

    def draw(self, num_groups: int, first_group: int) -> Samples:
        rows = self.rows_of_batch(self.batch_index)
        seed = (self.config.trainer.seed, self.batch_index)
        request = Request(self.dataset, rows, self.config.rollout, seed, first_group)
        self.batch_index += 1
        return with_baselines(self.config, self.respond, request, self.respond(request))

    def end_step(self) -> dict[str, float]:
        return {}


@dataclass
class PartialSource:
    """Draws the groups that are complete, with rollout.partial.

    Attributes:
        respond: returns the graded responses to a request; greedy baselines need it.
        report_failures: reports the responses of a draw that could not be graded.
        version: the number of steps that have trained the weights.
    """

    config: DictConfig
    sampler: PartialSampler
    respond: Callable[[Request], Samples]
    report_failures: Callable[[Samples, int, int], None]
    version: int
    profiler: Profiler

    def draw(self, num_groups: int, first_group: int) -> Samples:
        request, samples = self.sampler.draw(num_groups, self.version, first_group, self.profiler)
        counts = self.sampler.counts
        num_earlier = counts.failed - len(samples.failures)
        self.report_failures(samples, counts.graded, num_earlier)
        return with_baselines(self.config, self.respond, request, samples)

    def end_step(self) -> dict[str, float]:
        return self.sampler.end_step(self.version)

    @property
    def batch_index(self) -> int:
        """The number of the batch whose prompts begin next."""
        return self.sampler.ledger.next_group // self.config.data.train_batch_size


def collect(config: DictConfig, source: Source, ranks: dist.ProcessGroup | None = None) -> Samples:
    """Return one step's samples.

    With algorithm.filter_groups, groups that teach nothing are left out, see
    informative_responses(). More prompts are then drawn, until data.train_batch_size groups are
    left or there have been max_num_gen_batches draws. The metrics cover everything that was drawn.

    ranks: gloo group of all ranks.

    Raises InputError if no response could be graded.
    """
    num_prompts = config.data.train_batch_size
    filter_groups = config.algorithm.filter_groups
    max_draws = filter_groups.max_num_gen_batches if filter_groups.enable else 1
    draws: list[Samples] = []
    first_groups: list[int] = []
    num_kept = 0
    next_group = 0
    while len(draws) < max_draws:
        first_groups.append(next_group)
        draws.append(source.draw(num_prompts - num_kept, next_group))
        drawn = concat(draws)
        next_group = int(drawn.group.max()) + 1 if len(drawn) else 0
        is_informative = informative_responses(config, drawn, ranks)
        keep = is_informative if filter_groups.enable else torch.ones_like(is_informative)
        num_kept = len(drawn.group[keep].unique())
        if num_kept >= num_prompts:
            break
    check_any_graded(drawn, len(draws))
    metrics = collection_metrics(draws, drawn, is_informative) | source.end_step()
    if not keep.any():
        # No group is informative: use the last draw that was graded, whose advantages are 0.
        last_graded = int(drawn.group.max())
        keep = drawn.group >= max(group for group in first_groups if group <= last_graded)
    last_group = drawn.group[keep].unique()[:num_prompts][-1]
    keep &= drawn.group <= last_group
    return replace(drawn.select(keep), metrics=metrics)


def informative_responses(
    config: DictConfig, samples: Samples, ranks: dist.ProcessGroup | None = None
) -> Tensor:
    """Return for each response whether its group teaches anything: [n] bool. Called by all ranks.

    It does if the scores of the group differ, as in DAPO. Some estimators need another criterion.
    With gdpo, which normalizes the parts of the reward one by one, with max_at_k, and with
    grpo_steps, which compares steps, all advantages may be 0 although the scores differ; with gdpo
    and grpo_steps, they may differ although the scores are equal. So the advantages have to differ
    from 0, without the penalties for length and divergence.

    ranks: gloo group of all ranks.
    """
    numbers = samples.scores
    estimator = config.algorithm.adv_estimator
    if estimator == "grpo_steps" and "step_ends" in samples.batch.fields:
        return informative_by_steps(samples, ranks)
    if estimator == "gdpo" and samples.parts:
        episodes = samples.episodes
        parts = {name: episodes.choose(part) for name, part in samples.parts.items()}
        weights = weights_of_parts(config, samples)
        advantages = sum_of_normalized(parts, weights, episodes.choose(samples.group))
        numbers = episodes.repeat(advantages)
    elif estimator == "max_at_k" and len(samples):
        episodes = samples.episodes
        estimate = find_function(config, "adv_estimator")
        group = episodes.choose(samples.group)
        advantages, _ = estimate(outcome=episodes.choose(samples.scores), group=group)
        numbers = episodes.repeat(advantages)
    return informative(numbers, samples.group)


def informative_by_steps(samples: Samples, ranks: dist.ProcessGroup | None) -> Tensor:
    """Return for each response whether grpo_steps gives its group an advantage: [n] bool.

    An advantage below 1e-5 is a rounding error of normalized numbers that cancel.
    """
    fields = samples.batch.fields
    mask = fields["loss_mask"]
    num_responses = len(samples)
    sequence = torch.repeat_interleave(samples.held, samples.batch.cu_seqlens.diff())

    def sum_by_response(x: Tensor) -> Tensor:
        """Return the sum of x [T] over the tokens of each response: [n] float64."""
        inside = torch.where(mask > 0, x, 0).double()
        return sum_over_ranks(sum_by_sequence(inside, sequence, num_responses), ranks)

    advantages, _ = grpo_steps(
        rewards=fields["turn_rewards"],
        mask=mask,
        sequence=sequence,
        num_sequences=num_responses,
        outcome=samples.scores,
        group=samples.group,
        step_rewards=fields["turn_rewards"],
        step_ends=fields["step_ends"],
        sum_by_response=sum_by_response,
    )
    num_taught_tokens = sum_by_response((advantages.abs() > 1e-5).double())
    _, index = samples.group.unique(return_inverse=True)
    return sum_by_sequence(num_taught_tokens, index, num_responses)[index] > 0


def weights_of_parts(config: DictConfig, samples: Samples) -> dict[str, float]:
    """Return the weight of each named part in the scores."""
    weights = dict(config.reward.weights)
    default = 0.0 if weights else 1.0
    weights = {name: weights.get(name, default) for name in samples.parts}
    if uses_reward_model(config):
        weights[REWARD_MODEL_PART] = config.reward.model.weight
    return weights


def with_baselines(
    config: DictConfig, respond: Callable[[Request], Samples], request: Request, samples: Samples
) -> Samples:
    """Return the samples of a request with greedy baselines, if the estimator reads them."""
    if "baseline" not in inputs_read(config, "adv_estimator"):
        return samples
    greedy_sampling = OmegaConf.merge(config.rollout, {"temperature": 0.0, "n": 1})
    greedy = respond(replace(request, sampling=greedy_sampling, max_failures=None))
    return samples.with_baseline(replace(greedy, scores=penalized_scores(config, greedy)))


def check_any_graded(drawn: Samples, num_draws: int) -> None:
    """Raise InputError if no response could be graded."""
    if not len(drawn):
        first = drawn.failures[0]
        raise InputError(
            f"no response to {num_draws} batches of prompts could be graded; the first failure: "
            f"{first.summary}"
        )


def collection_metrics(
    draws: list[Samples], drawn: Samples, is_informative: Tensor
) -> dict[str, float]:
    """Return the metrics of all drawn responses, including groups that are left out."""
    episodes = drawn.episodes
    scores = episodes.choose(drawn.scores)
    metrics = {"rollout/num_gen_batches": len(draws), **score_metrics(scores)}
    sizes = [samples.num_drawn for samples in draws]
    for name in draws[0].metrics:
        metrics[name] = combined(name, [samples.metrics[name] for samples in draws], sizes)
    for name, values in drawn.parts.items():
        metrics[f"reward/{name}/mean"] = episodes.choose(values).mean().item()
    informative_episodes = episodes.choose(is_informative)
    metrics["reward/informative_groups"] = informative_episodes.float().mean().item()
    return metrics


def combined(name: str, values: list[float], sizes: list[int]) -> float:
    """Return a metric of a step from its values in the draws.

    It is a maximum, a count, or a mean in which each draw counts by its size.

    sizes: the numbers of responses, or episodes, that were drawn
    """
    if name.endswith(("/max", "_max")):
        return max(values)
    if name in COUNTS:
        return sum(values)
    return sum(value * size for value, size in zip(values, sizes)) / sum(sizes)


def score_metrics(scores: Tensor) -> dict[str, float]:
    """Return metrics of the scores. critic/score is their old name, kept for one version."""
    return spread("score", scores) | spread("critic/score", scores)


def penalized_scores(config: DictConfig, samples: Samples) -> Tensor:
    """Return [n] fp32: the scores, minus DAPO's penalty for responses close to the length limit."""
    reward = config.reward
    if not reward.overlong_buffer:
        return samples.scores
    penalty = overlong_penalty(
        lengths_against_limit(config, samples),
        longest_response(config),
        reward.overlong_buffer,
        reward.overlong_penalty,
    )
    return samples.scores + samples.episodes.repeat(penalty)


def lengths_against_limit(config: DictConfig, samples: Samples) -> Tensor:
    """Return [E] int64: the length of each response or episode that its limit is about.

    rollout.max_tokens limits sampled tokens. rollout.max_episode_tokens limits both the sampled
    tokens of an episode and its longest sequence, with its prompt and the results of tools, so the
    larger number counts.
    """
    num_sampled = samples.episodes.total(samples.response_lengths)
    if not config.rollout.max_episode_tokens:
        return num_sampled
    return num_sampled.maximum(samples.episodes.largest(samples.lengths))


def spread(name: str, values: Tensor) -> dict[str, float]:
    """Return the mean, maximum and minimum of `values` as metrics {name}/mean, /max and /min."""
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }
