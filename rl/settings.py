"""Checks of the configuration before anything is loaded."""

import os
import sys

import torch
from omegaconf import DictConfig

from config import InputError, defaults
from configs.environment import is_rank0
from engines.context_parallel import sequence_limit
from engines.model import mtp
from engines.model.lengths import longest_sequence
from rewards import REWARDS
from rl.functions import (
    FUNCTIONS,
    AdvantageInputs,
    PolicyLossInputs,
    built_in_readers,
    call,
    call_estimator,
    check_shapes,
    find_function,
    inputs_read,
    reads_tokens,
)
from rl.models import longest_response, mini_batch_prompts
from rl.requirements import check_keys_have_an_effect
from rl.reward_model import check_reward_model
from rl.teacher import check_distillation

# The built-in estimators that whiten their advantages over all tokens.
WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def check_settings(config: DictConfig) -> None:
    """Raise InputError for unknown functions, and for settings that contradict each other."""
    check_mini_batch_size(config)
    for key in FUNCTIONS:
        find_function(config, key)
    check_advantage_inputs(config)
    check_step_rewards(config)
    check_named_parts(config)
    check_no_negative_rewards(config)
    check_estimator_teaches(config)
    check_whitening(config)
    check_policy_loss_accepts(config)
    check_icepop_keeps_tokens(config)
    check_kl_loss_teaches(config)
    check_no_dropout(config)
    check_keys_have_an_effect(config)
    check_distillation(config)
    check_reward_model(config)
    check_sampling(config)
    check_episodes(config)
    check_partial(config)
    check_cut_off_tokens(config)
    check_longest_sequence(config)


def check_mini_batch_size(config: DictConfig) -> None:
    """Raise InputError unless mini-batches divide the batch of a step."""
    num_prompts = mini_batch_prompts(config)
    if config.data.train_batch_size % num_prompts:
        raise InputError(
            f"algorithm.ppo_mini_batch_size={num_prompts} does not divide "
            f"data.train_batch_size={config.data.train_batch_size}: set one of its divisors"
        )


def check_advantage_inputs(config: DictConfig) -> None:
    """Raise InputError if the estimator may mistake one rank's tokens for those of all ranks."""
    token_inputs = reads_tokens(config)
    if token_inputs and "num_sequences" not in inputs_read(config, "adv_estimator"):
        raise InputError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} names {min(token_inputs)}, "
            "which covers one rank's tokens: name outcome instead, which covers all responses, or "
            "name num_sequences too, and add up over all ranks with total (docs/forking.md)"
        )


def check_step_rewards(config: DictConfig) -> None:
    """Raise InputError if the estimator lacks rewards of steps, or would not read them."""
    reads = inputs_read(config, "adv_estimator")
    estimator = f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
    if not config.reward.step_rewards:
        if {"step_rewards", "step_ends"} & reads:
            raise InputError(
                f"{estimator} needs reward.step_rewards=true, and a reward.function that returns "
                "the rewards of steps"
            )
        return
    function = config.reward.function
    if function in REWARDS:
        raise InputError(
            f"reward.step_rewards=true does not work with reward.function={function}, which "
            "returns no steps: name a function of your own"
        )
    if "parts" in reads:
        raise InputError(
            f"reward.step_rewards=true does not work with {estimator}, which reads only the named "
            "parts of the reward: choose another estimator, such as grpo_steps"
        )


def check_named_parts(config: DictConfig) -> None:
    """Raise InputError if the estimator reads named parts, but the reward can have none."""
    function = config.reward.function
    has_other_reward = config.rollout.episode or config.reward.model.path
    if "parts" not in inputs_read(config, "adv_estimator") or has_other_reward:
        return
    if function in REWARDS:
        raise InputError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} reads the named parts of "
            f"the reward, but reward.function={function} returns a number: name a function of your "
            "own that returns a dictionary, such as {'correct': 1.0, 'format': 0.0}"
        )


