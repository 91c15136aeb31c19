"""What PPO does with a step's samples: mini-batches, advantages, losses. The formulas are in algorithms/.

Every rank holds the tokens of the whole step in host memory, [T] over all n responses, and divides only what costs:
forward and backward. Mini-batches are lists of response indices, and so do not depend on the number of ranks.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from algorithms.advantages import ADVANTAGES
from algorithms.aggregation import AGGREGATIONS, loss_weights
from algorithms.dapo import informative, overlong_penalty
from algorithms.kl import KL_ESTIMATORS, adapt
from algorithms.pass_at_k import pass_at_k
from algorithms.policy_losses import POLICY_LOSSES
from algorithms.rollout_correction import correction_weights, effective_sample_size, keep_mask, off_policy
from algorithms.value_loss import explained_variance, value_loss
from config import CONFIGS, InputError
from data.packing import Batch, global_batch, partition
from engines.base import Engine, LossFn
from engines.build import engine_class
from rollout.samples import Samples, concat


def check(config: DictConfig) -> None:
    """Raise InputError for settings that contradict each other."""
    algorithm, reward, rollout = config.algorithm, config.reward, config.rollout
    size = algorithm.ppo_mini_batch_size or config.data.train_batch_size
    if config.data.train_batch_size % size:
        raise InputError(f"algorithm.ppo_mini_batch_size={size} does not divide data.train_batch_size="
                         f"{config.data.train_batch_size}")
    for key, known in (("adv_estimator", ADVANTAGES), ("loss_mode", POLICY_LOSSES), ("loss_agg_mode", AGGREGATIONS),
                       ("kl_penalty", KL_ESTIMATORS), ("kl_loss_type", KL_ESTIMATORS)):
        if algorithm[key] not in known:
            raise InputError(f"algorithm.{key}={algorithm[key]} must be one of {', '.join(known)}")
    check_effect(config)
    if config.validation.n > 1 and config.validation.temperature == 0:
        raise InputError(f"validation.n={config.validation.n} gives that many equal responses with validation.temperature=0: "
                         "raise the temperature")
    if algorithm.filter_groups.enable and rollout.n < 2:
        raise InputError("algorithm.filter_groups.enable=true needs rollout.n of 2 or more: one response always agrees with "
                         "itself")
    if reward.overlong_buffer > rollout.max_tokens:
        raise InputError(f"reward.overlong_buffer={reward.overlong_buffer} is more than rollout.max_tokens={rollout.max_tokens}")
    longest = config.data.max_prompt_length + rollout.max_tokens
    if longest > config.data.max_tokens_per_micro_batch:
        raise InputError(f"data.max_prompt_length + rollout.max_tokens = {longest} is more than "
                         f"data.max_tokens_per_micro_batch={config.data.max_tokens_per_micro_batch}: raise it, or lower them")


def check_effect(config: DictConfig) -> None:
    """Raise InputError for a key that is not at its default and that nothing reads."""
    algorithm, defaults = config.algorithm, OmegaConf.load(CONFIGS / "ppo.yaml")
    for keys, holds, needs in (
            ("critic.path critic.lr critic.cliprange_value critic.warmup_steps algorithm.lam",
             algorithm.adv_estimator == "gae", "algorithm.adv_estimator=gae"),
            ("algorithm.gamma", algorithm.adv_estimator in ("gae", "reinforce_plus_plus"),
             "algorithm.adv_estimator=gae or reinforce_plus_plus"),
            ("algorithm.clip_ratio_c", algorithm.loss_mode != "cispo", "algorithm.loss_mode=ppo or gspo"),
            ("algorithm.kl_penalty algorithm.kl_ctrl.type algorithm.kl_ctrl.kl_coef", algorithm.use_kl_in_reward,
             "algorithm.use_kl_in_reward=true"),
            ("algorithm.kl_ctrl.target_kl algorithm.kl_ctrl.horizon", algorithm.kl_ctrl.type == "adaptive",
             "algorithm.kl_ctrl.type=adaptive"),
            ("algorithm.kl_loss_type algorithm.kl_loss_coef", algorithm.use_kl_loss, "algorithm.use_kl_loss=true"),
            ("reference.path offload.reference", uses_reference(config),
             "algorithm.use_kl_loss=true or algorithm.use_kl_in_reward=true"),
            ("algorithm.rollout_is_threshold", algorithm.rollout_is != "none", "algorithm.rollout_is"),
            ("algorithm.rollout_rs_threshold algorithm.rollout_rs_threshold_lower", algorithm.rollout_rs != "none",
             "algorithm.rollout_rs"),
            ("validation.top_p validation.top_k validation.min_p", config.validation.temperature > 0,
             "validation.temperature above 0"),
            ("reward.overlong_penalty", config.reward.overlong_buffer > 0, "reward.overlong_buffer"),
            ("algorithm.filter_groups.max_num_gen_batches", algorithm.filter_groups.enable,
             "algorithm.filter_groups.enable=true")):
        for key in keys.split():
            value = OmegaConf.select(config, key)
            if not holds and value != OmegaConf.select(defaults, key):
                raise InputError(f"{key}={value} does nothing without {needs}: leave it out")


def uses_reference(config: DictConfig) -> bool:
    return config.algorithm.use_kl_loss or config.algorithm.use_kl_in_reward


def roles(config: DictConfig) -> dict[str, DictConfig]:
    """The configuration of each engine that this run has: actor, and critic and reference where they are used."""
    roles = {"actor": config}
    if config.algorithm.adv_estimator == "gae":
        roles["critic"] = OmegaConf.merge(config, {"model": {"path": config.critic.path or config.model.path},
                                                   "optim": {"lr": config.critic.lr}})
    if uses_reference(config):
        roles["reference"] = OmegaConf.merge(config, {"model": {"path": config.reference.path or config.model.path}})
    return roles


def check_models(config: DictConfig, world_size: int):
    """The actor's Hugging Face configuration. Raises InputError for a model that its engine cannot run, or a critic or
    reference with another vocabulary."""
    check = engine_class(config.model_engine).check
    shapes = {role: check(settings, world_size, role == "critic") for role, settings in roles(config).items()}
    for role, shape in shapes.items():
        if shape.vocab_size != shapes["actor"].vocab_size:
            raise InputError(f"{role}.path={config[role].path} has another vocabulary than model.path={config.model.path}")
    return shapes["actor"]


def model_stages(config: DictConfig, device_type: str) -> list[str]:
    """The stages of a step in which a model runs that hooks can see."""
    size = config.algorithm.ppo_mini_batch_size or config.data.train_batch_size
    asked = needs_old_log_probs(config, config.data.train_batch_size // size, 0)
    occurs = {"rollout_generate": device_type == "cpu" or config.rollout.enforce_eager,      # CUDA graphs call no hooks
              "actor_compute_log_prob": asked, "ref_compute_log_prob": uses_reference(config),
              "compute_values": "critic" in roles(config), "critic_update": "critic" in roles(config), "actor_update": True}
    return [name for name, does in occurs.items() if does]


# -- samples -------------------------------------------------------------------------------------------------------------


def collect(config: DictConfig, draw: Callable[..., Samples], dataset, batch_index: int) -> tuple[Samples, int]:
    """One step's samples, and the number of the prompt batch that the next step begins with.

    draw(dataset, rows, sampling, *seed, first_group=...). With filter_groups, groups whose responses all got one score
    are left out and more prompts drawn, until there are data.train_batch_size groups or max_num_gen_batches are used up.
    """
    size, filtered = config.data.train_batch_size, config.algorithm.filter_groups
    parts: list[Samples] = []
    fallback = None
    for attempt in range(filtered.max_num_gen_batches if filtered.enable else 1):
        rows = global_batch(len(dataset), size, config.trainer.seed, batch_index)
        drawn = draw(dataset, rows, config.rollout, batch_index, first_group=attempt * size)
        if config.algorithm.adv_estimator == "remax":
            greedy = OmegaConf.merge(config.rollout, {"temperature": 0.0, "n": 1})
            baseline = draw(dataset, rows, greedy, batch_index, first_group=attempt * size)
            drawn = drawn.with_baseline(baseline)
        batch_index += 1
        fallback = drawn if len(drawn) or fallback is None else fallback
        parts.append(drawn.select(informative(drawn.scores, drawn.group)) if filtered.enable else drawn)
        if sum(p.num_prompts for p in parts) >= size:
            break
    samples = concat(parts)
    if not len(samples):                        # nothing to learn from: a step without an advantage
        samples = replace(fallback, failures=samples.failures, num_asked=samples.num_asked)
    if not len(samples):
        first = samples.failures[0]
        raise InputError(f"every response to {len(parts)} batches of prompts failed to be graded; the first: {first.kind}: "
                         f"{first.trace.strip()}")
    return samples.select(samples.group <= samples.group.unique()[:size][-1]), batch_index


def shaped_rewards(config: DictConfig, samples: Samples) -> Tensor:
    """[n] fp32: the scores, less DAPO's penalty for responses close to the limit of length."""
    if not config.reward.overlong_buffer:
        return samples.scores
    return samples.scores + overlong_penalty(samples.response_lengths, config.rollout.max_tokens,
                                             config.reward.overlong_buffer, config.reward.overlong_penalty)


