"""Compute the inputs of the losses from a step's scores, in four stages.

Shape the rewards, estimate advantages, reject tokens that are too far off the policy, and weigh the
remaining tokens.

Every rank knows per-response numbers such as scores and lengths for all n responses of a step, and
holds the T tokens that it trains on. Advantages and denominators are computed from these numbers,
and from sums over the tokens of each response, so they do not depend on the number of ranks.

If episodes have several sequences, "response" means such a sequence below, unless a function says
otherwise. An episode counts once in advantages, denominators and metrics (rollout/samples.py).
"""

from dataclasses import dataclass, replace

import torch
from omegaconf import DictConfig
from torch import Tensor

from algorithms.aggregation import token_mean
from algorithms.kl import adapt
from algorithms.packed import whiten
from algorithms.rollout_correction import keep_mask, moments_by_age, off_policy
from algorithms.value_loss import explained_variance
from config import InputError
from rl.collecting import (
    informative_responses,
    penalized_scores,
    score_metrics,
    spread,
    weights_of_parts,
)
from rl.functions import (
    AdvantageInputs,
    call_estimator,
    check_pair,
    check_shapes,
    find_function,
    inputs_read,
    reads_tokens,
)
from rl.models import longest_response
from rl.updates import off_policy_metrics
from rollout.samples import Episodes, Samples
from rollout.sharing import Share

Metrics = dict[str, float]


@dataclass(frozen=True)
class ShapedRewards:
    """The scores, minus the configured penalties.

    outcome  [n] fp32: the reward of each response, or of its whole episode
    rewards  [T] fp32: the reward of each token. The last sampled token of a response has the
             outcome; rewards of single turns and the penalty for the divergence from the reference
             are on the tokens that cause them
    """

    outcome: Tensor
    rewards: Tensor
    metrics: Metrics


@dataclass(frozen=True)
class Estimate:
    """The advantages and returns of the tokens: [T] fp32 each, 0 outside responses."""

    advantages: Tensor
    returns: Tensor
    metrics: Metrics


@dataclass(frozen=True)
class Rejection:
    """The response tokens that the trainer learns from.

    mask     [T] fp32: the loss mask, 0 on rejected tokens
    lengths  [n] fp32: the number of tokens of each response that are not rejected
    """

    mask: Tensor
    lengths: Tensor
    metrics: Metrics


@dataclass(frozen=True)
class Weights:
    """The weights of the tokens in their mini-batch: [T] fp32 each, 0 on rejected tokens.

    loss   weight in the loss, as algorithm.loss_agg_mode determines
    token  weight in means over tokens
    """

    loss: Tensor
    token: Tensor


