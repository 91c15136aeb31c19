"""What PPO does with a step's samples: mini-batches, advantages, losses. The formulas are in algorithms/, or in a file
of yours (docs/forking.md).

Every rank knows numbers of all n responses of a step, such as scores and lengths, and holds the tokens of those that it trains
on. Mini-batches, advantages and denominators follow from the numbers, so they do not depend on how many ranks there are.
"""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from algorithms.advantages import ADVANTAGES
from algorithms.aggregation import AGGREGATIONS, token_mean
from algorithms.dapo import informative, overlong_penalty
from algorithms.kl import KL_ESTIMATORS, adapt
from algorithms.pass_at_k import pass_at_k
from algorithms.policy_losses import POLICY_LOSSES
from algorithms.rollout_correction import (
    correction_weights,
    effective_sample_size,
    keep_mask,
    off_policy,
)
from algorithms.value_loss import explained_variance, value_loss
from common import plugins
from config import CONFIGS, InputError, defaults
from data.batching.packing import Batch, global_batch
from data.batching.plan import MicroBatches, Plan
from engines.base import Engine, LossFn
from engines.build import engine_class
from engines.context_parallel import sequence_limit
from rollout.samples import Samples, concat
from rollout.sharing import Share

# Keys of `algorithm` that name a function: ours, the arguments that any of them is called with, and the key of the free
# group with its own parameters. What a function names is there: `values` in an advantage or a policy loss asks for a
# critic, `ref_log_probs` for a reference, `baseline` in an advantage for greedy responses, `old_log_probs` in one for the
# pass that computes them. A configuration key that no function names has no effect, and is an error. An advantage that names
# one of TOKENS is of tokens, others are of responses.
NAMED = {
    "adv_estimator": (
        ADVANTAGES,
        "rewards mask sequence group values baseline old_log_probs ref_log_probs rollout_log_probs "
        "outcome lengths num_sequences total gamma lam",
        "adv_kwargs",
    ),
    "loss_mode": (
        POLICY_LOSSES,
        "log_probs entropy old_log_probs advantages mask sequence num_sequences clip_low clip_high "
        "dual_clip returns values ref_log_probs rollout_log_probs group scores",
        "loss_kwargs",
    ),
    "loss_agg_mode": (AGGREGATIONS, "lengths max_tokens", None),
    "kl_penalty": (KL_ESTIMATORS, "log_probs ref_log_probs", None),
    "kl_loss_type": (KL_ESTIMATORS, "log_probs ref_log_probs", None),
}
TOKENS = {
    "rewards",
    "mask",
    "sequence",
    "values",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "total",
}


def named(config: DictConfig, key: str) -> Callable:
    """The function that algorithm.{key} names, with its own parameters bound. Raises InputError if there is none."""
    known, given, kwargs = NAMED[key]
    return plugins.find(
        f"algorithm.{key}",
        config.algorithm[key],
        known,
        given.split(),
        kwargs and f"algorithm.{kwargs}",
        config.algorithm[kwargs] if kwargs else {},
    )


def reads(config: DictConfig, *keys: str) -> set[str]:
    """The arguments that the functions of these keys name."""
    return {name for key in keys for name in plugins.parameters(named(config, key))}


def readers(key: str, argument: str) -> str:
    """Those of our functions that name an argument, as settings: algorithm.loss_mode=ppo or gspo."""
    return f"algorithm.{key}=" + " or ".join(
        name for name, f in NAMED[key][0].items() if argument in plugins.parameters(f)
    )