def validation_metrics(samples: Samples, name: str, n: int) -> dict[str, float]:
    """val/{reward function}, the mean score; with n responses a prompt also pass@k for k = 2, 4, ... n (a response
    passes with a score of 1 or more) and, under its usual name, mean@n."""
    name = f"val/{name.rpartition(':')[2]}"
    metrics = {name: samples.scores.mean().item(), "val/response_length": samples.response_lengths.float().mean().item(),
               "val/truncated": samples.truncated.float().mean().item(), "val/failures": len(samples.failures)}
    if n > 1:
        place, counts = samples.group.unique(return_inverse=True, return_counts=True)[1:]
        whole = counts == n                     # a group with a response that could not be graded says nothing of pass@k
        right = torch.zeros_like(counts).index_add_(0, place, (samples.scores >= 1).long())[whole]
        metrics[f"{name}/mean@{n}"] = metrics[name]
        for k in sorted({2**i for i in range(1, n.bit_length())} | {n}):
            if k <= n and whole.any():
                metrics[f"{name}/pass@{k}"] = pass_at_k(right, n, k)
    return metrics


# -- asking the engines --------------------------------------------------------------------------------------------------


def mini_batches(config: DictConfig, samples: Samples) -> list[list[int]]:
    return samples.mini_batches(config.algorithm.ppo_mini_batch_size or config.data.train_batch_size)