def check_no_negative_rewards(config: DictConfig) -> None:
    """Raise InputError for settings that make rewards negative, which max_rl does not accept.

    A reward model's score may be any number.
    """
    if config.algorithm.adv_estimator != "max_rl":
        return
    limit_score = config.rollout.limit_score
    model = config.reward.model
    settings = {
        f"reward.model.path={model.path}": model.path is not None and model.weight != 0,
        "algorithm.use_kl_in_reward=true": config.algorithm.use_kl_in_reward,
        f"reward.overlong_buffer={config.reward.overlong_buffer}": config.reward.overlong_buffer,
        f"rollout.limit_score={limit_score}": limit_score is not None and limit_score < 0,
    }
    for setting, makes_negative in settings.items():
        if makes_negative:
            raise InputError(
                f"{setting} does not work with algorithm.adv_estimator=max_rl, which needs rewards "
                "of 0 or more: leave it out, or choose another estimator, such as grpo"
            )


def check_estimator_teaches(config: DictConfig) -> None:
    """Raise InputError for a built-in estimator that learns nothing from rollout.n responses.

    It is tried on two groups in which one response is right.
    """
    name = config.algorithm.adv_estimator
    n = config.rollout.n
    is_built_in = name in FUNCTIONS["adv_estimator"].built_in
    if not is_built_in or reads_tokens(config) or config.algorithm.distill.only:
        return
    if n == 1 and name in built_in_readers("adv_estimator", "group"):
        raise InputError(
            f"algorithm.adv_estimator={name} with rollout.n=1 learns nothing: it compares the "
            "responses to the same prompt. Set rollout.n=2 or more, or choose an estimator without "
            "groups, such as reinforce_plus_plus, remax or gae"
        )
    outcome = (torch.arange(2 * n) % n == 0).float()
    inputs = AdvantageInputs(
        rewards=outcome,
        mask=torch.ones(2 * n),
        sequence=torch.arange(2 * n),
        group=torch.arange(2).repeat_interleave(n),
        outcome=outcome,
        lengths=torch.full((2 * n,), 10),
        parts={"part": outcome},
        part_weights={"part": 1.0},
        num_sequences=2 * n,
        total=torch.Tensor.sum,
        gamma=config.algorithm.gamma,
        lam=config.algorithm.lam,
    )
    advantages, _ = call_estimator(config, inputs)
    if not advantages.any():
        kwargs = ", ".join(f"{key}={value}" for key, value in config.algorithm.adv_kwargs.items())
        raise InputError(
            f"algorithm.adv_estimator={name} ({kwargs}) learns nothing from rollout.n={n} "
            "responses to a prompt: raise rollout.n, or change algorithm.adv_kwargs"
        )


def check_whitening(config: DictConfig) -> None:
    """Raise InputError for algorithm.whiten_advantages if the estimator whitens them itself."""
    name = config.algorithm.adv_estimator
    if config.algorithm.whiten_advantages and name in WHITENED:
        raise InputError(
            f"algorithm.whiten_advantages=true does nothing with algorithm.adv_estimator={name}, "
            "whose advantages are whitened already: leave it out"
        )


def check_policy_loss_accepts(config: DictConfig) -> None:
    """Raise InputError if a built-in policy loss rejects its parameters, tried on two tokens."""
    name = config.algorithm.loss_mode
    if name not in FUNCTIONS["loss_mode"].built_in:
        return
    zeros = torch.zeros(2)
    inputs = PolicyLossInputs(
        log_probs=zeros,
        entropy=zeros,
        old_log_probs=zeros,
        advantages=zeros,
        mask=torch.ones(2),
        sequence=torch.arange(2),
        num_sequences=2,
        clip_low=config.algorithm.clip_ratio_low,
        clip_high=config.algorithm.clip_ratio_high,
        dual_clip=config.algorithm.clip_ratio_c,
    )
    try:
        call(find_function(config, "loss_mode"), inputs)
    except ValueError as error:
        raise InputError(str(error)) from None


