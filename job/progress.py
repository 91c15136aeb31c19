"""The progress of a run and the settings that identify it, kept in a checkpoint's trainer.json."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

# Settings that earlier versions did not record, with the only values that they supported.
IMPLIED_BY_OLD_CHECKPOINTS = {
    "optim.name": "adamw",
    "optim.state_dtype": "16 or 32 bits",
    "model.lora": "none",
    "model.mtp.enable_train": False,
    "model.freeze": [],
    "data.shuffle": True,
    "data.weights": "none",
    "data.sampler": "none",
    "rollout.partial.enable": False,
}


@dataclass(kw_only=True)
class Progress:
    """The part of a run's state that is not a tensor. Each script adds its own counters.

    Attributes:
        identity: settings that must not change when a run resumes, by their names in error
            messages. See `identify()`.
        tokenization: the settings on which the tokens of the rows depend, by their keys. They are
            part of the identity, as a hash; these values explain a difference. None in checkpoints
            of earlier versions.
        export_dtype: dtype of exported weights, such as "bfloat16".
        lora: the adapter settings that an export needs; None without adapters.
        step: number of completed steps.
    """

    identity: dict[str, Any]
    tokenization: dict[str, Any] | None = None
    export_dtype: str | None = None
    lora: dict[str, Any] | None = None
    step: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the content of trainer.json, where `identity` is called "run"."""
        values = asdict(self)
        values["run"] = values.pop("identity")
        return values

    @classmethod
    def load(cls, checkpoint: Path) -> Self:
        """Read a checkpoint that this version or an earlier one wrote.

        Raises InputError if trainer.json is damaged.
        """
        from engines.checkpoint.storage import read_manifest

        saved = read_manifest(checkpoint).progress
        identity = IMPLIED_BY_OLD_CHECKPOINTS | saved["run"]
        identity.setdefault("critic", identity.get("algorithm.adv_estimator") == "gae")
        progress = cls(identity=identity)
        progress.tokenization = saved.get("tokenization")
        progress.export_dtype = saved.get("export_dtype")
        progress.lora = saved.get("lora")
        progress.take_counters(saved)
        return progress

    def take_counters(self, saved: dict[str, Any]) -> None:
        """Continue counting where a checkpoint ended.

        Identity, tokenization, export dtype and adapters keep this run's values. A counter that the
        checkpoint lacks, because an earlier version wrote it, keeps its value.

        Args:
            saved: the content of the checkpoint's trainer.json.
        """
        own = ("identity", "tokenization", "export_dtype", "lora")
        for name in vars(self):
            if name in saved and name not in own:
                setattr(self, name, saved[name])


def identify(config, hf_config, train) -> dict[str, Any]:
    """Return the settings that must not change when a run resumes.

    They determine the rows of every step and the shapes of the weights. With adapters, they include
    a fingerprint of the frozen weights, which are not part of a checkpoint, unless a dry run has no
    weights. Called by all ranks; rank 0 reads the files.
    """
    from engines.model import mtp

    identity = {
        "model.lora": "none",
        "model.mtp.enable_train": mtp.is_trained(config),
        "model.freeze": list(config.model.freeze),
    }
    if config.model.lora.rank:
        identity |= identify_adapters(config)
    num_layers = hf_config.num_hidden_layers
    return identity | {
        "model_engine": config.model_engine,
        "data.train_batch_size": config.data.train_batch_size,
        "trainer.seed": config.trainer.seed,
        "optim.name": config.optim.name,
        "optim.state_dtype": "int8" if config.optim.state_dtype == "int8" else "16 or 32 bits",
        "data.train_files": f"{train.name[:16]} (a hash of data, tokenizer and their options)",
        "the model": f"{hf_config.model_type} of {num_layers} layers of {hf_config.hidden_size}",
    }


def identify_tokens(config, options: Sequence[str]) -> dict[str, Any]:
    """Return the settings on which the tokens of the training rows depend, by their keys.

    Args:
        options: the keys of `data` on which the tokens of a row depend.
    """
    from omegaconf import OmegaConf

    data = OmegaConf.to_container(config.data)
    names = ("train_files", *options, "chat_template", "val_size", "train_max_samples")
    return {f"data.{name}": data[name] for name in names}


def identify_adapters(config) -> dict[str, Any]:
    """Return the adapter settings, and fingerprints of the frozen weights."""
    from engines.model.model_files import fingerprint, is_only_described
    from engines.parallel.device import on_rank0

    lora = config.model.lora
    identity = {
        "model.lora": f"rank {lora.rank}, alpha {lora.alpha}, on {lora.target_modules} without "
        f"{lora.exclude_modules}",
    }
    if is_only_described(config):
        return identity
    identity["frozen weights"] = on_rank0(fingerprint, Path(config.model.path))
    if "critic" in config and config.critic.path:
        identity["frozen weights of the critic"] = on_rank0(fingerprint, Path(config.critic.path))
    return identity


def adapter(config, base_name: str) -> dict[str, Any] | None:
    """Return the adapter settings that an export needs, or None without adapters.

    Args:
        base_name: the directory or hub name of the frozen model, for adapter_config.json.
    """
    from omegaconf import OmegaConf

    if not config.model.lora.rank:
        return None
    base = str(Path(config.model.path).absolute())
    return OmegaConf.to_container(config.model.lora) | {"base": base, "base_name": base_name}