class ResponseTokens:
    """Reduce values over the tokens of each response; all ranks get the results for all responses.

    mask     [T] fp32: 1 on response tokens, which need not be contiguous
    indices  their positions, in order
    lengths  [m] int64: the number of response tokens of each response of the share
    """

    def __init__(self, share: Share):
        self.share = share
        self.mask = share.batch.fields["loss_mask"]
        self.indices = self.mask.nonzero()[:, 0]
        self.lengths = torch.searchsorted(self.indices, share.batch.cu_seqlens).diff()

    def put_last(self, x: Tensor) -> Tensor:
        """Put the number of each response, x [n], on its last response token: [T], 0 elsewhere."""
        has_tokens = self.lengths > 0
        last_tokens = self.indices[self.lengths.cumsum(0)[has_tokens] - 1]
        x_of_share = x[self.share.indices][has_tokens]
        return torch.zeros_like(self.mask).index_copy(0, last_tokens, x_of_share)

    def reduce(self, *reductions: tuple[Tensor, str]) -> Tensor:
        """Reduce tensors over the tokens of each response.

        reductions: pairs (x, reduction), where x is [T] and reduction is "sum", "max" or "min".

        Returns [n, len(reductions)] float64.
        """
        reduced = [
            torch.segment_reduce(
                x[self.indices].double(), reduction, lengths=self.lengths, unsafe=True
            )
            for x, reduction in reductions
        ]
        return self.share.gather_responses(torch.stack(reduced, 1))

    def sum_by_response(self, x: Tensor) -> Tensor:
        """Return the sum of x [T] over the tokens of each response: [n] float64."""
        return self.reduce((x, "sum"))[:, 0]

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of x [T] over all response tokens of the step: a float64 scalar."""
        return self.reduce((x, "sum")).sum()


def set_advantages(
    config: DictConfig, samples: Samples, share: Share, kl_coef: float
) -> dict[str, float]:
    """Fill the fields of the share that the losses read, and return metrics of all samples.

    All are [T] fp32, except sequence and group (int64):

    sequence                   the response of the share that a token belongs to
    advantages, returns        0 outside responses
    loss_weight                weight of a token in the loss of its mini-batch, as
                               algorithm.loss_agg_mode determines
    token_weight               weight of a token in means over the tokens of its mini-batch
    group, scores              the group and score of the token's response, if the policy loss
                               reads them

    Both weights are 0 on rejected tokens, which do not count in the denominators either.
    """
    fields = share.batch.fields
    tokens = ResponseTokens(share)
    fields["sequence"] = sequence_in_share(share)

    shaped = shape_rewards(config, samples, tokens, kl_coef)
    estimate = estimate_advantages(config, samples, tokens, shaped)
    fields["advantages"] = estimate.advantages
    fields["returns"] = estimate.returns
    off_policy_gap = measure_off_policy(config, samples, tokens)
    rejection = reject_tokens(config, samples, tokens)
    loss_reads = inputs_read(config, "loss_mode")
    if "group" in loss_reads:
        fields["group"] = share.repeat_on_tokens(samples.group)
    if "scores" in loss_reads:
        fields["scores"] = share.repeat_on_tokens(samples.scores)
    weights = weigh_tokens(config, samples, share, rejection)
    fields["loss_weight"] = weights.loss
    fields["token_weight"] = weights.token
    return {
        **shaped.metrics,
        **estimate.metrics,
        **off_policy_gap,
        **rejection.metrics,
        **value_metrics(samples, tokens),
        **sample_metrics(config, samples, share),
        **samples.metrics,
        **share.metrics,
    }


def sequence_in_share(share: Share) -> Tensor:
    """Return the response of the share that each token belongs to: [T] int64."""
    num_responses = len(share.batch)
    return torch.repeat_interleave(torch.arange(num_responses), share.batch.cu_seqlens.diff())


def shape_rewards(
    config: DictConfig, samples: Samples, tokens: ResponseTokens, kl_coef: float
) -> ShapedRewards:
    """Subtract the penalties for length and for the divergence from the reference.

    The metrics critic/rewards/... include the penalty for length, but not the one for divergence.
    """
    episodes = samples.episodes
    outcome = penalized_scores(config, samples)
    metrics = score_metrics(episodes.choose(samples.scores))
    metrics |= spread("critic/rewards", episodes.choose(outcome))
    rewards = reward_tokens(samples, tokens, outcome)
    if config.algorithm.use_kl_in_reward:
        fields = tokens.share.batch.fields
        divergence = find_function(config, "kl_penalty")(
            log_probs=fields["old_log_probs"], ref_log_probs=fields["ref_log_probs"]
        )
        check_shapes(config, "kl_penalty", tokens.mask, divergence)
        divergence_of_response = tokens.reduce((divergence, "sum"))[:, 0]
        rewards = rewards - kl_coef * (divergence * tokens.mask)
        divergence_of_episode = episodes.repeat(episodes.total(divergence_of_response))
        outcome = (outcome - kl_coef * divergence_of_episode).float()
        num_tokens = samples.response_lengths.sum().item()
        metrics["actor/reward_kl"] = divergence_of_response.sum().item() / num_tokens
        metrics["actor/kl_coef"] = kl_coef
    return ShapedRewards(outcome, rewards, metrics)


def reward_tokens(samples: Samples, tokens: ResponseTokens, outcome: Tensor) -> Tensor:
    """Return the rewards of the tokens, without the divergence from the reference: [T] fp32.

    outcome: [n] fp32. The last sampled token of each branch gets the outcome minus the rewards that
    turns of the episode have received.
    """
    fields = tokens.share.batch.fields
    if "turn_rewards" not in fields:
        return tokens.put_last(outcome)
    turn_rewards = fields["turn_rewards"] * tokens.mask
    episodes = samples.episodes
    received = episodes.total(tokens.reduce((turn_rewards, "sum"))[:, 0])
    remaining = outcome - episodes.repeat(received)
    return tokens.put_last(remaining.float()) + turn_rewards


def estimate_advantages(
    config: DictConfig, samples: Samples, tokens: ResponseTokens, shaped: ShapedRewards
) -> Estimate:
    """Call the advantage estimator, and spread its results over the tokens.

    An estimator that reads tokens gets each sequence as a response, any other one each episode.
    """
    share = tokens.share
    is_per_token = bool(reads_tokens(config))
    units = Episodes.of_one_sequence(len(samples)) if is_per_token else samples.episodes
    inputs = advantage_inputs(config, samples, tokens, shaped, units)
    key = "adv_estimator"
    result = call_estimator(config, inputs)
    check_pair(config, key, result, Tensor, "advantages and returns")
    if is_per_token:
        check_shapes(config, key, tokens.mask, *result)
        advantages, returns = result
        if config.algorithm.whiten_advantages:
            advantages = whiten(advantages, tokens.mask, tokens.total)
        metrics = token_metrics("critic/advantages", advantages, samples, tokens)
        metrics |= token_metrics("critic/returns", returns, samples, tokens)
        return Estimate(advantages, returns, metrics)
    check_shapes(config, key, inputs.outcome, *result, unit="response")
    advantages, returns = map(units.repeat, result)
    if config.algorithm.whiten_advantages:
        advantages = whiten(advantages, samples.response_lengths)
    metrics = response_metrics("critic/advantages", advantages, samples)
    metrics |= response_metrics("critic/returns", returns, samples)
    return Estimate(
        share.repeat_on_tokens(advantages) * tokens.mask,
        share.repeat_on_tokens(returns) * tokens.mask,
        metrics,
    )


def advantage_inputs(
    config: DictConfig,
    samples: Samples,
    tokens: ResponseTokens,
    shaped: ShapedRewards,
    units: Episodes,
) -> AdvantageInputs:
    """Return the estimator's inputs. units: the sequences that it sees as one response."""
    fields = tokens.share.batch.fields
    baseline = samples.baseline
    return AdvantageInputs(
        rewards=shaped.rewards,
        mask=tokens.mask,
        sequence=tokens.share.repeat_on_tokens(units.index),
        group=units.choose(samples.group),
        values=fields.get("values"),
        baseline=None if baseline is None else units.choose(baseline),
        old_log_probs=fields.get("old_log_probs"),
        ref_log_probs=fields.get("ref_log_probs"),
        rollout_log_probs=fields.get("rollout_log_probs"),
        outcome=units.choose(shaped.outcome),
        lengths=units.total(samples.response_lengths),
        parts={name: units.choose(part) for name, part in samples.parts.items()},
        part_weights=part_weights(config, samples),
        num_sequences=len(units),
        total=tokens.total,
        step_rewards=fields.get("turn_rewards"),
        step_ends=fields.get("step_ends"),
        sum_by_response=tokens.sum_by_response,
        gamma=config.algorithm.gamma,
        lam=config.algorithm.lam,
    )


def part_weights(config: DictConfig, samples: Samples) -> dict[str, float]:
    """Return the weight of each named part in the scores.

    Raises InputError if the estimator reads the parts, but the scores consist of something else.
    """
    weights = weights_of_parts(config, samples)
    inputs = inputs_read(config, "adv_estimator")
    if "parts" not in inputs:
        return weights
    estimator = f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
    if not samples.parts:
        raise InputError(
            f"{estimator} reads the named parts of the reward, but the reward function returns a "
            "number: return a dictionary, such as {'correct': 1.0, 'format': 0.0}"
        )
    if "part_weights" not in inputs:
        return weights
    weighted = [weights[name] * part.double() for name, part in samples.parts.items()]
    difference = (samples.scores - sum(weighted)).abs().max().item()
    if difference > 1e-4 * (1 + samples.scores.abs().max().item()):
        raise InputError(
            f"{estimator} reads the named parts of the reward, but some scores are not their "
            f"weighted sum (the difference is {difference:.3g}): name the parts that count in "
            "reward.weights; rewards of single turns and rollout.limit_score have no parts"
        )
    return weights


def token_metrics(name: str, x: Tensor, samples: Samples, tokens: ResponseTokens) -> Metrics:
    """Return the mean, maximum and minimum of x [T] over the response tokens of the step."""
    return extremes(name, tokens.reduce((x, "sum"), (x, "max"), (x, "min")), samples)


def response_metrics(name: str, x: Tensor, samples: Samples) -> Metrics:
    """Return the same metrics for x [n], whose entries apply to all tokens of a response."""
    return extremes(name, torch.stack([x * samples.response_lengths, x, x], 1).double(), samples)


def extremes(name: str, reduced: Tensor, samples: Samples) -> Metrics:
    """Return metrics from the sum, maximum and minimum over each response: [n, 3] float64."""
    lengths = samples.response_lengths
    sums, maxima, minima = reduced[lengths > 0].unbind(1)
    return {
        f"{name}/mean": sums.sum().item() / lengths.sum().item(),
        f"{name}/max": maxima.max().item(),
        f"{name}/min": minima.min().item(),
    }


def measure_off_policy(config: DictConfig, samples: Samples, tokens: ResponseTokens) -> Metrics:
    """Return metrics of the gap between vLLM's and the trainer's log-probabilities.

    Without old_log_probs there are none yet: the loss reports them instead (rl/losses.py).
    """
    fields = tokens.share.batch.fields
    if "old_log_probs" not in fields:
        return {}
    gaps = off_policy(fields["old_log_probs"], fields["rollout_log_probs"], tokens.mask)
    if "age" in fields:
        max_age = config.rollout.partial.max_staleness
        gaps |= moments_by_age(gaps, fields["age"], tokens.mask, max_age)
    sums = tokens.reduce(*((x, "sum") for x in gaps.values())).sum(0)
    means = sums / samples.response_lengths.sum().item()
    return off_policy_metrics(dict(zip(gaps, means.tolist())))


def reject_tokens(config: DictConfig, samples: Samples, tokens: ResponseTokens) -> Rejection:
    """Leave out the tokens that should not be learned from.

    algorithm.rollout_rs rejects tokens that are too far off the trainer's policy, and
    algorithm.mask_truncated leaves out truncated responses, or episodes.
    """
    algorithm = config.algorithm
    rejection = Rejection(tokens.mask, samples.response_lengths.float(), {})
    if algorithm.rollout_rs != "none":
        rejection = reject_off_policy(config, samples, tokens)
    if not algorithm.mask_truncated:
        return rejection
    is_whole = (~samples.truncated).float()
    return replace(
        rejection,
        mask=rejection.mask * tokens.share.repeat_on_tokens(is_whole),
        lengths=rejection.lengths * is_whole,
    )


def reject_off_policy(config: DictConfig, samples: Samples, tokens: ResponseTokens) -> Rejection:
    """Reject tokens too far off the trainer's policy, as configured in algorithm.rollout_rs."""
    algorithm = config.algorithm
    share = tokens.share
    mask = keep_mask(
        share.batch.fields["old_log_probs"],
        share.batch.fields["rollout_log_probs"],
        tokens.mask,
        sequence_in_share(share),
        len(share.batch),
        level=algorithm.rollout_rs,
        low=algorithm.rollout_rs_threshold_lower,
        high=algorithm.rollout_rs_threshold,
    )
    lengths = tokens.reduce((mask, "sum"))[:, 0].float()
    kept_share = lengths.sum().item() / samples.response_lengths.sum().item()
    return Rejection(mask, lengths, {"rollout_corr/rejected": 1 - kept_share})