def needs_old_log_probs(config: DictConfig, num_minis: int, step: int) -> bool:
    """With one update a rollout the policy that is updated is the one that sampled: its log-probabilities are those of
    the update's own forward pass, unless something before the update wants them, or the critic alone is updated."""
    algorithm = config.algorithm
    return num_minis * algorithm.ppo_epochs > 1 or algorithm.use_kl_in_reward or algorithm.rollout_rs != "none" \
        or step < config.critic.warmup_steps


def share(engine: Engine, batch: Batch, mini: list[int]) -> list[int]:
    """This data-parallel rank's part of a mini-batch: always the same, so that each pass has the same micro-batches."""
    lengths = batch.lengths
    return [mini[i] for i in partition([engine.flops([lengths[j]]) for j in mini], engine.dp_size)[engine.dp_rank]]


def ask(engine: Engine, question: Callable[[Batch], Tensor], batch: Batch, minis: list[list[int]]) -> Tensor:
    """[T] fp32, on every rank: what question(batch), e.g. engine.values, answers on each rank's share."""
    answers, where = torch.zeros(len(batch.input_ids)), Batch(torch.arange(len(batch.input_ids)), batch.cu_seqlens)
    for mini in minis:
        mine = share(engine, batch, mini)
        answers[where.select(mine).input_ids] = question(batch.select(mine)).cpu()
    return engine.sum_over_dp(answers).cpu()