def check(config: DictConfig) -> None:
    """Raise InputError for functions that cannot be found and settings that contradict each other."""
    algorithm, reward, rollout = config.algorithm, config.reward, config.rollout
    size = algorithm.ppo_mini_batch_size or config.data.train_batch_size
    if config.data.train_batch_size % size:
        raise InputError(
            f"algorithm.ppo_mini_batch_size={size} does not divide data.train_batch_size="
            f"{config.data.train_batch_size}"
        )
    for key in NAMED:
        named(config, key)
    names = reads(config, "adv_estimator")
    if names & TOKENS and "num_sequences" not in names:
        raise InputError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} names {min(names & TOKENS)}, which is of one rank's "
            "tokens: name outcome instead, which is of all responses, or name num_sequences too, and let total "
            "add up over all ranks (docs/forking.md)"
        )
    check_effect(config)
    if config.validation.n > 1 and config.validation.temperature == 0:
        raise InputError(
            f"validation.n={config.validation.n} gives that many equal responses with validation.temperature=0: "
            "raise the temperature"
        )
    if algorithm.filter_groups.enable and rollout.n < 2:
        raise InputError(
            "algorithm.filter_groups.enable=true needs rollout.n of 2 or more: one response always agrees with "
            "itself"
        )
    if reward.overlong_buffer > rollout.max_tokens:
        raise InputError(
            f"reward.overlong_buffer={reward.overlong_buffer} is more than rollout.max_tokens={rollout.max_tokens}"
        )
    # With top_k the words that a token was drawn from are few enough to be kept, and the trainer's probabilities are of them.
    cut_off = [
        f"rollout.{key}={rollout[key]}"
        for key, all_words in (("top_p", 1.0), ("min_p", 0.0))
        if rollout[key] != all_words and rollout.top_k <= 0
    ]
    if cut_off and (algorithm.rollout_is != "none" or algorithm.rollout_rs != "none"):
        raise InputError(
            f"{', '.join(cut_off)} with algorithm.rollout_is or rollout_rs: vLLM's probabilities are of the words "
            "that were kept, the trainer's of all words, and their ratio says nothing; set rollout.top_k (e.g. 64), "
            "then both are of the words that were kept"
        )
    if cut_off and int(os.environ.get("RANK", 0)) == 0:
        print(
            f"warning: {', '.join(cut_off)}: responses are drawn from fewer words than the trainer's log-probabilities speak "
            "of, so the policy that is trained is not quite the one that sampled; with rollout.top_k (e.g. 64) it is",
            file=sys.stderr,
            flush=True,
        )
    longest = config.data.max_prompt_length + rollout.max_tokens
    most, said = sequence_limit(config, int(os.environ.get("WORLD_SIZE", 1)))
    if longest > most:
        raise InputError(
            f"data.max_prompt_length + rollout.max_tokens = {longest} is more than {said}: raise it, or lower them"
        )


def check_effect(config: DictConfig) -> None:
    """Raise InputError for a key that is not at its default although nothing reads it."""
    algorithm, untouched = config.algorithm, OmegaConf.load(CONFIGS / "ppo.yaml")
    in_advantage, in_loss = reads(config, "adv_estimator"), reads(config, "loss_mode")
    for keys, holds, needs in (
        (
            "critic.path critic.lr critic.cliprange_value critic.warmup_steps",
            uses_critic(config),
            readers("adv_estimator", "values"),
        ),
        (
            "reward.overlong_buffer algorithm.use_kl_in_reward",
            in_advantage & {"rewards", "outcome"},
            "an advantage that names rewards or outcome",
        ),
        *(
            (f"algorithm.{name}", name in in_advantage, readers("adv_estimator", name))
            for name in ("gamma", "lam")
        ),
        *(
            (f"algorithm.{key}", name in in_loss, readers("loss_mode", name))
            for key, name in (
                ("clip_ratio_low", "clip_low"),
                ("clip_ratio_high", "clip_high"),
                ("clip_ratio_c", "dual_clip"),
            )
        ),
        (
            "algorithm.kl_penalty algorithm.kl_ctrl.type algorithm.kl_ctrl.kl_coef",
            algorithm.use_kl_in_reward,
            "algorithm.use_kl_in_reward=true",
        ),
        (
            "algorithm.kl_ctrl.target_kl algorithm.kl_ctrl.horizon",
            algorithm.kl_ctrl.type == "adaptive",
            "algorithm.kl_ctrl.type=adaptive",
        ),
        (
            "algorithm.kl_loss_type algorithm.kl_loss_coef",
            algorithm.use_kl_loss,
            "algorithm.use_kl_loss=true",
        ),
        (
            "reference.path offload.reference",
            uses_reference(config),
            "algorithm.use_kl_loss=true or algorithm.use_kl_in_reward=true",
        ),
        ("algorithm.rollout_is_threshold", algorithm.rollout_is != "none", "algorithm.rollout_is"),
        (
            "algorithm.rollout_rs_threshold algorithm.rollout_rs_threshold_lower",
            algorithm.rollout_rs != "none",
            "algorithm.rollout_rs",
        ),
        (
            "validation.top_p validation.top_k validation.min_p",
            config.validation.temperature > 0,
            "validation.temperature above 0",
        ),
        ("reward.overlong_penalty", config.reward.overlong_buffer > 0, "reward.overlong_buffer"),
        ("rollout.num_speculative_tokens", config.rollout.speculative, "rollout.speculative"),
        (
            "model.mtp.num_speculative_tokens",
            config.model.mtp.enable_rollout,
            "model.mtp.enable_rollout=true",
        ),
        (
            "algorithm.filter_groups.max_num_gen_batches",
            algorithm.filter_groups.enable,
            "algorithm.filter_groups.enable=true",
        ),
    ):
        for key in keys.split():
            value = OmegaConf.select(config, key)
            if not holds and value != OmegaConf.select(untouched, key):
                raise InputError(f"{key}={value} does nothing without {needs}: leave it out")


