"""Which values each key may have, beyond the type of its default: choices, bounds, null.

RULES is the table. The functions above it build its entries: a check, and the same condition as
JSON schema.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from configs.values import (
    are_betas,
    are_names,
    are_pass_costs,
    are_ranks,
    are_texts,
    are_weights,
    has_type,
    is_count_or_share,
    is_interval,
    is_text,
    stop_problem,
)

# Python type -> (its name in error messages, its name in JSON schema).
TYPES = {
    bool: ("true or false", "boolean"),
    int: ("a whole number", "integer"),
    float: ("a number", "number"),
    str: ("a string", "string"),
    list: ("a list", "array"),
    dict: ("a group of keys", "object"),
    (int, float): ("a number", "number"),
    (str, list): ("a path or a list of paths", ["string", "array"]),
}
REQUIRED = "???"  # in place of a default, for a key that the user must set


@dataclass(frozen=True)
class Rule:
    """A condition on the value of a key.

    Attributes:
        problem: returns the problem with a value, such as "must be at least 1", or None.
        schema: the same condition as JSON schema, as far as JSON schema can express it.
        is_path: whether values may name files or directories, in which ~ and environment variables
            are expanded: a path, a list of paths, or path/to/file.py:name.
        allows_null: whether the value may be null, although the default is not.
    """

    problem: Callable[[Any], str | None]
    schema: dict
    is_path: bool = False
    allows_null: bool = False


def problem_with(key: str, value, default) -> str | None:
    """Return the problem with the value of a key, or None.

    Args:
        default: the default of the key, which determines its type unless its rule does.
    """
    rule = RULES.get(key, ANYTHING)
    if problem_with_number(value):
        return problem_with_number(value)
    if value == "None" or (default is None and value == "none"):
        return "is a string in YAML; an empty value is null"
    has_typed_default = default is not None and default != REQUIRED
    if value is None and rule.allows_null:
        return None
    if has_typed_default and "type" not in rule.schema:
        kind = type(default)
        if not has_type(value, kind):
            return f"must be {TYPES[kind][0]}, like its default {default!r}"
    elif key not in RULES and not isinstance(value, str):
        return "must be a string"
    return rule.problem(value)


def problem_with_number(value) -> str | None:
    """Return the problem with a value that is an infinite number or not a number, else None."""
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return None if is_finite else "must be a finite number"


def is_path(key: str) -> bool:
    """Return whether the value of a key may name files or directories."""
    return rule_of(key).is_path


def rule_of(key: str) -> Rule:
    """Return the rule for a key. For a key of a free group, this is the group's rule, "a.b.*"."""
    group = key.rpartition(".")[0]
    return RULES.get(key, RULES.get(f"{group}.*", ANYTHING))


# -- making rules ----------------------------------------------------------------------------------


def rule(text: str, holds: Callable[[Any], bool], **schema) -> Rule:
    """Return a rule that values follow if `holds(value)`; `text` describes the problem if not."""

    def problem(value) -> str | None:
        return None if holds(value) else text

    return Rule(problem, schema)


def one_of(*choices: str) -> Rule:
    return rule(f"must be one of {', '.join(choices)}", lambda v: v in choices, enum=[*choices])


def at_least(low: float) -> Rule:
    return rule(f"must be at least {low}", lambda v: v >= low, minimum=low)


def above(low: float) -> Rule:
    return rule(f"must be above {low}", lambda v: v > low, exclusiveMinimum=low)


def above_or(low: float, other: float, meaning: str) -> Rule:
    return rule(
        f"must be above {low}, or {other} for {meaning}",
        lambda v: v > low or v == other,
        anyOf=[{"exclusiveMinimum": low}, {"const": other}],
    )


def between(low: float, high: float) -> Rule:
    return rule(
        f"must lie between {low} and {high}", lambda v: low <= v <= high, minimum=low, maximum=high
    )


ANYTHING = Rule(lambda value: None, {})


