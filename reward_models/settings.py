"""Checks of train_rm.py, before weights are loaded."""

import torch.distributed as dist
from omegaconf import DictConfig

from config import InputError
from data.reward_dataset import RewardDataset
from engines.build import engine_class
from engines.context_parallel import sequence_limit
from engines.heads import Head
from engines.model.classifier import PADDING_ADVICE, check_trainable
from engines.model.hf import build_on_meta, read_hf_config
from reward_models.losses import RewardLoss

ROLE = "trained reward model"  # its name in plans of memory


def check_settings(config: DictConfig) -> RewardLoss:
    """Return the loss. Raises InputError for settings that contradict each other or do nothing."""
    loss = RewardLoss.of(config)
    if config.model.images:
        raise InputError(
            "model.images=true does not work with train_rm.py: set model.images=false, and "
            "give a text model"
        )
    if config.model.mtp.enable or config.model.mtp.enable_train:
        raise InputError(
            "model.mtp.enable=true does not work with train_rm.py, since a reward model predicts "
            "no tokens: set model.mtp.enable=false and model.mtp.enable_train=false"
        )
    return loss


def check_model(config: DictConfig, world_size: int):
    """Check the model, and return its Hugging Face configuration.

    Raises InputError for a model that its engine cannot run, and for one whose classifier
    transformers does not have.
    """
    import torch  # imported here because it is slow

    checked = engine_class(config.model_engine).check(config, world_size, Head.VALUES)
    hf_config = read_hf_config(config.model.path)
    check_trainable(hf_config, build_on_meta(hf_config, torch.float32, Head.VALUES))
    return checked


def check_rows(loss: RewardLoss, datasets: dict[str, RewardDataset]) -> None:
    """Raise InputError if a data set has rows that the loss cannot learn from.

    Args:
        datasets: by the configuration key of their files.
    """
    for key, dataset in datasets.items():
        num_single = len(dataset) - dataset.num_pairs
        if loss.takes_pairs and num_single:
            raise InputError(
                f"{num_single} of {len(dataset)} rows of {key} are answers with a score, and "
                f"algorithm.loss={loss.name} learns from pairs: set algorithm.loss=regression, or "
                "give rows with a chosen and a rejected answer"
            )
        if not loss.takes_pairs and dataset.num_pairs:
            raise InputError(
                f"{dataset.num_pairs} of {len(dataset)} rows of {key} are pairs, and "
                f"algorithm.loss={loss.name} learns from answers with a score: set "
                "algorithm.loss=bradley_terry, or give rows with a score"
            )
        if dataset.num_margins and "margins" not in loss.reads:
            raise InputError(
                f"{dataset.num_margins} of {len(dataset)} rows of {key} have a margin, which "
                f"algorithm.loss={loss.name} does not read: set data.margin_key=null to ignore it"
            )


def check_lengths(
    config: DictConfig, loss: RewardLoss, dataset: RewardDataset, world_size: int
) -> None:
    """Raise InputError if a pair, which stays in one micro-batch, does not fit into one.

    Each conversation has one more token, see RewardDataset.batch().
    """
    lengths = dataset.answer_lengths
    if not loss.takes_pairs:
        num_tokens = lengths.max() + 1
        unit = "an answer with its prompt, and a token for its score, has"
    elif config.engine.use_remove_padding:
        num_tokens = lengths.sum(1).max() + 2
        unit = "a pair, with a token for each score, has"
    else:
        num_tokens = 2 * (lengths.max() + 1)
        unit = "a pair, with a token for each score and padded to equal lengths, has"
    limit, setting = sequence_limit(config, world_size)
    if num_tokens > limit:
        raise InputError(
            f"{unit} {num_tokens} tokens, more than {setting}: raise it, or lower data.max_length "
            "with data.truncation=left, right or drop"
        )


def choose_padding(config: DictConfig, tokenizer, datasets: list[RewardDataset]) -> int | None:
    """Return the padding token to write into the exported model's configuration.

    transformers reads the score at the last token that is not padding. So the padding token must be
    one with which no conversation ends: the tokenizer's, or else the model's. If both fail, this
    function returns None, and rank 0 prints the consequence.
    """
    last_tokens = set().union(*(dataset.last_tokens() for dataset in datasets))
    hf_config = read_hf_config(config.model.path)
    candidates = (tokenizer.pad_token_id, hf_config.pad_token_id)
    for token in candidates:
        if token is not None and token not in last_tokens:
            return token
    if dist.get_rank() == 0:
        print(
            "the export gets no pad_token_id: transformers reads the score before the padding, but "
            "neither the tokenizer nor the model has a padding token that never ends a row. To use "
            f"the export, {PADDING_ADVICE}",
            flush=True,
        )
    return None
