"""Run an engine over a rank's share of a step: a pass without a gradient, or an update."""

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from algorithms.rollout_correction import effective_sample_size
from config import InputError
from data.batching.batch import Batch
from data.batching.plan import MicroBatches, Plan
from engines.base import Engine, LossFn
from rollout.sharing import Share

ROLLOUT_PREFIX = "rollout_corr/"
ROUTING_MISMATCH = "routing_mismatch"
# The largest mean difference in nats that weights and a KV cache in FP8 may cause. SmolLM2-135M has
# 0.14 with a KV cache in FP8, and 0.05 without.
MAX_FP8_GAP = 0.5


def compute(function: Callable[[Batch, MicroBatches], Tensor], share: Share) -> Tensor:
    """Call function(batch, micro_batches), e.g. engine.values, once for each mini-batch of a share.

    Returns the results for all tokens of the share: [T] fp32 on the host.
    """
    results = [function(batch, plan.micro_batches).cpu() for batch, plan in share.parts]
    return torch.cat(results)


def log_probs(engine: Engine, share: Share) -> Tensor:
    """Return the log-probability of each token of a share: [T] fp32 on the host."""
    return compute(lambda batch, micro_batches: engine.log_probs(batch, micro_batches)[0], share)


def check_fp8_kv_cache(share: Share, trainer_log_probs: Tensor, group: dist.ProcessGroup) -> None:
    """Check on a step's responses that FP8 holds this model's keys and values well enough.

    Some models have keys that 3 bits of mantissa represent badly. Responses that are drawn with
    such a cache are useless, and no correction can help. Called by all ranks together.

    Args:
        trainer_log_probs: [T] fp32, computed with the same weights that vLLM had.
        group: a group of all ranks for tensors in host memory.

    Raises:
        InputError: vLLM's log-probabilities are too far from these, on average over all ranks.
    """
    fields = share.batch.fields
    mask = fields["loss_mask"] != 0
    gaps = (trainer_log_probs - fields["rollout_log_probs"]).abs()[mask]
    totals = torch.tensor([gaps.double().sum(), mask.sum()], dtype=torch.float64)
    dist.all_reduce(totals, group=group)
    gap = (totals[0] / totals[1].clamp(min=1)).item()
    if not gap <= MAX_FP8_GAP:
        raise InputError(
            "rollout.kv_cache_dtype=fp8: vLLM's log-probabilities of its responses differ from the "
            f"trainer's by {gap:.2g} nats on average, but 8 bits explain at most {MAX_FP8_GAP:g}. "
            "This model's keys and values need 16 bits: set rollout.kv_cache_dtype=auto"
        )


def update(
    engine: Engine,
    parts: list[tuple[Batch, Plan]],
    loss_fn: LossFn,
    step: int,
    num_epochs: int,
    name: str,
) -> dict[str, float]:
    """Take one optimizer step for each mini-batch and epoch.

    parts: this rank's share of the mini-batches, as in Share.parts. name: the engine's role, for
    the names of metrics.

    Returns metrics {name}/..., which are means over the optimizer steps, except for the number of
    skipped steps. If there is a single optimizer step, the loss may also report rollout_corr/...
    The metric rollout_corr/routing_mismatch is measured in the first optimizer step.
    """
    results = [
        engine.train_batch(batch, loss_fn, step, plan.micro_batches)
        for _ in range(num_epochs)
        for batch, plan in parts
    ]
    metrics = {}
    off_policy_means = {}
    if ROUTING_MISMATCH in results[0]:
        # Later steps would also count what this update has changed.
        metrics[ROLLOUT_PREFIX + ROUTING_MISMATCH] = results[0].pop(ROUTING_MISMATCH)
    for key in results[0]:
        if key.startswith(ROLLOUT_PREFIX):
            off_policy_means[key.removeprefix(ROLLOUT_PREFIX)] = results[0][key]
            continue
        full_name = key if "/" in key else f"{name}/{key}"
        metrics[full_name] = sum(result[key] for result in results) / len(results)
    metrics[f"{name}/skipped"] = sum(result["skipped"] for result in results)
    if off_policy_means:
        metrics |= off_policy_metrics(off_policy_means)
    return metrics


def off_policy_metrics(means: dict[str, float]) -> dict[str, float]:
    """Return metrics rollout_corr/... from the means of off_policy()'s results over tokens.

    With the means of moments_by_age(), also partial/age_{a}/...: the share of the tokens that were
    drawn by weights of this age, and their effective sample size. log_prob_gap is then a mean over
    the tokens that the current weights have drawn, if any: on older ones, vLLM and the trainer
    would not be compared with the same weights.
    """
    sample_size = effective_sample_size(means["ratio"], means["ratio_squared"])
    metrics = {}
    if "age_0_share" not in means:
        metrics[f"{ROLLOUT_PREFIX}log_prob_gap"] = means["log_prob_gap"]
    elif means["age_0_share"]:
        log_prob_gap = means["age_0_log_prob_gap"] / means["age_0_share"]
        metrics[f"{ROLLOUT_PREFIX}log_prob_gap"] = log_prob_gap
    metrics |= {
        f"{ROLLOUT_PREFIX}kl": means["kl"],
        f"{ROLLOUT_PREFIX}ratio": means["ratio"],
        f"{ROLLOUT_PREFIX}effective_sample_size": sample_size,
    }
    for age in itertools.takewhile(lambda a: f"age_{a}_share" in means, itertools.count()):
        share = means[f"age_{age}_share"]
        metrics[f"partial/age_{age}/tokens"] = share
        if share:
            ratio = means[f"age_{age}_ratio"] / share
            ratio_squared = means[f"age_{age}_ratio_squared"] / share
            sample_size = effective_sample_size(ratio, ratio_squared)
            metrics[f"partial/age_{age}/effective_sample_size"] = sample_size
    return metrics
