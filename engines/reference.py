"""The configuration of a frozen reference model."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from config import InputError, defaults
from engines.model.experts import with_own_experts


def reference_config(config: DictConfig) -> DictConfig:
    """Return the reference's configuration: a model without adapters, MTP layers or freezing."""
    model = {
        "path": config.reference.path or config.model.path,
        "freeze": [],
        "lora": defaults("model.lora"),
        "mtp": defaults("model.mtp"),
    }
    return with_own_experts(OmegaConf.merge(config, {"model": model}))


def check_same_vocabulary(config: DictConfig, role: str, hf_config: Any, policy: Any) -> None:
    """Raise InputError if the vocabulary of a role's model differs from the trained model's.

    Args:
        hf_config, policy: the Hugging Face configurations of both.
    """
    if hf_config.vocab_size != policy.vocab_size:
        raise InputError(
            f"{role}.path={config[role].path} has a vocabulary of {hf_config.vocab_size} "
            f"tokens, but model.path={config.model.path} has one of {policy.vocab_size}: choose "
            "models with the same vocabulary"
        )