def check_icepop_keeps_tokens(config: DictConfig) -> None:
    """Raise InputError if no ratio is between IcePop's thresholds."""
    algorithm = config.algorithm
    low = algorithm.rollout_is_threshold_lower
    high = algorithm.rollout_is_threshold
    if algorithm.rollout_is == "icepop" and high < low:
        raise InputError(
            f"algorithm.rollout_is=icepop keeps no token: algorithm.rollout_is_threshold={high} is "
            f"below algorithm.rollout_is_threshold_lower={low}. Raise the first, for example to 5.0"
        )


def check_kl_loss_teaches(config: DictConfig) -> None:
    """Raise InputError if the expected gradient of the divergence in the loss is 0.

    This is so if its derivative is the same at every token, as k1's is: the expectation of
    grad log p under p is 0.
    """
    algorithm = config.algorithm
    if not algorithm.use_kl_loss:
        return
    log_probs = torch.tensor([-3.0, -2.0, -1.5, -1.0, -0.5, -0.25], requires_grad=True)
    ref_log_probs = torch.tensor([-1.0, -2.5, -1.0, -1.25, -0.25, -0.5])
    divergence = find_function(config, "kl_loss_type")(
        log_probs=log_probs, ref_log_probs=ref_log_probs
    )
    check_shapes(config, "kl_loss_type", log_probs, divergence)
    derivative = torch.zeros_like(log_probs)
    if divergence.requires_grad:
        (derivative,) = torch.autograd.grad(divergence.sum(), log_probs)
    if torch.equal(derivative, derivative[:1].expand_as(derivative)):
        raise InputError(
            f"algorithm.kl_loss_type={algorithm.kl_loss_type} has no effect as a loss: its "
            "derivative is the same at every token, so its expected gradient is 0. Set "
            "algorithm.kl_loss_type=k2 (which has the gradient of KL(policy || reference)) or k3 "
            "(the gradient of KL(reference || policy)), or algorithm.use_kl_in_reward=true with "
            f"algorithm.kl_penalty={algorithm.kl_loss_type}"
        )


def check_no_dropout(config: DictConfig) -> None:
    """Raise InputError for dropout of adapters.

    The log-probabilities before and during the update would come from different dropout masks, so
    ratios would differ from 1 before anything was learned.
    """
    dropout = config.model.lora.dropout
    if dropout > 0:
        raise InputError(
            f"model.lora.dropout={dropout} does not work with PPO: ratios of probabilities would "
            "differ from 1 before anything is learned. Set model.lora.dropout=0"
        )


def check_sampling(config: DictConfig) -> None:
    """Raise InputError for settings of generation and rewards that contradict each other."""
    validation = config.validation
    if validation.n > 1 and validation.temperature == 0:
        raise InputError(
            f"validation.n={validation.n} with validation.temperature=0 generates equal "
            "responses: raise the temperature, or set validation.n=1"
        )
    if config.algorithm.filter_groups.enable and config.rollout.n < 2:
        raise InputError(
            "algorithm.filter_groups.enable=true needs rollout.n of 2 or more: the rewards of a "
            "group of one response are always equal"
        )
    overlong_buffer = config.reward.overlong_buffer
    longest = longest_response(config)
    if overlong_buffer > longest:
        limit = "max_tokens" if longest == config.rollout.max_tokens else "max_episode_tokens"
        raise InputError(
            f"reward.overlong_buffer={overlong_buffer} is more than rollout.{limit}={longest}: "
            "lower it"
        )