def weigh_tokens(
    config: DictConfig, samples: Samples, share: Share, rejection: Rejection
) -> Weights:
    """Return the weights with which token losses add up to the loss of each mini-batch.

    The tokens of all branches of an episode are weighted as those of a single response.
    """
    aggregate = find_function(config, "loss_agg_mode")
    max_tokens = longest_response(config)
    episodes = samples.episodes
    all_lengths = episodes.total(rejection.lengths)
    mini_batches = episodes.choose(share.mini_batches)
    loss_weight = torch.zeros(len(episodes))
    token_weight = torch.zeros(len(episodes))
    for mini_batch in range(share.num_mini_batches):
        is_inside = (mini_batches == mini_batch).float()
        lengths = all_lengths * is_inside
        loss_weight_inside = aggregate(lengths=lengths, max_tokens=max_tokens)
        check_shapes(config, "loss_agg_mode", all_lengths, loss_weight_inside, unit="response")
        loss_weight += loss_weight_inside * is_inside
        token_weight += token_mean(lengths) * is_inside
    return Weights(
        share.repeat_on_tokens(episodes.repeat(loss_weight)) * rejection.mask,
        share.repeat_on_tokens(episodes.repeat(token_weight)) * rejection.mask,
    )


def value_metrics(samples: Samples, tokens: ResponseTokens) -> Metrics:
    """Return metrics of the critic's values, or none without a critic."""
    fields = tokens.share.batch.fields
    if "values" not in fields:
        return {}
    values = fields["values"]
    explained = explained_variance(values, fields["returns"], tokens.mask, tokens.total)
    num_tokens = samples.response_lengths.sum().item()
    return {
        "critic/vf_explained_var": explained,
        "critic/values/mean": tokens.total(values).item() / num_tokens,
    }


def sample_metrics(config: DictConfig, samples: Samples, share: Share) -> Metrics:
    """Return metrics of the lengths, scores and failures; an episode counts once."""
    episodes = samples.episodes
    response_lengths = episodes.total(samples.response_lengths)
    prompt_lengths = episodes.choose(samples.lengths - samples.response_lengths)
    is_truncated = episodes.choose(samples.truncated)
    is_informative = episodes.choose(informative_responses(config, samples, share.group))
    return {
        **spread("response_length", response_lengths.float()),
        **spread("prompt_length", prompt_lengths.float()),
        "response_length/clip_ratio": is_truncated.float().mean().item(),
        "reward/informative_groups": is_informative.float().mean().item(),
        "reward/failure_rate": len(samples.failures) / samples.num_drawn,
        **branch_metrics(samples),
    }


def branch_metrics(samples: Samples) -> Metrics:
    """Return metrics of the number of sequences per episode; none without episodes."""
    if samples.episode is None:
        return {}
    num_branches = samples.episodes.total(torch.ones(len(samples)))
    return {
        "episodes/branches/mean": num_branches.mean().item(),
        "episodes/branches/max": num_branches.max().item(),
        "episodes/branched": (num_branches > 1).float().mean().item(),
    }


def next_kl_coef(
    config: DictConfig, kl_coef: float, metrics: dict[str, float], num_responses: int
) -> float:
    """Return the coefficient of the KL penalty in the rewards of the next step.

    kl_coef: the coefficient of this step. metrics: the result of set_advantages().

    With algorithm.kl_ctrl.type=fixed, the coefficient does not change.
    """
    control = config.algorithm.kl_ctrl
    if control.type == "fixed":
        return kl_coef
    divergence = metrics["actor/reward_kl"]
    return adapt(kl_coef, divergence, control.target_kl, control.horizon, num_responses)
