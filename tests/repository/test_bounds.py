"""The smallest, the largest and the named values of each key, as the comments in configs/ tell."""

import jsonschema
import pytest

from config import default_keys
from configs.rules import problem_with, rule_of

# Key -> values that are allowed, and values that are not: the bounds, and their nearest neighbours.
COUNTS = {
    key: ([1, 7], [0, -1])
    for key in (
        "data.train_batch_size",
        "data.max_prompt_length",
        "model.lora.alpha",
        "model.mtp.num_speculative_tokens",
        "trainer.total_epochs",
        "trainer.log_freq",
        "profiler.memory.max_entries",
        "rollout.n",
        "rollout.max_tokens",
        "rollout.tensor_parallel_size",
        "rollout.num_speculative_tokens",
        "rollout.episode_workers",
        "rollout.max_concurrent_episodes",
        "validation.n",
        "reward.num_workers",
        "reward.concurrency",
        "algorithm.ppo_epochs",
        "algorithm.kl_ctrl.horizon",
        "algorithm.filter_groups.max_num_gen_batches",
        "engine.log_prob_chunk_size",
    )
}
OPTIONAL_COUNTS = {
    key: ([None, 1, 7], [0, -1, 1.5])
    for key in (
        "assume.num_gpus",
        "data.num_proc",
        "rollout.max_num_seqs",
        "rollout.max_turns",
        "rollout.max_episode_tokens",
        "validation.max_tokens",
        "algorithm.ppo_mini_batch_size",
    )
}
ZERO_OR_MORE = {
    key: ([0, 3], [-1, -0.001])
    for key in (
        "model.lora.rank",
        "optim.lr",
        "optim.weight_decay",
        "optim.clip_grad",
        "trainer.save_minutes",
        "trainer.max_skipped_steps",
        "rollout.partial.max_staleness",
        "reward.overlong_buffer",
        "reward.overlong_penalty",
        "algorithm.clip_ratio_high",
        "algorithm.kl_ctrl.kl_coef",
        "algorithm.kl_loss_coef",
        "algorithm.distill.top_k",
        "critic.lr",
        "critic.cliprange_value",
        "critic.warmup_steps",
    )
}
ABOVE_ZERO = {
    key: ([0.001, 9.0], [0.0, -0.5])
    for key in (
        "model.mtp.mtp_loss_scaling_factor",
        "optim.eps",
        "trainer.timeout_minutes",
        "rollout.episode_timeout",
        "reward.timeout",
        "reward.memory_gib",
        "algorithm.kl_ctrl.target_kl",
        "algorithm.rollout_is_threshold",
        "algorithm.distill.coef",
        "algorithm.distill.temperature",
    )
}
SHARES = {
    key: ([0.0, 0.5, 1.0], [-0.001, 1.001])
    for key in (
        "optim.lr_warmup_steps_ratio",
        "optim.lr_decay_steps_ratio",
        "optim.min_lr_ratio",
        "rollout.min_p",
        "reward.max_failure_rate",
        "algorithm.gamma",
        "algorithm.lam",
        "algorithm.clip_ratio_low",
        "algorithm.rollout_is_threshold_lower",
        "algorithm.rollout_rs_threshold_lower",
    )
}
FREQUENCIES = {
    key: ([-1, 1, 50], [0, -2])
    for key in (
        "trainer.save_freq",
        "trainer.test_freq",
        "trainer.rollout_freq",
        "trainer.total_steps",
        "trainer.max_checkpoints",
        "data.train_max_samples",
        "data.val_max_samples",
        "engine.fsdp_size",
    )
}
LISTS_OF_STRINGS = {
    key: ([[], ["a"]], [[1], [""], "a"])
    for key in (
        "model.freeze",
        "model.lora.exclude_modules",
        "data.ignored_fields",
        "data.drop_processor_keys",
        "trainer.resume_override",
        "reward.env",
        "engine.float8_exclude",
    )
}
OPTIONAL_STRINGS = {
    key: ([None, "a"], [3, ["a"], True])
    for key in (
        "model.lora.adapter_path",
        "data.sampler",
        "data.system_key",
        "data.system_prompt",
        "data.chat_template",
        "data.cache_dir",
        "data.teacher_prompt_key",
        "profiler.msprobe.config_path",
        "rollout.episode",
        "rollout.episode_python",
        "rollout.tool_parser",
        "rollout.reasoning_parser",
        "reward.model.path",
        "algorithm.distill.teacher",
        "critic.path",
        "reference.path",
    )
}
SINGLE = {
    "model.path": (["a"], [3, None, ["a"]]),
    "data.val_files": ([None, "a.jsonl", ["a", "b"]], ["", [], [1], 3]),
    "profiler.msprobe.stages": ([None, ["actor_update"]], [[], [""], "actor_update"]),
    "assume.gpu_memory_gib": ([None, 0.5, 79], [0, -1, "79"]),
    "rollout.kv_cache_gib": ([None, 0.5, 2], [0, -1.0]),
    "algorithm.distill.fsdp_size": ([None, -1, 2], [0, -2]),
    "model.lora.dropout": ([0.0, 0.99], [-0.01, 1.0]),
    "data.max_tokens_per_micro_batch": ([2, 16384], [1, 0]),
    "data.weights": ([None, [3, 1], [0.5]], [[], [1, 0], [1, -1], ["1"], [True]]),
    "data.val_size": ([0, 5, 0.0, 0.999], [-1, 1.0, -0.1]),
    "optim.betas": ([[0.0, 0.999]], [[0.9], [0.9, 1.0], [-0.1, 0.9], [0.9, 0.9, 0.9]]),
    "trainer.seed": ([0, 2**40], [-1, 2**40 + 1]),
    "trainer.profile_interval": (
        [[-1, -1], [1, 1], [2, 5]],
        [[0, 1], [5, 2], [-1, 1], [1], [1, 2, 3], [1.0, 2.0]],
    ),
    "rollout.temperature": ([0.01, 1.0], [0.0, 0.009]),
    "validation.temperature": ([0.0, 0.01], [0.009, -1.0]),
    "rollout.top_p": ([1e-9, 1.0], [0.0, 1.001]),
    "validation.top_p": ([None, 1e-9, 1.0], [0.0, 1.001]),
    "validation.min_p": ([None, 0, 1.0], [-0.001, 1.001]),
    "rollout.top_k": ([-1, 1, 1024], [0, -2, 1025]),
    "validation.top_k": ([None, -1, 1, 1024], [0, -2, 1025]),
    "rollout.stop": ([[], ["x", "a\\nb"]], [["\\n"], ["x", "\\t\\r"], [""], [1], "x"]),
    "validation.stop": ([None, [], ["x"]], [["\\n"], "x"]),
    "rollout.gpu_memory_utilization": ([0.01, 1.0], [0.009, 1.001]),
    "rollout.partial.oversample": ([1.0, 2.0], [0.999, 2.001]),
    "rollout.limit_score": ([None, -3.5, 0], ["0", True]),
    "algorithm.clip_ratio_c": ([0, 1.001, 3.0], [1, 0.5, -1]),
    "algorithm.rollout_rs_threshold": ([1.0, 2.0], [0.999]),
    "algorithm.distill.teacher_key": (["column"], ["", 3]),
    "profiler.tool": ([None, "torch", ["torch", "memory"]], [[], [""], 3]),
    "profiler.ranks": ([None, "all", [0, 3]], ["some", [], [-1], [1.0], 0]),
    "profiler.torch.activities": ([None, ["cpu"]], [[], [""], "cpu"]),
    "engine.context_parallel_size": (["auto", 1, 4], [0, -1, "all", True]),
    "engine.context_parallel_costs": (
        [None, [0.5, 0, 0, 0], [400, 173.4, 281.6, 0.44]],
        [[0, 1, 1, 0], [400, -1, 1, 0], [400, 1, 1], [400, 1, 1, 0, 0], ["400", 1, 1, 0], 400, []],
    ),
    "trainer.logger": ([[], ["console", "tensorboard", "wandb"]], [["file"], "console"]),
    "model.lora.target_modules": (["all-linear", ["q_proj"]], ["", [], [1]]),
    "data.train_files": (["a.jsonl", ["a", "b"]], ["", [], [1], 3]),
    "engine.router_aux_loss_coef": ([None, 0, 0.01], [-0.001, "0"]),
}
BOUNDS = {
    **COUNTS,
    **OPTIONAL_COUNTS,
    **ZERO_OR_MORE,
    **ABOVE_ZERO,
    **SHARES,
    **FREQUENCIES,
    **LISTS_OF_STRINGS,
    **OPTIONAL_STRINGS,
    **SINGLE,
}


