"""Metrics of a validation."""

import torch

from algorithms.pass_at_k import pass_at_k
from rl.reward_model import PART as REWARD_MODEL_PART
from rl.scoring import NO_FUNCTION
from rollout.samples import Samples

PASSING_SCORE = 1
SCORE_OF_MODEL = "reward/model/mean"
# Metrics of a validation with rollout.episode, and the metrics of the draw that they show.
EPISODE_METRICS = {
    "val/episodes/turns": "episodes/turns/mean",
    "val/episodes/tool_calls": "episodes/tool_calls/mean",
    "val/episodes/tool_errors": "episodes/tool_errors",
    "val/episodes/limited": "episodes/limited",
    "val/episodes/left_out": "episodes/left_out",
}


def validation_metrics(samples: Samples, function: str, n: int) -> dict[str, float]:
    """Return the metrics of n responses, or episodes, to each prompt.

    function: reward.function. The mean score is called val/{function}, and the mean of each part
    val/{function}/{part}; with a function of none, there are no scores. The mean score of a reward
    model is val/reward_model; it is not included in val/{function}.

    Episodes of several turns add the metrics in EPISODE_METRICS.

    With n > 1, the metrics include pass@k for k = 2, 4, ..., n, and the mean score once more as
    mean@n, its usual name.
    """
    function_name = function.rpartition(":")[2]
    name = f"val/{function_name}"
    episodes = samples.episodes
    metrics = {
        "val/response_length": episodes.total(samples.response_lengths).float().mean().item(),
        "val/truncated": episodes.choose(samples.truncated).float().mean().item(),
        "val/failures": len(samples.failures),
    }
    has_function = function != NO_FUNCTION
    if has_function:
        metrics[name] = episodes.choose(samples.scores).mean().item()
    parts = dict(samples.parts)
    if SCORE_OF_MODEL in samples.metrics:
        del parts[REWARD_MODEL_PART]
        metrics["val/reward_model"] = samples.metrics[SCORE_OF_MODEL]
    for part, values in parts.items():
        metrics[f"{name}/{part}"] = episodes.choose(values).mean().item()
    for key, source in EPISODE_METRICS.items():
        if source in samples.metrics:
            metrics[key] = samples.metrics[source]
    if n > 1 and has_function:
        metrics[f"{name}/mean@{n}"] = metrics[name]
        for k, rate in pass_rates(samples, n).items():
            metrics[f"{name}/pass@{k}"] = rate
    return metrics


def pass_rates(samples: Samples, n: int) -> dict[int, float]:
    """Return k -> pass@k for k = 2, 4, 8, ... and n.

    Groups with responses or episodes that could not be graded do not count. If no group is left,
    the result is empty.
    """
    episodes = samples.episodes
    groups = episodes.choose(samples.group)
    _, index, counts = groups.unique(return_inverse=True, return_counts=True)
    is_complete = counts == n
    if not is_complete.any():
        return {}
    passes = (episodes.choose(samples.scores) >= PASSING_SCORE).long()
    num_passes = torch.zeros_like(counts).index_add_(0, index, passes)[is_complete]
    powers_of_two = {2**i for i in range(1, n.bit_length())}
    return {k: pass_at_k(num_passes, n, k) for k in sorted(powers_of_two | {n})}