def log_probs(engine: Engine, batch: Batch, minis: list[list[int]]) -> Tensor:
    return ask(engine, lambda part: engine.log_probs(part)[0], batch, minis)


# -- advantages ----------------------------------------------------------------------------------------------------------


def set_advantages(config: DictConfig, samples: Samples, minis: list[list[int]], kl_coef: float) -> dict[str, float]:
    """Fill the fields that the losses read, all [T] fp32 but for sequence; return what there is to say of them.

    sequence (int64)           the response that a token belongs to
    advantages, returns        0 outside responses
    loss_weight, token_weight  what a token counts for in its mini-batch: in the loss, as loss_agg_mode says, and in
                               means over tokens. Rejected tokens count for nothing, in no denominator either
    """
    algorithm, batch, f, n = config.algorithm, samples.batch, samples.batch.fields, len(samples)
    mask = f["loss_mask"]
    sequence = f["sequence"] = torch.repeat_interleave(torch.arange(n), batch.cu_seqlens.diff())
    outcome = shaped_rewards(config, samples)
    rewards = torch.zeros(len(mask)).index_copy(0, batch.cu_seqlens[1:] - 1, outcome)
    metrics = {}
    if algorithm.use_kl_in_reward:
        kl = KL_ESTIMATORS[algorithm.kl_penalty](f["old_log_probs"], f["ref_log_probs"]) * mask
        rewards = rewards - kl_coef * kl
        metrics |= {"actor/reward_kl": (kl.sum() / mask.sum()).item(), "actor/kl_coef": kl_coef}
    f["advantages"], f["returns"] = ADVANTAGES[algorithm.adv_estimator](
        rewards, mask, sequence, samples.group, values=f.get("values"), baseline=samples.baseline,
        gamma=algorithm.gamma, lam=algorithm.lam)
    if "old_log_probs" in f:
        gap = off_policy(f["old_log_probs"], f["rollout_log_probs"], mask)
        metrics |= off_policy_metrics({name: ((x * mask).sum() / mask.sum()).item() for name, x in gap.items()})
    kept = mask
    if algorithm.rollout_rs != "none":
        kept = keep_mask(f["old_log_probs"], f["rollout_log_probs"], mask, sequence, n, level=algorithm.rollout_rs,
                         low=algorithm.rollout_rs_threshold_lower, high=algorithm.rollout_rs_threshold)
        metrics["rollout_corr/rejected"] = 1 - (kept.sum() / mask.sum()).item()
    f["loss_weight"], f["token_weight"] = torch.zeros(len(mask)), torch.zeros(len(mask))
    for mini in minis:
        inside = kept * torch.zeros(n).index_fill(0, torch.tensor(mini), 1.0)[sequence]
        f["loss_weight"] += loss_weights(inside, sequence, n, algorithm.loss_agg_mode)
        f["token_weight"] += loss_weights(inside, sequence, n, "token-mean")
    if "values" in f:
        metrics |= {"critic/vf_explained_var": explained_variance(f["values"], f["returns"], mask),
                    "critic/values/mean": f["values"][mask > 0].mean().item()}
    lengths, prompts = samples.response_lengths.float(), batch.cu_seqlens.diff() - samples.response_lengths
    return metrics | spread("critic/score", samples.scores) | spread("critic/rewards", outcome) \
        | spread("critic/advantages", f["advantages"][mask > 0]) | spread("critic/returns", f["returns"][mask > 0]) \
        | spread("response_length", lengths) | spread("prompt_length", prompts.float()) \
        | {"response_length/clip_ratio": samples.truncated.float().mean().item(),
           "reward/informative_groups": informative(samples.scores, samples.group).float().mean().item(),
           "reward/failure_rate": len(samples.failures) / samples.num_asked}


def next_kl_coef(config: DictConfig, kl_coef: float, metrics: dict[str, float], num_responses: int) -> float:
    """The coefficient of the divergence in the next step's rewards, after one with these metrics of set_advantages()."""
    control = config.algorithm.kl_ctrl
    if control.type == "fixed":
        return kl_coef
    return adapt(kl_coef, metrics["actor/reward_kl"], control.target_kl, control.horizon, num_responses)


