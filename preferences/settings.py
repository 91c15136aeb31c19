"""Checks of the configuration of train_dpo.py, before anything is loaded."""

from omegaconf import DictConfig

from config import InputError
from data.preference_dataset import PreferenceDataset
from engines.context_parallel import sequence_limit
from preferences.losses import PreferenceLoss


def check_settings(config: DictConfig) -> PreferenceLoss:
    """Return the loss. Raises InputError for settings that contradict each other or do nothing."""
    loss = PreferenceLoss.of(config)
    if config.model.images:
        raise InputError(
            "model.images=true does not work with train_dpo.py yet: set model.images=false, which "
            "trains the text model alone"
        )
    if config.model.mtp.enable_train:
        raise InputError(
            "model.mtp.enable_train=true does not work with train_dpo.py: the loss of the MTP "
            "layers would also learn the rejected answers. Set it to false"
        )
    for key in ("path", "cache"):
        value = config.reference[key]
        if value and not loss.needs_reference:
            raise InputError(
                f"reference.{key}={value} does nothing with algorithm.loss={loss.name}, which "
                "reads no reference: leave it out"
            )
    if config.reference.cache and loss.needs_kl:
        raise InputError(
            f"reference.cache=true does not work with algorithm.loss={loss.name}, which also needs "
            "the reference's log-probabilities of answers to other prompts, and these differ in "
            "every batch: set reference.cache=false"
        )
    if loss.needs_kl and config.data.train_batch_size < 2:
        raise InputError(
            f"algorithm.loss={loss.name} compares answers with answers of other rows: set "
            "data.train_batch_size to at least 2"
        )
    return loss


def check_rows(config: DictConfig, loss: PreferenceLoss, datasets: dict) -> None:
    """Raise InputError if a data set has rows that the loss cannot learn from.

    Args:
        datasets: PreferenceDatasets by the configuration key of their files.
    """
    for key, dataset in datasets.items():
        if loss.needs_kl and len(dataset) < 2:
            raise InputError(
                f"{key} has one row, and algorithm.loss={loss.name} compares answers with answers "
                "of other rows: give at least 2 rows"
            )
        num_single = len(dataset) - dataset.num_pairs
        if loss.takes_pairs and num_single:
            raise InputError(
                f"{num_single} of {len(dataset)} rows of {key} are answers with a label, and "
                f"algorithm.loss={loss.name} learns from pairs: set algorithm.loss=kto, or give "
                "rows with a chosen and a rejected answer"
            )


def check_lengths(
    config: DictConfig, loss: PreferenceLoss, dataset: PreferenceDataset, world_size: int
) -> None:
    """Raise InputError if a pair, which stays in one micro-batch, does not fit into one.

    For a loss with a KL baseline, this includes every prompt with the answer to another one.
    """
    lengths = dataset.answer_lengths
    if loss.needs_kl:
        num_tokens = min(sum(dataset.longest_parts()), config.data.max_length)
        unit = "the longest prompt with the longest answer (algorithm.loss=kto combines them) has"
    elif not loss.takes_pairs:
        num_tokens = lengths.max()
        unit = "an answer with its prompt has"
    elif config.engine.use_remove_padding:
        num_tokens = lengths.sum(1).max()
        unit = "a pair has"
    else:
        num_tokens = 2 * lengths.max()
        unit = "a pair, padded to equal lengths, has"
    limit, setting = sequence_limit(config, world_size)
    if num_tokens > limit:
        raise InputError(
            f"{unit} {num_tokens} tokens, more than {setting}: raise it, or lower data.max_length "
            "with data.truncation=left, right or drop"
        )