def check_bounds(script: str, engine: str, key: str, allowed: list, rejected: list) -> None:
    default = default_keys(f"{script}.yaml", engine)[key]
    for value in allowed:
        assert problem_with(key, value, default) is None, value
    for value in rejected:
        assert problem_with(key, value, default), value
    # The values that editors accept. A schema does not know what a default says about the type.
    validator = jsonschema.Draft202012Validator(rule_of(key).schema)
    assert all(validator.is_valid(value) for value in allowed)


@pytest.mark.parametrize("key", BOUNDS)
def test_a_value_may_be_as_small_or_as_large_as_its_bound_and_no_more(key):
    check_bounds("ppo", "fsdp", key, *BOUNDS[key])


# Bounds of keys that train_ppo.py does not have.
OTHERS = {
    ("sft", "data.max_length"): ([2, 4096], [1, 0]),
    ("sft", "distill.coef"): ([0.001], [0.0]),
    ("sft", "distill.top_k"): ([0, 5], [-1]),
    ("sft", "distill.temperature"): ([0.001], [0.0]),
    ("sft", "distill.fsdp_size"): ([None, -1, 2], [0, -2]),
    ("sft", "distill.teacher"): ([None, "a"], [3, ["a"]]),
    ("dpo", "data.label_key"): ([None, "a"], [3, ["a"]]),
    ("rm", "data.margin_key"): ([None, "a"], [3, ["a"]]),
    ("rm", "data.score_key"): ([None, "a"], [3, ["a"]]),
    ("dpo", "algorithm.beta"): ([None, 0.001, 2], [0.0, -1, "1"]),
    ("dpo", "algorithm.label_smoothing"): ([None, 0, 0.49], [0.5, -0.01]),
    ("dpo", "algorithm.sft_coef"): ([0.0, 2.0], [-0.001]),
    ("rm", "algorithm.center_rewards_coefficient"): ([0.0, 0.01], [-0.001]),
}
OF_MEGATRON = (
    "engine.tensor_model_parallel_size",
    "engine.pipeline_model_parallel_size",
    "engine.virtual_pipeline_model_parallel_size",
    "engine.expert_model_parallel_size",
)


@pytest.mark.parametrize("script, key", OTHERS)
def test_bounds_of_the_keys_of_other_scripts(script, key):
    check_bounds(script, "fsdp", key, *OTHERS[script, key])


@pytest.mark.parametrize("key", OF_MEGATRON)
def test_a_layout_of_megatron_has_one_part_or_more(key):
    check_bounds("ppo", "megatron", key, [1, 4], [0, -1])


# (script, engine) -> key -> the values that it may have.
CHOICES = {
    ("ppo", "fsdp"): {
        "data.truncation": "error left right drop",
        "data.lost_fields": "error drop ignore",
        "data.special_tokens_in_text": "keep escape error",
        "model.lora.dtype": "float32 bfloat16",
        "optim.state_dtype": "auto float32 bfloat16 int8",
        "optim.rounding": "stochastic nearest",
        "profiler.torch.trace": "stage interval",
        "profiler.msprobe.task": "statistics tensor",
        "profiler.msprobe.level": "L0 L1 mix",
        "rollout.speculative": "ngram suffix",
        "rollout.partial.on_stale": "finish drop",
        "rollout.quantization": "none fp8",
        "rollout.kv_cache_dtype": "auto fp8",
        "rollout.share_base": "auto always never",
        "algorithm.kl_ctrl.type": "fixed adaptive",
        "algorithm.rollout_is": "none token sequence icepop",
        "algorithm.rollout_rs": "none token sequence geometric",
        "algorithm.distill.mode": "reverse_kl forward_kl jsd",
        "engine.param_dtype": "float32 bfloat16",
        "engine.compute_dtype": "float32 bfloat16",
        "engine.reduce_dtype": "float32 bfloat16",
        "engine.float8": "none tensorwise rowwise",
        "engine.torch_compile": "auto always never",
    },
    ("sft", "fsdp"): {"data.train_on": "all last", "distill.mode": "reverse_kl forward_kl jsd"},
    ("ppo", "megatron"): {
        "engine.bridge": "own mbridge",
        "engine.recompute": "none selective full",
    },
}


@pytest.mark.parametrize("script, engine", CHOICES)
def test_a_key_with_named_values_has_these_and_tells_them(script, engine):
    defaults = default_keys(f"{script}.yaml", engine)
    for key, text in CHOICES[script, engine].items():
        choices = text.split()
        for choice in choices:
            is_null = defaults[key] is None and choice == "none"
            assert is_null or problem_with(key, choice, defaults[key]) is None, (key, choice)
        message = f"must be one of {', '.join(choices)}"
        assert problem_with(key, "other", defaults[key]) == message, key
