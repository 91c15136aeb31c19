"""The reward model: its configuration and its checks. rl/scoring.py has its part in a step.

A frozen sequence classifier with one label scores each response in its conversation, after vLLM has
gone to sleep. It has a tokenizer and a chat template of its own. Its score is a named part of the
reward, beside that of the reward function:

    score = (score of reward.function) + reward.model.weight * (score of the reward model)
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from config import InputError, defaults
from data.answered import encode_answered, find_unseen
from data.chat.tokenizer import ChatTokenizer, load_tokenizer
from data.prompts import PromptDataset
from data.tokenization import plain_options
from engines.model.classifier import check_is_reward_model
from engines.model.experts import experts_per_token
from engines.model.hf import read_hf_config
from engines.model.model_files import is_only_described
from engines.teaching import without_teacher
from rl.functions import inputs_read

ROLE = "reward model"
KEY = "reward.model.path"
PART = "model"


def uses_reward_model(config: DictConfig) -> bool:
    """Return whether a reward model scores the responses."""
    return config.reward.model.path is not None


def reward_model_config(config: DictConfig) -> DictConfig:
    """Return the reward model's configuration: a model without adapters, MTP layers or freezing.

    If it has no experts, the settings for those of the policy are left out.
    """
    model = {
        "path": config.reward.model.path,
        "freeze": [],
        "lora": defaults("model.lora"),
        "mtp": defaults("model.mtp"),
    }
    data = {"chat_template": None}  # It has its own.
    engine: dict[str, Any] = {"router_aux_loss_coef": None}  # It is not trained.
    divides_experts = config.engine.get("expert_model_parallel_size", 1) > 1
    if divides_experts and not has_experts(config.reward.model.path):
        engine["expert_model_parallel_size"] = 1
    changes = {"model": model, "data": data, "engine": engine}
    return OmegaConf.merge(without_teacher(config), changes)


def has_experts(path: str) -> bool:
    """Return whether a model is a mixture of experts, by its config.json."""
    return experts_per_token(read_hf_config(path).get_text_config()) > 0


def check_reward_model(config: DictConfig) -> None:
    """Raise InputError for settings that do not work with a reward model."""
    if not uses_reward_model(config):
        return
    setting = f"{KEY}={config.reward.model.path}"
    if config.rollout.episode:
        raise InputError(
            f"{setting} does not work with rollout.episode={config.rollout.episode}: an episode "
            "gives its reward itself. Leave out one of the two"
        )
    if config.model.images:
        raise InputError(
            f"{setting} does not work with model.images=true, since reward models read text alone: "
            "leave out one of the two"
        )
    if config.algorithm.filter_groups.enable:
        raise InputError(
            f"{setting} does not work with algorithm.filter_groups.enable=true: groups are chosen "
            "while vLLM generates, and the reward model scores them afterwards. Leave out one of "
            "the two"
        )
    if "baseline" in inputs_read(config, "adv_estimator"):
        raise InputError(
            f"{setting} does not work with algorithm.adv_estimator="
            f"{config.algorithm.adv_estimator}, whose greedy responses have only the score of "
            "reward.function: choose another estimator, such as rloo"
        )
    if config.reward.function == "none" and config.reward.weights:
        raise InputError(
            f"reward.weights={config.reward.weights} does nothing with reward.function=none: leave "
            "it out. The weight of the reward model is reward.model.weight"
        )
    if PART in config.reward.weights:
        raise InputError(
            f"reward.weights.{PART}: the weight of the reward model is reward.model.weight. Set "
            "that instead"
        )


def check_is_classifier(config: DictConfig) -> None:
    """Raise InputError unless the model has a score head with one label. Reads its files."""
    if uses_reward_model(config) and not is_only_described(reward_model_config(config)):
        check_is_reward_model(KEY, config.reward.model.path)


def load_chat(config: DictConfig) -> ChatTokenizer:
    """Return the reward model's own tokenizer and chat template.

    Args:
        config: the run's.
    """
    settings = reward_model_config(config)
    try:
        tokenizer = load_tokenizer(settings)
    except InputError as error:
        raise InputError(str(error).replace("model.path=", f"{KEY}=", 1)) from None
    return ChatTokenizer.load(tokenizer, Path(settings.model.path))


def check_conversations(
    config: DictConfig, datasets: Iterable[PromptDataset], num_tokens: int
) -> None:
    """Raise InputError if the reward model cannot read the first prompts with a response.

    Rank 0 prints what its chat template leaves out of them.

    Args:
        num_tokens: the rows of its embedding.
    """
    chat = load_chat(config)
    options = plain_options(config.data)
    setting = f"{KEY}={config.reward.model.path}"
    for dataset in datasets:
        try:
            (ids,) = encode_answered([dataset[0].row], ["1"], chat, options)
        except InputError as error:
            raise InputError(f"{setting}: {error}") from None
        unseen = find_unseen(dataset[0].row, "1", chat, options)
        if unseen and dist.get_rank() == 0:
            print(
                f"warning: {setting}: its chat template leaves out {' and '.join(unseen)} of the "
                "first row, so the reward model does not see them",
                flush=True,
            )
        if max(ids) >= num_tokens:
            raise InputError(
                f"{setting} has an embedding of {num_tokens} tokens, and its tokenizer writes the "
                f"token {chat.decode([max(ids)])!r} ({max(ids)}): use the tokenizer that belongs "
                "to the model"
            )