def optional(kind: type | tuple[type, ...], then: Rule = ANYTHING) -> Rule:
    """Return a rule for null, or a value of this type that follows the rule `then`."""
    name, json_type = TYPES[kind]

    def problem(value) -> str | None:
        if value is None:
            return None
        if not isinstance(value, kind) or isinstance(value, bool):
            return f"must be {name} or null"
        return then.problem(value)

    schema = {"anyOf": [{"type": json_type} | then.schema, {"type": "null"}]}
    return Rule(problem, schema, then.is_path, allows_null=True)


# -- rules for single keys -------------------------------------------------------------------------

STRING = {"type": "string", "minLength": 1}
STRING_OR_LIST = {"type": ["string", "array"], "items": STRING, "minLength": 1, "minItems": 1}


def unknown_logger(value: list) -> str | None:
    for name in value:
        if name not in KNOWN_LOGGERS:
            return f"may contain console, tensorboard and wandb, not {name!r}"
    return None


KNOWN_LOGGERS = ("console", "tensorboard", "wandb")
LOGGERS = Rule(unknown_logger, {"items": {"enum": [*KNOWN_LOGGERS]}})
PATH = replace(rule("must be a string", lambda v: isinstance(v, str), type="string"), is_path=True)
PATHS = replace(
    rule(
        "must be a path or a list of paths", lambda v: is_text(v) or are_names(v), **STRING_OR_LIST
    ),
    is_path=True,
)
FUNCTION = PATH  # the name of a built-in function, or path/to/file.py:name
TARGETS = rule(
    "must be all-linear, a regular expression or a list of names",
    lambda v: is_text(v) or are_names(v),
    **STRING_OR_LIST,
)
STRINGS = rule("must be a list of strings", are_texts, items=STRING)
STOP_STRINGS = Rule(stop_problem, STRINGS.schema)
NAMES = rule("must be a list of names", are_names, items=STRING, minItems=1)
WEIGHTS = rule(
    "must be a list of numbers above 0",
    are_weights,
    items={"type": "number", "exclusiveMinimum": 0},
    minItems=1,
)
BETAS = rule(
    "must be two numbers in [0, 1)",
    are_betas,
    items={"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    minItems=2,
    maxItems=2,
)
INTERVAL = rule(
    "must be the first and the last step, counted from 1, or [-1, -1] for none",
    is_interval,
    items={"type": "integer"},
    minItems=2,
    maxItems=2,
)
TOOL = rule(
    "must be a name or a list of names",
    lambda v: v is None or isinstance(v, str) or are_names(v),
    type=["string", "array", "null"],
    items=STRING,
    minItems=1,
)
RANKS = rule(
    "must be null, all, or a list of ranks",
    are_ranks,
    anyOf=[
        {"enum": [None, "all"]},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
    ],
)
AUTO_OR_COUNT = rule(
    "must be auto, or at least 1",
    lambda v: v == "auto" or (type(v) is int and v >= 1),
    type=["integer", "string"],
    anyOf=[{"const": "auto"}, {"type": "integer", "minimum": 1}],
)
PASS_COSTS = rule(
    "must be four numbers of at least 0, the first of them above 0",
    are_pass_costs,
    items={"type": "number", "minimum": 0},
    prefixItems=[{"type": "number", "exclusiveMinimum": 0}],
    minItems=4,
    maxItems=4,
)
COUNT_OR_SHARE = rule(
    "must be a number of rows, or a share between 0 and 1",
    is_count_or_share,
    anyOf=[{"type": "integer", "minimum": 0}, {"minimum": 0, "exclusiveMaximum": 1}],
    type="number",
)
DROPOUT = rule(
    "must be at least 0 and less than 1", lambda v: 0 <= v < 1, minimum=0, exclusiveMaximum=1
)
SMOOTHING = rule(
    "must be at least 0 and less than 0.5", lambda v: 0 <= v < 0.5, minimum=0, exclusiveMaximum=0.5
)
TOP_K = rule(
    "must lie between 1 and 1024, or be -1 for all tokens",
    lambda v: v == -1 or 1 <= v <= 1024,
    anyOf=[{"minimum": 1, "maximum": 1024}, {"const": -1}],
)
# vLLM silently samples with 0.01 where a lower temperature is requested.
TEMPERATURE = at_least(0.01)
GREEDY_OR_TEMPERATURE = rule(
    "must be 0 (greedy) or at least 0.01",
    lambda v: v == 0 or v >= 0.01,
    anyOf=[{"const": 0}, {"minimum": 0.01}],
)
NUMBER = (int, float)
DTYPE = one_of("float32", "bfloat16")
FREQUENCY = above_or(0, -1, "never")
COUNT_OR_ALL = above_or(0, -1, "all")

# -- the table -------------------------------------------------------------------------------------

RULES = {
    "assume.num_gpus": optional(int, at_least(1)),
    "assume.gpu_memory_gib": optional((int, float), above(0.0)),
    "output_dir": PATH,
    "model.path": PATH,
    "model.freeze": STRINGS,
    "model.lora.rank": at_least(0),
    "model.lora.alpha": at_least(1),
    "model.lora.dropout": DROPOUT,
    "model.lora.target_modules": TARGETS,
    "model.lora.exclude_modules": STRINGS,
    "model.lora.adapter_path": optional(str, PATH),
    "model.lora.dtype": DTYPE,
    "model.mtp.mtp_loss_scaling_factor": above(0.0),
    "model.mtp.num_speculative_tokens": at_least(1),
    "data.train_files": PATHS,
    "data.val_files": optional((str, list), PATHS),
    "data.val_size": COUNT_OR_SHARE,
    "data.train_max_samples": COUNT_OR_ALL,
    "data.val_max_samples": COUNT_OR_ALL,
    "data.ignored_fields": STRINGS,
    "data.drop_processor_keys": STRINGS,
    "data.weights": optional(list, WEIGHTS),
    "data.sampler": optional(str, FUNCTION),
    "data.train_batch_size": at_least(1),
    "data.max_length": at_least(2),
    "data.truncation": one_of("error", "left", "right", "drop"),
    "data.max_tokens_per_micro_batch": at_least(2),
    "data.system_key": optional(str),
    "data.label_key": optional(str),
    "data.margin_key": optional(str),
    "data.score_key": optional(str),
    "data.system_prompt": optional(str),
    "data.lost_fields": one_of("error", "drop", "ignore"),
    "data.chat_template": optional(str, PATH),
    "data.train_on": one_of("all", "last"),
    "data.special_tokens_in_text": optional(str, one_of("keep", "escape", "error")),
    "data.num_proc": optional(int, at_least(1)),
    "data.cache_dir": optional(str, PATH),
    "data.max_prompt_length": at_least(1),
    "optim.name": FUNCTION,
    "optim.lr": at_least(0.0),
    "optim.betas": BETAS,
    "optim.eps": above(0.0),
    "optim.state_dtype": one_of("auto", "float32", "bfloat16", "int8"),
    "optim.rounding": one_of("stochastic", "nearest"),
    "optim.weight_decay": at_least(0.0),
    "optim.clip_grad": at_least(0.0),
    "optim.lr_scheduler_type": FUNCTION,
    "optim.lr_warmup_steps_ratio": between(0.0, 1.0),
    "optim.lr_decay_steps_ratio": between(0.0, 1.0),
    "optim.min_lr_ratio": between(0.0, 1.0),
    "trainer.total_epochs": at_least(1),
    "trainer.total_steps": above_or(0, -1, "as many as total_epochs has"),
    "trainer.save_freq": FREQUENCY,
    "trainer.save_minutes": at_least(0.0),
    "trainer.test_freq": FREQUENCY,
    "trainer.seed": between(0, 2**40),
    "trainer.resume": PATH,
    "trainer.resume_override": STRINGS,
    "trainer.max_checkpoints": COUNT_OR_ALL,
    "trainer.timeout_minutes": above(0.0),
    "trainer.max_skipped_steps": at_least(0),
    "trainer.logger": LOGGERS,
    "trainer.log_freq": at_least(1),
    "trainer.profile_interval": INTERVAL,
    "trainer.rollout_freq": FREQUENCY,
    "profiler.tool": TOOL,
    "profiler.ranks": RANKS,
    "profiler.torch.trace": one_of("stage", "interval"),
    "profiler.torch.activities": optional(list, NAMES),
    "profiler.memory.max_entries": at_least(1),
    "profiler.msprobe.config_path": optional(str, PATH),
    "profiler.msprobe.task": optional(str, one_of("statistics", "tensor")),
    "profiler.msprobe.level": optional(str, one_of("L0", "L1", "mix")),
    "profiler.msprobe.stages": optional(list, NAMES),
    "rollout.n": at_least(1),
    "rollout.temperature": TEMPERATURE,
    "rollout.top_p": between(1e-9, 1.0),
    "rollout.top_k": TOP_K,
    "rollout.min_p": between(0.0, 1.0),
    "rollout.max_tokens": at_least(1),
    "rollout.stop": STOP_STRINGS,
    "rollout.tensor_parallel_size": at_least(1),
    "rollout.gpu_memory_utilization": between(0.01, 1.0),
    "rollout.kv_cache_gib": optional(NUMBER, above(0.0)),
    "rollout.max_num_seqs": optional(int, at_least(1)),
    "rollout.speculative": optional(str, one_of("ngram", "suffix")),
    "rollout.num_speculative_tokens": at_least(1),
    "rollout.partial.oversample": between(1.0, 2.0),
    "rollout.partial.max_staleness": at_least(0),
    "rollout.partial.on_stale": one_of("finish", "drop"),
    "rollout.quantization": one_of("none", "fp8"),
    "rollout.kv_cache_dtype": one_of("auto", "fp8"),
    "rollout.share_base": one_of("auto", "always", "never"),
    "rollout.episode": optional(str, FUNCTION),
    "rollout.episode_python": optional(str, PATH),
    "rollout.episode_workers": at_least(1),
    "rollout.episode_timeout": above(0.0),
    "rollout.max_concurrent_episodes": at_least(1),
    "rollout.max_turns": optional(int, at_least(1)),
    "rollout.max_episode_tokens": optional(int, at_least(1)),
    "rollout.limit_score": optional(NUMBER),
    "rollout.tool_parser": optional(str),
    "rollout.reasoning_parser": optional(str),
    "validation.n": at_least(1),
    "validation.temperature": GREEDY_OR_TEMPERATURE,
    "validation.top_p": optional(NUMBER, between(1e-9, 1.0)),
    "validation.top_k": optional(int, TOP_K),
    "validation.min_p": optional(NUMBER, between(0.0, 1.0)),
    "validation.max_tokens": optional(int, at_least(1)),
    "validation.stop": optional(list, STOP_STRINGS),
    "reward.function": FUNCTION,
    "reward.model.path": optional(str, PATH),
    "reward.num_workers": at_least(1),
    "reward.timeout": above(0.0),
    "reward.concurrency": at_least(1),
    "reward.memory_gib": above(0.0),
    "reward.env": STRINGS,
    "reward.max_failure_rate": between(0.0, 1.0),
    "reward.overlong_buffer": at_least(0),
    "reward.overlong_penalty": at_least(0.0),
    "algorithm.adv_estimator": FUNCTION,
    "algorithm.gamma": between(0.0, 1.0),
    "algorithm.lam": between(0.0, 1.0),
    "algorithm.loss_mode": FUNCTION,
    "algorithm.clip_ratio_low": between(0.0, 1.0),
    "algorithm.clip_ratio_high": at_least(0.0),
    "algorithm.clip_ratio_c": above_or(1, 0, "none"),
    "algorithm.loss_agg_mode": FUNCTION,
    "algorithm.ppo_mini_batch_size": optional(int, at_least(1)),
    "algorithm.ppo_epochs": at_least(1),
    "algorithm.kl_penalty": FUNCTION,
    "algorithm.kl_ctrl.type": one_of("fixed", "adaptive"),
    "algorithm.kl_ctrl.kl_coef": at_least(0.0),
    "algorithm.kl_ctrl.target_kl": above(0.0),
    "algorithm.kl_ctrl.horizon": at_least(1),
    "algorithm.kl_loss_type": FUNCTION,
    "algorithm.kl_loss_coef": at_least(0.0),
    "algorithm.rollout_is": one_of("none", "token", "sequence", "icepop"),
    "algorithm.rollout_is_threshold": above(0.0),
    "algorithm.rollout_is_threshold_lower": between(0.0, 1.0),
    "algorithm.rollout_rs": one_of("none", "token", "sequence", "geometric"),
    "algorithm.rollout_rs_threshold": at_least(1.0),
    "algorithm.rollout_rs_threshold_lower": between(0.0, 1.0),
    "algorithm.distill.teacher": optional(str, PATH),
    "algorithm.distill.teachers.*": PATH,
    "algorithm.distill.teacher_key": rule("must be the name of a column", is_text, **STRING),
    "data.teacher_prompt_key": optional(str),
    "algorithm.distill.mode": one_of("reverse_kl", "forward_kl", "jsd"),
    "algorithm.distill.coef": above(0.0),
    "algorithm.distill.top_k": at_least(0),
    "algorithm.distill.temperature": above(0.0),
    "algorithm.distill.fsdp_size": optional(int, COUNT_OR_ALL),
    "distill.teacher": optional(str, PATH),
    "distill.mode": one_of("reverse_kl", "forward_kl", "jsd"),
    "distill.coef": above(0.0),
    "distill.top_k": at_least(0),
    "distill.temperature": above(0.0),
    "distill.fsdp_size": optional(int, COUNT_OR_ALL),
    "algorithm.filter_groups.max_num_gen_batches": at_least(1),
    "critic.path": optional(str, PATH),
    "critic.lr": at_least(0.0),
    "critic.cliprange_value": at_least(0.0),
    "critic.warmup_steps": at_least(0),
    "reference.path": optional(str, PATH),
    "algorithm.loss": FUNCTION,
    "algorithm.beta": optional(NUMBER, above(0.0)),
    "algorithm.label_smoothing": optional(NUMBER, SMOOTHING),
    "algorithm.sft_coef": at_least(0.0),
    "algorithm.center_rewards_coefficient": at_least(0.0),
    "engine.param_dtype": DTYPE,
    "engine.compute_dtype": DTYPE,
    "engine.float8": one_of("none", "tensorwise", "rowwise"),
    "engine.float8_exclude": STRINGS,
    "engine.reduce_dtype": DTYPE,
    "engine.fsdp_size": COUNT_OR_ALL,
    "engine.context_parallel_size": AUTO_OR_COUNT,
    "engine.context_parallel_costs": optional(list, PASS_COSTS),
    "engine.router_aux_loss_coef": optional(NUMBER, at_least(0.0)),
    "engine.torch_compile": one_of("auto", "always", "never"),
    "engine.log_prob_chunk_size": at_least(1),
    "engine.bridge": one_of("own", "mbridge"),
    "engine.tensor_model_parallel_size": at_least(1),
    "engine.pipeline_model_parallel_size": at_least(1),
    "engine.virtual_pipeline_model_parallel_size": at_least(1),
    "engine.expert_model_parallel_size": at_least(1),
    "engine.recompute": one_of("none", "selective", "full"),
}