def spread(name: str, x: Tensor) -> dict[str, float]:
    return {f"{name}/mean": x.mean().item(), f"{name}/max": x.max().item(), f"{name}/min": x.min().item()}


# -- losses --------------------------------------------------------------------------------------------------------------


def actor_loss(config: DictConfig, num_sequences: int) -> LossFn:
    """The policy's loss, entropy bonus and divergence from the reference, on the fields of set_advantages."""
    algorithm = config.algorithm

    def loss_fn(log_probs: Tensor, entropy: Tensor, f: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        old, mean, weight = f.get("old_log_probs", log_probs.detach()), f["token_weight"], f["loss_weight"]
        kept = (mean > 0).float()               # rejected tokens are in no sequence's ratio either
        where = (kept, f["sequence"], num_sequences)
        losses, clipped = POLICY_LOSSES[algorithm.loss_mode](
            log_probs, old, f["advantages"], *where, clip_low=algorithm.clip_ratio_low,
            clip_high=algorithm.clip_ratio_high, dual_clip=algorithm.clip_ratio_c)
        if algorithm.rollout_is != "none":
            losses = losses * correction_weights(old, f["rollout_log_probs"], *where, level=algorithm.rollout_is,
                                                 threshold=algorithm.rollout_is_threshold)
        loss = (losses * weight).sum()
        amounts = {"pg_loss": loss, "pg_clipfrac": (clipped * mean).sum(), "entropy": (entropy.detach() * mean).sum(),
                   "ppo_kl": ((old - log_probs) * mean).sum()}
        if algorithm.entropy_coeff:
            loss = loss - algorithm.entropy_coeff * (entropy * weight).sum()
        if algorithm.use_kl_loss:
            amounts["kl_loss"] = (KL_ESTIMATORS[algorithm.kl_loss_type](log_probs, f["ref_log_probs"]) * weight).sum()
            loss = loss + algorithm.kl_loss_coef * amounts["kl_loss"]
        if "old_log_probs" not in f:            # else set_advantages has said it, of rejected tokens too
            gap = off_policy(old, f["rollout_log_probs"], kept)
            amounts |= {f"rollout_corr/{name}": (x * mean).sum() for name, x in gap.items()}
        return loss, amounts
    return loss_fn


def critic_loss(config: DictConfig) -> LossFn:
    def loss_fn(values: Tensor, f: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        losses, clipped = value_loss(values, f["values"], f["returns"], config.critic.cliprange_value or math.inf)
        loss = (losses * f["token_weight"]).sum()
        return loss, {"vf_loss": loss, "vf_clipfrac": (clipped * f["token_weight"]).sum()}
    return loss_fn


def update(engine: Engine, batch: Batch, minis: list[list[int]], loss_fn: LossFn, step: int, num_epochs: int,
           name: str) -> dict[str, float]:
    """One optimizer step for each mini-batch and epoch. Returns {name}/... means over them, skipped as a count; a loss speaks
    of the rollout (rollout_corr/...) where it is the only one."""
    parts = [batch.select(share(engine, batch, mini)) for mini in minis]
    results = [engine.train_batch(part, loss_fn, step) for _ in range(num_epochs) for part in parts]
    metrics = {f"{name}/{key}": sum(r[key] for r in results) / len(results) for key in results[0] if "/" not in key}
    metrics[f"{name}/skipped"] = sum(r["skipped"] for r in results)
    of_rollout = {key.removeprefix("rollout_corr/"): value for key, value in results[0].items() if "/" in key}
    return metrics | (off_policy_metrics(of_rollout) if of_rollout else {})


def off_policy_metrics(means: dict[str, float]) -> dict[str, float]:
    """rollout_corr/... from the means over tokens of what off_policy() says of each."""
    said = {name: x for name, x in means.items() if name != "ratio_squared"}
    said["effective_sample_size"] = effective_sample_size(means["ratio"], means["ratio_squared"])
    return {f"rollout_corr/{name}": x for name, x in said.items()}
