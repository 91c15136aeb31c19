"""The reward model: its configuration and its checks. rl/scoring.py has its part in a step.

A frozen sequence classifier with one label scores each response in its conversation, after vLLM has
gone to sleep. It has a tokenizer and a chat template of its own. Its score is a named part of the
reward, next to the reward function's:

    score = (score of reward.function) + reward.model.weight * (score of the reward model)
"""

from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from config import InputError, defaults
from data.answered import encode_answered, find_unseen, form_of
from data.chat.tokenizer import ChatTokenizer, load_tokenizer
from data.prompts import Prompt, PromptDataset
from data.tokenization import plain_options
from engines.model.classifier import check_is_reward_model
from engines.model.experts import with_own_experts
from engines.model.model_files import is_only_described
from engines.parallel.device import on_rank0
from engines.teaching import without_teacher
from rl.functions import inputs_read

ROLE = "reward model"
KEY = "reward.model.path"
PART = "model"


def uses_reward_model(config: DictConfig) -> bool:
    """Return whether a reward model scores the responses."""
    return config.reward.model.path is not None


def reward_model_config(config: DictConfig) -> DictConfig:
    """Return the reward model's configuration: a model without adapters, MTP layers or freezing."""
    model = {
        "path": config.reward.model.path,
        "freeze": [],
        "lora": defaults("model.lora"),
        "mtp": defaults("model.mtp"),
    }
    data = {"chat_template": None}  # It has its own.
    changes = {"model": model, "data": data}
    return with_own_experts(OmegaConf.merge(without_teacher(config), changes))


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
    config: DictConfig, datasets: Mapping[str, PromptDataset], num_tokens: int
) -> None:
    """Raise InputError if the reward model cannot read a prompt with a response.

    Rank 0 reads all rows. It renders the first one of each form (data.answered.form_of), and those
    with characters that the tokenizer may drop. It prints what the chat template leaves out.
    Called by all ranks.

    Args:
        datasets: by the configuration key of their rows.
        num_tokens: the rows of its embedding.
    """
    on_rank0(read_conversations, config, datasets, num_tokens)


def read_conversations(
    config: DictConfig, datasets: Mapping[str, PromptDataset], num_tokens: int
) -> None:
    """See check_conversations()."""
    chat = load_chat(config)
    options = plain_options(config.data)
    setting = f"{KEY}={config.reward.model.path}"
    warned: set[str] = set()
    for key, dataset in datasets.items():
        forms: set[tuple] = set()
        for index, row in enumerate(dataset.rows):
            place = f"prompt {index + 1} of {key} ({opening(dataset[index])})"
            try:
                form = form_of(row, chat, options)
                if form in forms and not chat.coverage.unknown(str(row)):
                    continue
                forms.add(form)
                (ids,) = encode_answered([row], ["1"], chat, options)
            except InputError as error:
                raise InputError(f"{setting}: {place}: {error}") from None
            if max(ids) >= num_tokens:
                raise InputError(
                    f"{setting} has an embedding of {num_tokens} tokens, and its tokenizer writes "
                    f"the token {chat.decode([max(ids)])!r} ({max(ids)}) for {place}: use the "
                    "tokenizer that belongs to the model"
                )
            unseen = find_unseen(row, "1", chat, options)
            if set(unseen) - warned:
                print(
                    f"warning: {setting}: its chat template leaves out {' and '.join(unseen)} of "
                    f"{place}, so the reward model does not see them",
                    flush=True,
                )
                warned |= set(unseen)


def opening(prompt: Prompt) -> str:
    """Return the beginning of a prompt's question, in quotes, for messages."""
    text = prompt.question or prompt.text
    return repr(text if len(text) <= 40 else f"{text[:40]}...")
