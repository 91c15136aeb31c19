"""The samples of a step: draw prompts until there are enough groups to learn from."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from algorithms.dapo import informative, overlong_penalty
from config import InputError
from data.batching.order import RowsOfBatch
from rl.functions import inputs_read
from rl.models import longest_response
from rollout.samples import Samples, concat

# draw(dataset, rows, sampling, batch_index, first_group=...) -> graded responses to these rows
Draw = Callable[..., Samples]


def collect(
    config: DictConfig, draw: Draw, dataset, rows_of_batch: RowsOfBatch, batch_index: int
) -> tuple[Samples, int]:
    """Return one step's samples, and the number of the next step's first prompt batch.

    With algorithm.filter_groups, groups whose responses all have the same score are left out. More
    prompts are then drawn, until data.train_batch_size groups are left or max_num_gen_batches
    batches have been drawn. The metrics cover everything that was drawn.

    Raises InputError if no response could be graded.
    """
    num_prompts = config.data.train_batch_size
    filter_groups = config.algorithm.filter_groups
    max_draws = filter_groups.max_num_gen_batches if filter_groups.enable else 1
    draws: list[Samples] = []
    while len(draws) < max_draws:
        first_group = len(draws) * num_prompts
        rows = rows_of_batch(batch_index)
        draws.append(draw_batch(config, draw, dataset, rows, batch_index, first_group))
        batch_index += 1
        drawn = concat(draws)
        is_informative = informative(drawn.scores, drawn.group)
        keep = is_informative if filter_groups.enable else torch.ones_like(is_informative)
        if len(drawn.group[keep].unique()) >= num_prompts:
            break
    check_any_graded(drawn, len(draws))
    metrics = collection_metrics(draws, drawn, is_informative)
    if not keep.any():
        # No group is informative: use the last draw, whose advantages are 0.
        draw_of_group = drawn.group // num_prompts
        keep = draw_of_group == draw_of_group[-1]
    last_group = drawn.group[keep].unique()[:num_prompts][-1]
    keep &= drawn.group <= last_group
    return replace(drawn.select(keep), metrics=metrics), batch_index


def draw_batch(
    config: DictConfig,
    draw: Draw,
    dataset,
    rows: Sequence[int],
    batch_index: int,
    first_group: int,
) -> Samples:
    """Draw responses to one batch of prompts, with greedy baselines if the estimator reads them."""
    samples = draw(dataset, rows, config.rollout, batch_index, first_group=first_group)
    if "baseline" not in inputs_read(config, "adv_estimator"):
        return samples
    greedy_sampling = OmegaConf.merge(config.rollout, {"temperature": 0.0, "n": 1})
    greedy = draw(dataset, rows, greedy_sampling, batch_index, first_group=first_group)
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
    for name in draws[0].metrics:
        metrics[name] = sum(samples.metrics[name] for samples in draws) / len(draws)
    for name, values in drawn.parts.items():
        metrics[f"reward/{name}/mean"] = episodes.choose(values).mean().item()
    informative_episodes = episodes.choose(is_informative)
    metrics["reward/informative_groups"] = informative_episodes.float().mean().item()
    return metrics


def score_metrics(scores: Tensor) -> dict[str, float]:
    """Return metrics of the scores. critic/score is their old name, kept for one version."""
    return spread("score", scores) | spread("critic/score", scores)


def penalized_scores(config: DictConfig, samples: Samples) -> Tensor:
    """Return [n] fp32: the scores, minus DAPO's penalty for responses close to the length limit."""
    reward = config.reward
    if not reward.overlong_buffer:
        return samples.scores
    episodes = samples.episodes
    penalty = overlong_penalty(
        episodes.total(samples.response_lengths),
        longest_response(config),
        reward.overlong_buffer,
        reward.overlong_penalty,
    )
    return samples.scores + episodes.repeat(penalty)


def spread(name: str, values: Tensor) -> dict[str, float]:
    """Return the mean, maximum and minimum of `values` as metrics {name}/mean, /max and /min."""
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }
