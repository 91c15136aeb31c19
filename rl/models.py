"""The models of a run: always an actor, and others if it uses them.

These are a critic, a reference, a teacher and a reward model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from config import defaults
from configs.errors import errors_about_model
from data.prompts import PromptDataset
from engines.build import engine_class
from engines.heads import Head
from engines.model.experts import with_own_experts
from engines.model.hf import read_hf_config
from engines.model.model_files import fingerprint, is_only_described
from engines.reference import check_same_vocabulary, reference_config
from engines.teacher_settings import teacher_paths, teacher_roles, uses_teacher
from engines.teaching import check_teacher_layout, teacher_config, without_teacher
from rl import reward_model
from rl.functions import inputs_read
from rl.reward_model import (
    KEY as REWARD_MODEL_KEY,
    ROLE as REWARD_MODEL,
    check_is_classifier,
    reward_model_config,
    uses_reward_model,
)
from rl.teacher import check_teachers


def uses_critic(config: DictConfig) -> bool:
    """Return whether the advantage estimator or the policy loss reads a critic's values."""
    return "values" in inputs_read(config, "adv_estimator", "loss_mode")


def uses_reference(config: DictConfig) -> bool:
    """Return whether anything reads the log-probabilities of a reference model."""
    algorithm = config.algorithm
    if algorithm.use_kl_loss or algorithm.use_kl_in_reward:
        return True
    return "ref_log_probs" in inputs_read(config, "adv_estimator", "loss_mode")


def reference_fingerprint(config: DictConfig) -> str | None:
    """Return a fingerprint of model.path if it is the reference, which checkpoints lack; else None.

    With adapters, the reference consists of the frozen weights, which have a fingerprint anyway.
    For rank 0, which reads the files.
    """
    is_model_path = not config.reference.path and not config.model.lora.rank
    if not uses_reference(config) or not is_model_path or is_only_described(config):
        return None
    return fingerprint(Path(config.model.path))


def longest_response(config: DictConfig) -> int:
    """Return the limit on the tokens of a response, or of all turns of an episode."""
    return config.rollout.max_episode_tokens or config.rollout.max_tokens


def role_configs(config: DictConfig) -> dict[str, DictConfig]:
    """Return the configuration of each engine of this run, by role.

    The roles are actor, critic, reference, teacher and reward model, in the order in which they are
    built; several teachers are "teacher NAME". With adapters and no reference.path, there is no
    engine for the reference: the actor without its adapters serves as one. A policy that teaches
    itself needs no engine for the teacher.
    """
    roles = {"actor": config}
    if uses_critic(config):
        roles["critic"] = critic_config(config)
    if uses_reference(config) and (config.reference.path or not config.model.lora.rank):
        roles["reference"] = reference_config(config)
    for role, path in teacher_roles(config).items():
        roles[role] = teacher_config(config, path)
    if uses_reward_model(config):
        roles[REWARD_MODEL] = reward_model_config(config)
    for role in roles.keys() - {"actor"}:
        # Only the actor replays vLLM's experts; the other models choose their own.
        roles[role] = OmegaConf.merge(roles[role], {"rollout": {"routing_replay": False}})
    return roles


def critic_config(config: DictConfig) -> DictConfig:
    """Return the critic's configuration: the actor's, with its own model and learning rate."""
    model = {
        "path": config.critic.path or config.model.path,
        "lora": {"adapter_path": None},
        "mtp": defaults("model.mtp"),
    }
    changes = {"model": model, "optim": {"lr": config.critic.lr}}
    return with_own_experts(OmegaConf.merge(without_teacher(config), changes))


def head_of(role: str) -> Head:
    """Return the head of a role's model: log-probabilities, or values and scores."""
    return Head.VALUES if role in ("critic", REWARD_MODEL) else Head.LOG_PROBS


def path_keys(config: DictConfig) -> dict[str, str]:
    """Return role -> the key that names its model, for roles with a model of their own."""
    keys = dict(zip(teacher_roles(config), teacher_paths(config)))
    keys[REWARD_MODEL] = REWARD_MODEL_KEY
    if config.critic.path:
        keys["critic"] = "critic.path"
    if config.reference.path:
        keys["reference"] = "reference.path"
    return keys


def check_models(config: DictConfig, world_size: int) -> Any:
    """Check the models of all roles, and return the actor's Hugging Face configuration.

    Raises InputError for a model that its engine cannot run, and for a critic, reference or teacher
    whose vocabulary differs from the actor's.
    """
    check_model = engine_class(config.model_engine).check
    check_is_classifier(config)
    check_teacher_layout(config, world_size)
    keys = path_keys(config)
    hf_configs = {}
    for role, settings in role_configs(config).items():
        key = keys.get(role, "model.path")
        with errors_about_model(key, settings.model.path):
            hf_configs[role] = check_model(settings, world_size, head_of(role))
    actor = hf_configs["actor"]
    check_teachers(config, hf_configs)
    teachers = teacher_roles(config)
    hf_configs.pop(REWARD_MODEL, None)  # It reads texts, with a tokenizer of its own.
    for role, hf_config in hf_configs.items():
        if role not in teachers:
            check_same_vocabulary(config, role, hf_config, actor)
    return actor


def check_conversations(config: DictConfig, datasets: Mapping[str, PromptDataset]) -> None:
    """Raise InputError if there is a reward model that cannot read the prompts. Loads no weights.

    Called by all ranks.

    datasets: by the configuration key of their rows.
    """
    if uses_reward_model(config):
        num_tokens = read_hf_config(config.reward.model.path).get_text_config().vocab_size
        reward_model.check_conversations(config, datasets, num_tokens)


def mini_batch_prompts(config: DictConfig) -> int:
    """Return the number of prompts in one optimizer step."""
    return config.algorithm.ppo_mini_batch_size or config.data.train_batch_size


def needs_old_log_probs(config: DictConfig, num_mini_batches: int, step: int) -> bool:
    """Return whether a step needs a separate pass for log-probabilities before the update.

    With one update per rollout, the update starts from the policy that sampled, so its own forward
    pass computes them. A separate pass is needed if something reads them before the update, or if
    only the critic is updated. step: from 0.
    """
    algorithm = config.algorithm
    return (
        num_mini_batches * algorithm.ppo_epochs > 1
        or algorithm.use_kl_in_reward
        or algorithm.rollout_rs != "none"
        or "old_log_probs" in inputs_read(config, "adv_estimator")
        or step < config.critic.warmup_steps
    )


def hooked_stages(config: DictConfig, device_type: str) -> list[str]:
    """Return the stages of a step whose module hooks fire, for tools such as msprobe."""
    num_mini_batches = config.data.train_batch_size // mini_batch_prompts(config)
    has_critic = "critic" in role_configs(config)
    fires = {
        # CUDA graphs do not call hooks.
        "rollout_generate": device_type == "cpu" or config.rollout.enforce_eager,
        "actor_compute_log_prob": needs_old_log_probs(config, num_mini_batches, 0),
        "ref_compute_log_prob": uses_reference(config),
        "teacher_compute": uses_teacher(config),
        "reward_model_compute": uses_reward_model(config),
        "compute_values": has_critic,
        "critic_update": has_critic,
        "actor_update": True,
    }
    return [stage for stage, does_fire in fires.items() if does_fire]
