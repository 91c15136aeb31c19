"""Choose the checkpoint that a run continues from, and check that it fits the run."""

from pathlib import Path
from typing import Any

from config import InputError
from job.progress import Progress

# Settings in a run's identity that trainer.resume_override may name. The rest shape the weights.
OVERRIDABLE = (
    "data.train_batch_size",
    "data.train_files",
    "data.shuffle",
    "data.weights",
    "data.sampler",
    "trainer.seed",
    "rollout.n",
    "algorithm.adv_estimator",
)

# The fingerprint of model.path while it is the reference of train_ppo.py. It is compared only if
# both runs have it: a run may start or stop using a reference, or name another one.
IDENTITY_OF_REFERENCE = "the reference in model.path"


def find_resume(config, latest: Path | None, fresh: Progress, total_steps: int) -> Path | None:
    """Return the checkpoint to continue from, or None.

    Args:
        latest: the newest checkpoint of this run, or None.
        fresh: the progress of this run before its first step.

    Raises InputError if the checkpoint does not fit this run: its identity must equal
    fresh.identity, except for the keys in trainer.resume_override.
    """
    check_override_keys(config, fresh)
    path = choose_checkpoint(config, latest)
    if path is None:
        return None
    saved = type(fresh).load(path)
    check_adapter_path(config, path, saved)
    has_changed = check_identity(config, path, saved, fresh)
    is_beyond_end = saved.step > total_steps and not config.trainer.get("val_only")
    if is_beyond_end or (has_changed and saved.step >= total_steps):
        raise InputError(
            f"{path} was saved after step {saved.step}, but this run has only {total_steps} steps: "
            "raise trainer.total_epochs or set trainer.total_steps"
        )
    return path


def overridable(fresh: Progress) -> list[str]:
    """Return the settings of this run that trainer.resume_override may name."""
    return [key for key in OVERRIDABLE if key in fresh.identity]


def check_override_keys(config, fresh: Progress) -> None:
    """Raise InputError if trainer.resume_override names a key that cannot change."""
    allowed = overridable(fresh)
    for key in config.trainer.resume_override:
        if key not in allowed:
            raise InputError(
                f"trainer.resume_override names {key}: only {', '.join(allowed)} can change "
                "during a run"
            )


def choose_checkpoint(config, latest: Path | None) -> Path | None:
    """Return the checkpoint that trainer.resume selects, or None for a new run."""
    resume = config.trainer.resume
    if latest is not None and resume == "never":
        raise InputError(
            f"trainer.resume=never, but {latest} exists: set trainer.resume=auto to continue from "
            "it, or another output_dir to keep it"
        )
    names_path = resume not in ("auto", "never")
    path = latest
    if path is None and names_path:
        path = Path(resume)
    if path is None:
        if config.trainer.resume_override:
            raise InputError(
                "trainer.resume_override is set, but there is no checkpoint to continue from: set "
                "trainer.resume to the path of one"
            )
        return None
    if names_path:
        check_named_checkpoint(Path(resume), latest)
    return path


def check_named_checkpoint(path: Path, latest: Path | None) -> None:
    """Raise InputError if trainer.resume names no checkpoint, or an earlier one of this run.

    A checkpoint of another run is only for the start: from then on, the same command continues from
    `latest`.
    """
    if not (path / "trainer.json").is_file():
        raise InputError(
            f"trainer.resume={path} is neither auto, never, nor a checkpoint directory"
            f"{checkpoint_hint(path)}"
        )
    if latest is not None and is_other_checkpoint_of_run(path, latest):
        raise InputError(
            f"trainer.resume={path}, but output_dir has a newer checkpoint, {latest}: set "
            "trainer.resume=auto to continue from that one, or another output_dir to keep both"
        )


def is_other_checkpoint_of_run(path: Path, latest: Path) -> bool:
    """Return whether a checkpoint lies next to the latest one."""
    path = path.resolve()
    latest = latest.resolve()
    return path.parent == latest.parent and path != latest


def checkpoint_hint(path: Path) -> str:
    """Return "; did you mean ...?" with the newest checkpoint of the run at this path, or ""."""
    from engines.checkpoint.checkpointer import newest_checkpoint

    newest = newest_checkpoint(path)
    return f"; did you mean {newest}?" if newest else ""


def check_adapter_path(config, path: Path, saved: Progress) -> None:
    """Raise InputError if model.lora.adapter_path is set and differs from the checkpoint's."""
    adapter_path = config.model.lora.adapter_path
    if adapter_path and adapter_path != (saved.lora or {}).get("adapter_path"):
        raise InputError(
            f"model.lora.adapter_path={adapter_path} is only for the start of a run, but {path} "
            "already has adapters: leave it out, or start a new run in another output_dir"
        )


def check_identity(config, path: Path, saved: Progress, fresh: Progress) -> bool:
    """Return whether any setting has changed since the checkpoint was written.

    Raises InputError for a change that trainer.resume_override does not allow.
    """
    old = compared_settings(config, saved)
    new = compared_settings(config, fresh)
    ignored = {IDENTITY_OF_REFERENCE} - old.keys()
    changed = [key for key, value in new.items() if key not in ignored and old.get(key) != value]
    if IDENTITY_OF_REFERENCE in changed:
        raise InputError(
            f"model.path is the reference, and its weights have changed since {path} was written: "
            "restore them, name other weights in reference.path, or start a new run in another "
            "output_dir"
        )
    for key in changed:
        change = describe_change(key, old.get(key), new[key])
        name = "it"
        settings = describe_tokenization(saved, fresh) if key == "data.train_files" else ""
        if settings:
            change = settings
            name = key
        change = f"{path} was written with {change}"
        if key not in config.trainer.resume_override:
            override = ""
            if key in overridable(fresh):
                override = f"name {name} in trainer.resume_override, "
            raise InputError(
                f"{change}: set it back, {override}or start a new run in another output_dir"
            )
        print(f"{change}, as trainer.resume_override allows", flush=True)
    return bool(changed)


def describe_change(key: str, old: Any, new: Any) -> str:
    return f"{key}={old}, now it is {new}"


def describe_tokenization(saved: Progress, fresh: Progress) -> str:
    """Return the settings that changed the tokens of the rows, with their values.

    Returns "" if there are none: the contents of the files or the tokenizer have changed.
    """
    old = saved.tokenization or {}
    new = fresh.tokenization or {}
    changed = [key for key in old.keys() & new.keys() if old[key] != new[key]]
    return ", and ".join(describe_change(key, old[key], new[key]) for key in sorted(changed))


def compared_settings(config, progress: Progress) -> dict[str, Any]:
    """Return the settings of a run that must match when it resumes."""
    if config.model_engine != "megatron":
        return progress.identity
    # With Megatron, the dtype of the weights and the existence of fp32 masters depend on these.
    return progress.identity | {
        "engine.compute_dtype": progress.export_dtype,
        "model.lora.dtype": (progress.lora or {}).get("dtype"),
    }