def check_episodes(config: DictConfig) -> None:
    """Raise InputError for settings that have no effect on episodes, or do not work with them."""
    episode = config.rollout.episode
    if not episode:
        return
    unused = ("function", "kwargs", "num_workers", "timeout", "concurrency", "skip_special_tokens")
    for key in (*unused, "step_rewards"):
        if config.reward[key] != defaults("reward")[key]:
            raise InputError(
                f"reward.{key}={config.reward[key]} does nothing with rollout.episode={episode}, "
                "which gives the reward itself: leave it out"
            )
    if not config.rollout.max_episode_tokens:
        one_turn = config.data.max_prompt_length + config.rollout.max_tokens
        raise InputError(
            f"rollout.episode={episode} needs rollout.max_episode_tokens, the longest sequence of "
            "an episode: its prompt, all turns and the results of tools. A single turn takes up to "
            f"{one_turn} tokens (data.max_prompt_length + rollout.max_tokens)"
        )
    if config.data.truncation in ("left", "right"):
        raise InputError(
            f"data.truncation={config.data.truncation} does nothing with rollout.episode={episode},"
            " which gets the whole row: set data.truncation=drop or error, or raise "
            "data.max_prompt_length"
        )
    if config.model.images:
        raise InputError(
            f"rollout.episode={episode} does not work with model.images=true yet: set "
            "model.images=false"
        )


def check_partial(config: DictConfig) -> None:
    """Raise InputError for settings that do not work with responses that continue later."""
    rollout = config.rollout
    if not rollout.partial.enable:
        return
    partial = "rollout.partial.enable=true"
    if rollout.partial.require_correction and config.algorithm.rollout_is == "none":
        raise InputError(
            f"{partial} trains on tokens that older weights have drawn: set "
            "algorithm.rollout_is=token (or sequence) to correct for them, or "
            "rollout.partial.require_correction=false to train without a correction"
        )
    drafter = mtp.drafter(config)
    if drafter:
        key = "model.mtp.enable_rollout" if drafter == "mtp" else f"rollout.speculative={drafter}"
        raise InputError(
            f"{partial} does not work with {key}: drafts draw other random numbers after a "
            "response has been interrupted. Leave out one of the two"
        )


def check_cut_off_tokens(config: DictConfig) -> None:
    """Check that the trainer's log-probabilities cover the same tokens as vLLM's.

    With top_k, vLLM reports the tokens that it kept, and the trainer's log-probabilities cover
    only these. With top_p or min_p but without top_k, they cover all tokens, so their ratio to
    vLLM's is meaningless. Raises InputError if the ratio is used, otherwise warns.
    """
    cut_off = cut_off_settings(config)
    if not cut_off:
        return
    algorithm = config.algorithm
    if algorithm.rollout_is != "none" or algorithm.rollout_rs != "none":
        raise InputError(
            f"{cut_off} with algorithm.rollout_is or rollout_rs: vLLM's log-probabilities cover "
            "only the tokens that were kept, the trainer's cover the full vocabulary, and their "
            "ratio is meaningless; set rollout.top_k (e.g. 64), so that both cover the kept tokens"
        )
    if is_rank0():
        print(
            f"warning: {cut_off}: responses are drawn from fewer tokens than the trainer's "
            "log-probabilities cover, so the policy that is trained differs slightly from the one "
            "that sampled; set rollout.top_k (e.g. 64) to avoid this",
            file=sys.stderr,
            flush=True,
        )


def cut_off_settings(config: DictConfig) -> str:
    """Return the settings that cut off tokens without the trainer's knowledge, or ""."""
    rollout = config.rollout
    if rollout.top_k > 0:
        return ""
    neutral = {"top_p": 1.0, "min_p": 0.0}
    changed = [key for key, value in neutral.items() if rollout[key] != value]
    return ", ".join(f"rollout.{key}={rollout[key]}" for key in changed)


def check_longest_sequence(config: DictConfig) -> None:
    """Raise InputError if a prompt and its response may not fit into a micro-batch."""
    longest, keys = longest_sequence(config)
    limit, description = sequence_limit(config, int(os.environ.get("WORLD_SIZE", 1)))
    if longest > limit:
        raise InputError(
            f"{keys} = {longest} is more than {description}: raise it, or lower {keys}"
        )