def uses_critic(config: DictConfig) -> bool:
    return "values" in reads(config, "adv_estimator", "loss_mode")


def uses_reference(config: DictConfig) -> bool:
    algorithm = config.algorithm
    return (
        algorithm.use_kl_loss
        or algorithm.use_kl_in_reward
        or "ref_log_probs" in reads(config, "adv_estimator", "loss_mode")
    )


def roles(config: DictConfig) -> dict[str, DictConfig]:
    """The configuration of each engine of this run: the actor, and the critic and the reference if they are used."""
    roles = {"actor": config}
    if uses_critic(config):
        roles["critic"] = OmegaConf.merge(
            config,
            {
                "model": {
                    "path": config.critic.path or config.model.path,
                    "lora": {"adapter_path": None},
                    "mtp": defaults("model.mtp"),
                },
                "optim": {"lr": config.critic.lr},
            },
        )
    # With adapters it is the actor without them, unless it is another model.
    if uses_reference(config) and (config.reference.path or not config.model.lora.rank):
        roles["reference"] = OmegaConf.merge(
            config,
            {
                "model": {
                    "path": config.reference.path or config.model.path,
                    "freeze": [],
                    "lora": defaults("model.lora"),
                    "mtp": defaults("model.mtp"),
                }
            },
        )
    return roles


def check_models(config: DictConfig, world_size: int):
    """The actor's Hugging Face configuration. Raises InputError for a model that its engine cannot run, or a critic or
    reference with another vocabulary."""
    check = engine_class(config.model_engine).check
    shapes = {
        role: check(settings, world_size, role == "critic")
        for role, settings in roles(config).items()
    }
    for role, shape in shapes.items():
        if shape.vocab_size != shapes["actor"].vocab_size:
            raise InputError(
                f"{role}.path={config[role].path} has another vocabulary than model.path={config.model.path}"
            )
    return shapes["actor"]


def model_stages(config: DictConfig, device_type: str) -> list[str]:
    """The stages of a step in which a model runs whose modules call hooks."""
    size = config.algorithm.ppo_mini_batch_size or config.data.train_batch_size
    asked = needs_old_log_probs(config, config.data.train_batch_size // size, 0)
    occurs = {
        "rollout_generate": device_type == "cpu"
        or config.rollout.enforce_eager,  # CUDA graphs call no hooks
        "actor_compute_log_prob": asked,
        "ref_compute_log_prob": uses_reference(config),
        "compute_values": "critic" in roles(config),
        "critic_update": "critic" in roles(config),
        "actor_update": True,
    }
    return [name for name, does in occurs.items() if does]


# -- samples -------------------------------------------------------------------------------------------------------------


def collect(
    config: DictConfig, draw: Callable[..., Samples], dataset, batch_index: int
) -> tuple[Samples, int]:
    """One step's samples, and the number of the prompt batch that the next step begins with.

    draw(dataset, rows, sampling, *seed, first_group=...). With filter_groups, groups whose responses all got the same score
    are left out and more prompts are drawn, until there are data.train_batch_size groups or max_num_gen_batches are used up.
    """
    size, filtered = config.data.train_batch_size, config.algorithm.filter_groups
    draws: list[Samples] = []
    for attempt in range(filtered.max_num_gen_batches if filtered.enable else 1):
        rows = global_batch(len(dataset), size, config.trainer.seed, batch_index)
        drawn = draw(dataset, rows, config.rollout, batch_index, first_group=attempt * size)
        if "baseline" in reads(config, "adv_estimator"):
            greedy = OmegaConf.merge(config.rollout, {"temperature": 0.0, "n": 1})
            baseline = draw(dataset, rows, greedy, batch_index, first_group=attempt * size)
            drawn = drawn.with_baseline(replace(baseline, scores=shaped_rewards(config, baseline)))
        batch_index += 1
        draws.append(drawn)
        everything = concat(draws)
        varied = informative(everything.scores, everything.group)
        keep = varied if filtered.enable else torch.ones_like(varied)
        if len(everything.group[keep].unique()) >= size:
            break
    if not len(everything):
        first = everything.failures[0]
        raise InputError(
            f"no response to {len(draws)} batches could be graded; the first: {first.said}"
        )
    if not keep.any():  # nothing to learn from: the last draw, with advantages of 0
        keep = everything.group // size == everything.group[-1] // size
    metrics = {
        "rollout/num_gen_batches": len(draws),
        **spread("critic/score", everything.scores),
        **{
            name: sum(drawn.metrics[name] for drawn in draws) / len(draws)
            for name in draws[0].metrics
        },
        **{f"reward/{name}/mean": x.mean().item() for name, x in everything.parts.items()},
        "reward/informative_groups": varied.float().mean().item(),
    }
    keep &= everything.group <= everything.group[keep].unique()[:size][-1]
    return replace(everything.select(keep), metrics=metrics), batch_index


def shaped_rewards(config: DictConfig, samples: Samples) -> Tensor:
    """[n] fp32: the scores, minus DAPO's penalty for responses close to the length limit."""
    if not config.reward.overlong_buffer:
        return samples.scores
    return samples.scores + overlong_penalty(
        samples.response_lengths,
        config.rollout.max_tokens,
        config.reward.overlong_buffer,
        config.reward.overlong_penalty,
    )


def validation_metrics(samples: Samples, name: str, n: int) -> dict[str, float]:
    """val/{reward function}, the mean score, and val/{reward function}/{part}; with n responses per prompt also pass@k
    for k = 2, 4, ... n (a response passes with a score of 1 or more) and, under its usual name, mean@n."""
    name = f"val/{name.rpartition(':')[2]}"
    metrics = {
        name: samples.scores.mean().item(),
        "val/response_length": samples.response_lengths.float().mean().item(),
        "val/truncated": samples.truncated.float().mean().item(),
        "val/failures": len(samples.failures),
        **{f"{name}/{part}": values.mean().item() for part, values in samples.parts.items()},
    }
    if n > 1:
        place, counts = samples.group.unique(return_inverse=True, return_counts=True)[1:]
        whole = counts == n  # pass@k needs groups of which every response could be graded
        right = torch.zeros_like(counts).index_add_(0, place, (samples.scores >= 1).long())[whole]
        metrics[f"{name}/mean@{n}"] = metrics[name]
        for k in sorted({2**i for i in range(1, n.bit_length())} | {n}):
            if k <= n and whole.any():
                metrics[f"{name}/pass@{k}"] = pass_at_k(right, n, k)
    return metrics


# -- asking the engines --------------------------------------------------------------------------------------------------


def mini_batches(config: DictConfig, samples: Samples) -> Tensor:
    return samples.mini_batches(
        config.algorithm.ppo_mini_batch_size or config.data.train_batch_size
    )


def needs_old_log_probs(config: DictConfig, num_minis: int, step: int) -> bool:
    """With one update per rollout the policy that is updated is the one that sampled, and its log-probabilities are those of
    the update's own forward pass; unless something before the update needs them, or only the critic is updated."""
    algorithm = config.algorithm
    return (
        num_minis * algorithm.ppo_epochs > 1
        or algorithm.use_kl_in_reward
        or algorithm.rollout_rs != "none"
        or "old_log_probs" in reads(config, "adv_estimator")
        or step < config.critic.warmup_steps
    )


def ask(question: Callable[[Batch, MicroBatches], Tensor], share: Share) -> Tensor:
    """[T] fp32: the answers of question(batch, micro-batches), e.g. engine.values, for the tokens of this share."""
    return torch.cat([question(part, plan.micro_batches).cpu() for part, plan in share.parts])


def log_probs(engine: Engine, share: Share) -> Tensor:
    return ask(lambda part, micro_batches: engine.log_probs(part, micro_batches)[0], share)


# -- advantages ----------------------------------------------------------------------------------------------------------


def set_advantages(
    config: DictConfig, samples: Samples, share: Share, kl_coef: float
) -> dict[str, float]:
    """Fill the fields of the share that the losses read, all [T] fp32 except sequence; return metrics of all samples.

    sequence (int64)           the response of the share that a token belongs to
    advantages, returns        0 outside responses
    loss_weight, token_weight  what a token counts for in its mini-batch: in the loss, as loss_agg_mode says, and in
                               means over tokens. Rejected tokens count for nothing, and are in no denominator
    group (int64), scores      of the token's response, if the policy loss names them
    """
    algorithm, f, n, m = config.algorithm, share.batch.fields, len(samples), len(share.batch)
    mask, lengths, num_tokens = (
        f["loss_mask"],
        samples.response_lengths,
        samples.response_lengths.sum().item(),
    )
    sequence = f["sequence"] = torch.repeat_interleave(
        torch.arange(m), share.batch.cu_seqlens.diff()
    )
    tokens = mask.nonzero()[:, 0]
    own_lengths = torch.searchsorted(tokens, share.batch.cu_seqlens).diff()

    def by_response(*reductions: tuple[Tensor, str]) -> Tensor:
        """[n, len(reductions)] float64: of each x [T], "sum", "max" or "min" over the response tokens of each response"""
        return share.of_all(
            torch.stack(
                [
                    torch.segment_reduce(x[tokens].double(), how, lengths=own_lengths, unsafe=True)
                    for x, how in reductions
                ],
                1,
            )
        )

    def total(x: Tensor) -> Tensor:
        return by_response((x, "sum")).sum()

    outcome = shaped_rewards(config, samples)
    metrics = spread("critic/score", samples.scores) | spread("critic/rewards", outcome)
    rewards = torch.zeros_like(mask).index_copy(
        0, share.batch.cu_seqlens[1:] - 1, outcome[share.places]
    )
    if algorithm.use_kl_in_reward:
        (kl,) = check_shapes(
            config,
            "kl_penalty",
            mask,
            named(config, "kl_penalty")(
                log_probs=f["old_log_probs"], ref_log_probs=f["ref_log_probs"]
            ),
        )
        of_response = by_response((kl, "sum"))[:, 0]
        rewards, outcome = (
            rewards - kl_coef * (kl * mask),
            (outcome - kl_coef * of_response).float(),
        )
        metrics |= {
            "actor/reward_kl": of_response.sum().item() / num_tokens,
            "actor/kl_coef": kl_coef,
        }

    unit, like = (
        ("token", mask) if reads(config, "adv_estimator") & TOKENS else ("response", outcome)
    )
    pair = check_pair(
        config,
        "adv_estimator",
        Tensor,
        named(config, "adv_estimator")(
            **{
                **f,
                "rewards": rewards,
                "mask": mask,
                "sequence": share.on_tokens(torch.arange(n)),
                "num_sequences": n,
                "outcome": outcome,
                "lengths": lengths,
                "group": samples.group,
                "baseline": samples.baseline,
                "total": total,
                "gamma": algorithm.gamma,
                "lam": algorithm.lam,
            }
        ),
    )
    for name, x in zip(
        ("advantages", "returns"), check_shapes(config, "adv_estimator", like, *pair, unit=unit)
    ):
        if unit == "token":
            f[name], of_each = x, by_response((x, "sum"), (x, "max"), (x, "min"))
        else:
            f[name], of_each = (
                share.on_tokens(x) * mask,
                torch.stack([x * lengths, x, x], 1).double(),
            )
        sums, high, low = of_each[lengths > 0].unbind(1)
        metrics |= {
            f"critic/{name}/mean": sums.sum().item() / num_tokens,
            f"critic/{name}/max": high.max().item(),
            f"critic/{name}/min": low.min().item(),
        }

    if "old_log_probs" in f:
        gap = off_policy(f["old_log_probs"], f["rollout_log_probs"], mask)
        means = by_response(*((x, "sum") for x in gap.values())).sum(0) / num_tokens
        metrics |= off_policy_metrics(dict(zip(gap, means.tolist())))
    kept, kept_lengths = mask, lengths.float()
    if algorithm.rollout_rs != "none":
        kept = keep_mask(
            f["old_log_probs"],
            f["rollout_log_probs"],
            mask,
            sequence,
            m,
            level=algorithm.rollout_rs,
            low=algorithm.rollout_rs_threshold_lower,
            high=algorithm.rollout_rs_threshold,
        )
        kept_lengths = by_response((kept, "sum"))[:, 0].float()
        metrics["rollout_corr/rejected"] = 1 - kept_lengths.sum().item() / num_tokens
    f |= {
        name: share.on_tokens(x)
        for name, x in (("group", samples.group), ("scores", samples.scores))
        if name in reads(config, "loss_mode")
    }
    loss_weight, token_weight = torch.zeros(2, n)
    for mini in range(share.num_minis):
        inside = (share.minis == mini).float()
        (of_loss,) = check_shapes(
            config,
            "loss_agg_mode",
            outcome,
            named(config, "loss_agg_mode")(
                lengths=kept_lengths * inside, max_tokens=config.rollout.max_tokens
            ),
            unit="response",
        )
        loss_weight += of_loss * inside
        token_weight += token_mean(kept_lengths * inside) * inside
    f["loss_weight"], f["token_weight"] = (
        share.on_tokens(weight) * kept for weight in (loss_weight, token_weight)
    )
    if "values" in f:
        metrics |= {
            "critic/vf_explained_var": explained_variance(f["values"], f["returns"], mask, total),
            "critic/values/mean": total(f["values"]).item() / num_tokens,
        }
    return (
        metrics
        | spread("response_length", lengths.float())
        | spread("prompt_length", (samples.lengths - lengths).float())
        | {
            "response_length/clip_ratio": samples.truncated.float().mean().item(),
            "reward/informative_groups": informative(samples.scores, samples.group)
            .float()
            .mean()
            .item(),
            "reward/failure_rate": len(samples.failures) / samples.num_asked,
        }
        | samples.metrics
        | share.metrics
    )


def next_kl_coef(
    config: DictConfig, kl_coef: float, metrics: dict[str, float], num_responses: int
) -> float:
    """The coefficient of the divergence in the next step's rewards, given this step's metrics of set_advantages()."""
    control = config.algorithm.kl_ctrl
    return (
        kl_coef
        if control.type == "fixed"
        else adapt(
            kl_coef, metrics["actor/reward_kl"], control.target_kl, control.horizon, num_responses
        )
    )


def check_shapes(
    config: DictConfig, key: str, like: Tensor, *results: Tensor, unit: str = "token"
) -> tuple[Tensor, ...]:
    """What the function of algorithm.{key} returned, if it is one number per token (or response); a broadcast would hide a
    mistake."""
    for x in results:
        if not isinstance(x, Tensor) or x.shape != like.shape:
            raise InputError(
                f"algorithm.{key}={config.algorithm[key]} must return one number per {unit}, shape "
                f"{list(like.shape)}, not {list(x.shape) if isinstance(x, Tensor) else x}"
            )
    return results


def check_pair(config: DictConfig, key: str, second: type, result) -> tuple:
    """What the function of algorithm.{key} returned, if it is a pair whose second part is of this type."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], second):
        raise InputError(
            f"algorithm.{key}={config.algorithm[key]} must return two things, "
            + ("losses and a dictionary of metrics" if second is dict else "advantages and returns")
        )
    return result


def spread(name: str, x: Tensor) -> dict[str, float]:
    return {
        f"{name}/mean": x.mean().item(),
        f"{name}/max": x.max().item(),
        f"{name}/min": x.min().item(),
    }


# -- losses --------------------------------------------------------------------------------------------------------------


def actor_loss(config: DictConfig, num_sequences: int) -> LossFn:
    """The policy loss, the entropy bonus and the divergence from the reference, on the fields of set_advantages."""
    algorithm, policy_loss, divergence = (
        config.algorithm,
        named(config, "loss_mode"),
        named(config, "kl_loss_type"),
    )

    def loss_fn(
        log_probs: Tensor, entropy: Tensor, f: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        old, mean, weight = (
            f.get("old_log_probs", log_probs.detach()),
            f["token_weight"],
            f["loss_weight"],
        )
        kept = (mean > 0).float()  # rejected tokens are in no sequence's ratio either
        losses, metrics = check_pair(
            config,
            "loss_mode",
            dict,
            policy_loss(
                **{
                    **f,
                    "log_probs": log_probs,
                    "entropy": entropy,
                    "old_log_probs": old,
                    "mask": kept,
                    "num_sequences": num_sequences,
                    "clip_low": algorithm.clip_ratio_low,
                    "clip_high": algorithm.clip_ratio_high,
                    "dual_clip": algorithm.clip_ratio_c,
                }
            ),
        )
        check_shapes(config, "loss_mode", log_probs, losses, *metrics.values())
        if algorithm.rollout_is != "none":
            # The product over a sequence is of all its tokens: rejection leaves tokens out of the loss, not out of what was drawn.
            losses = losses * correction_weights(
                old,
                f["rollout_log_probs"],
                f["loss_mask"],
                f["sequence"],
                num_sequences,
                level=algorithm.rollout_is,
                threshold=algorithm.rollout_is_threshold,
            )
        loss = (losses * weight).sum()
        amounts = {name: (x * mean).sum() for name, x in metrics.items()} | {
            "pg_loss": loss,
            "entropy": (entropy.detach() * mean).sum(),
            "ppo_kl": ((old - log_probs) * mean).sum(),
        }
        if algorithm.entropy_coeff:
            loss = loss - algorithm.entropy_coeff * (entropy * weight).sum()
        if algorithm.use_kl_loss:
            (kl,) = check_shapes(
                config,
                "kl_loss_type",
                log_probs,
                divergence(log_probs=log_probs, ref_log_probs=f["ref_log_probs"]),
            )
            amounts["kl_loss"] = (kl * weight).sum()
            loss = loss + algorithm.kl_loss_coef * amounts["kl_loss"]
        if "old_log_probs" not in f:  # else set_advantages has reported it, for rejected tokens too
            gap = off_policy(old, f["rollout_log_probs"], kept)
            amounts |= {f"rollout_corr/{name}": (x * mean).sum() for name, x in gap.items()}
        return loss, amounts

    return loss_fn


def critic_loss(config: DictConfig) -> LossFn:
    def loss_fn(values: Tensor, f: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        losses, clipped = value_loss(
            values, f["values"], f["returns"], config.critic.cliprange_value or math.inf
        )
        loss = (losses * f["token_weight"]).sum()
        return loss, {"vf_loss": loss, "vf_clipfrac": (clipped * f["token_weight"]).sum()}

    return loss_fn


def update(
    engine: Engine,
    parts: list[tuple[Batch, Plan]],
    loss_fn: LossFn,
    step: int,
    num_epochs: int,
    name: str,
) -> dict[str, float]:
    """One optimizer step for each mini-batch and epoch, on what this rank's share has of it. Returns {name}/...: means over
    them, but the number that was skipped; and rollout_corr/... if the loss, in the only step there is, reports it."""
    results = [
        engine.train_batch(part, loss_fn, step, plan.micro_batches)
        for _ in range(num_epochs)
        for part, plan in parts
    ]
    prefix = "rollout_corr/"
    metrics = {
        key if "/" in key else f"{name}/{key}": sum(r[key] for r in results) / len(results)
        for key in results[0]
        if not key.startswith(prefix)
    }
    metrics[f"{name}/skipped"] = sum(r["skipped"] for r in results)
    of_rollout = {
        key.removeprefix(prefix): value
        for key, value in results[0].items()
        if key.startswith(prefix)
    }
    return metrics | (off_policy_metrics(of_rollout) if of_rollout else {})


def off_policy_metrics(means: dict[str, float]) -> dict[str, float]:
    """rollout_corr/... from the means over tokens of what off_policy() returns."""
    metrics = means | {
        "effective_sample_size": effective_sample_size(means["ratio"], means["ratio_squared"])
    }
    return {f"rollout_corr/{name}": x for name, x in metrics.items() if name != "ratio_squared"}
