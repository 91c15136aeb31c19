"""The reference model: a frozen engine, or the trained model without its adapters."""

from contextlib import nullcontext
from pathlib import Path

from omegaconf import DictConfig
from torch import Tensor

from configs.errors import errors_about_model
from data.batching.batch import Batch
from data.batching.plan import MicroBatches
from engines.base import Engine
from engines.build import engine_class
from engines.model.model_files import fingerprint, is_only_described
from engines.reference import check_same_vocabulary, reference_config
from preferences.losses import PreferenceLoss


def role_configs(config: DictConfig, loss: PreferenceLoss) -> dict[str | None, DictConfig]:
    """Return the configuration of each engine that is on the device while the run trains.

    The trained model has the role None. There is no engine for the reference if the loss reads
    none, if its log-probabilities are cached, or if it is the trained model without adapters.
    """
    roles: dict[str | None, DictConfig] = {None: config}
    if has_own_engine(config, loss) and not config.reference.cache:
        roles["reference"] = reference_config(config)
    return roles


def has_own_engine(config: DictConfig, loss: PreferenceLoss) -> bool:
    """Return whether the reference is a separate model, not the trained one without adapters."""
    return loss.needs_reference and bool(config.reference.path or not config.model.lora.rank)


def check_models(config: DictConfig, loss: PreferenceLoss, world_size: int):
    """Check the models, and return the Hugging Face configuration of the trained one.

    Raises InputError for a model that its engine cannot run, and for a reference with another
    vocabulary.
    """
    check = engine_class(config.model_engine).check
    policy = check(config, world_size)
    if has_own_engine(config, loss):
        key = "reference.path" if config.reference.path else "model.path"
        with errors_about_model(key, reference_config(config).model.path):
            reference = check(reference_config(config), world_size)
        check_same_vocabulary(config, "reference", reference, policy)
    return policy


def identify_loss(config: DictConfig, loss: PreferenceLoss) -> dict[str, str]:
    """Return the settings of the loss that must not change when a run resumes. For rank 0."""
    identity = {"algorithm.loss": loss.name, "the reference": "none"}
    reference = reference_config(config)
    if loss.needs_reference and not is_only_described(reference):
        identity["the reference"] = fingerprint(Path(reference.model.path))
    return identity


def model_stages(config: DictConfig, loss: PreferenceLoss, has_validation: bool) -> list[str]:
    """Return the stages of a step in which a model computes."""
    stages = {
        "compute_kl": loss.needs_kl,
        "ref_compute_log_prob": loss.needs_reference and not config.reference.cache,
        "train_batch": True,
        "validate": has_validation,
    }
    return [stage for stage, computes in stages.items() if computes]


class Reference:
    """Computes the reference's log-probabilities with an engine.

    engine            the frozen engine, or the trained one
    without_adapters  whether the engine's adapters are disabled in these passes
    """

    def __init__(self, engine: Engine, without_adapters: bool):
        self.engine = engine
        self.without_adapters = without_adapters

    def log_probs(self, batch: Batch, micro_batches: MicroBatches) -> Tensor:
        """Return the log-probability of each token of a share: [T] fp32 on the host."""
        is_disabled = self.engine.without_adapters() if self.without_adapters else nullcontext()
        with is_disabled:
            return self.engine.log_probs(batch, micro_batches)[0].cpu()
