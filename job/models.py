"""Find the models of a run, and load their tokenizer and image processor, but no weights."""

from pathlib import Path

from config import InputError
from configs.environment import is_rank0
from engines.teacher_settings import teacher_paths

TOKENS_AT_ONCE = 1 << 22  # the number of tokens that are searched at a time
# Files to download from the hub: tokenizer, chat template, the model's own code, and its weights.
DESCRIPTION_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.py"]
WEIGHT_FILES = ["*.safetensors"]
# Role -> the key that names its model, except for teachers. A script has only some of these keys.
MODEL_KEYS = {
    "model": "model.path",
    "critic": "critic.path",
    "reference": "reference.path",
    "reward model": "reward.model.path",
}


def with_local_models(config):
    """Return the configuration with a local directory for every model.

    If a path is the name of a model on the hub, the model is downloaded, unless it is cached. A dry
    run needs no weights and downloads none.
    """
    from omegaconf import OmegaConf

    patterns = DESCRIPTION_FILES if config.dry_run else DESCRIPTION_FILES + WEIGHT_FILES
    paths = {key: OmegaConf.select(config, key) for key in MODEL_KEYS.values()}
    paths |= teacher_paths(config)
    changes = OmegaConf.create()
    for key, path in paths.items():
        if path is not None and not Path(path).is_dir():
            OmegaConf.update(changes, key, download(path, key, patterns))
    return OmegaConf.merge(config, changes)


def base_name(config) -> str:
    """Return model.path in a form that other programs can use.

    Args:
        config: the configuration as the user wrote it, not that of with_local_models().

    Returns:
        The absolute path of a directory, or the name of a model on the hub.
    """
    path = Path(config.model.path)
    return str(path.absolute()) if path.is_dir() else config.model.path


def download(name: str, key: str, patterns: list[str]) -> str:
    """Download a model from the hub, and return its directory in the cache.

    Args:
        key: the configuration key that names the model, for error messages.
        patterns: patterns of the files to download.
    """
    from huggingface_hub import snapshot_download

    try:
        is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
        if is_path and not Path(name).exists():
            raise FileNotFoundError("no such directory")
        if Path(name).is_file():
            raise FileNotFoundError("it is a file; give the directory that holds it")
        return snapshot_download(name, allow_patterns=patterns)
    except (OSError, ValueError, RuntimeError) as error:  # the hub raises errors of these types
        reason = str(error).splitlines()[0]
        raise InputError(
            f"{key}={name} is neither a directory nor a model on the hub: {reason}; correct the "
            "name, or give the directory of a copy that you have downloaded"
        ) from None


def load_processor(config, tokenizer):
    """Return the data.images.processor.Processor of model.path, or None if model.images is false.

    Raises InputError if the critic, reference or teacher, which receive the actor's tokens, process
    images differently from the actor.
    """
    dropped_keys = config.data.drop_processor_keys
    if not config.model.images:
        if dropped_keys:
            raise InputError(
                "data.drop_processor_keys has no effect with model.images=false: set "
                "model.images=true"
            )
        return None
    from omegaconf import OmegaConf

    from data.images import processor as images

    processor = images.load_processor(config, tokenizer)
    keys = [MODEL_KEYS[role] for role in ("critic", "reference")]
    paths = {key: OmegaConf.select(config, key) for key in keys} | teacher_paths(config)
    for key, path in paths.items():
        if not path or path == config.model.path:
            continue
        if not processor.is_equivalent(images.Processor(path, dropped=dropped_keys)):
            raise InputError(
                f"{key}={path} processes images differently from "
                f"model.path={config.model.path}: give both the same processor"
            )
    return processor


def report_unused_mtp(config, hf_config) -> None:
    """Report on rank 0 that the model's layers for multi-token prediction are not used."""
    from engines.model import mtp

    number = mtp.num_layers(hf_config)
    if number and not mtp.is_trained(config) and is_rank0():
        layers = "layer" if number == 1 else "layers"
        print(
            f"the model is built without its {number} MTP {layers} (model.mtp.enable_train=false): "
            "exports copy them unchanged from the files of model.path",
            flush=True,
        )


def check_token_ids(config, hf_config, tokenizer, datasets: dict) -> None:
    """Raise InputError if rows contain a token for which the model has no embedding.

    Called by all ranks.

    Args:
        hf_config: the configuration of the text model.
        datasets: the configuration key of the files -> their TokenDataset or PromptDataset.
    """
    from engines.parallel.device import on_rank0

    if max(tokenizer.get_vocab().values()) >= hf_config.vocab_size:
        on_rank0(find_unknown_token, config, hf_config.vocab_size, tokenizer, datasets)


def find_unknown_token(config, vocab_size: int, tokenizer, datasets: dict) -> None:
    """Do the same as check_token_ids(), on rank 0, for a tokenizer that has such tokens."""
    for key, dataset in datasets.items():
        for start in range(0, len(dataset.input_ids), TOKENS_AT_ONCE):
            largest = int(dataset.input_ids[start : start + TOKENS_AT_ONCE].max())
            if largest >= vocab_size:
                token = tokenizer.convert_ids_to_tokens(largest)
                raise InputError(
                    f"{key} has rows with the token {token} ({largest}), but the embedding of "
                    f"model.path={config.model.path} has only {vocab_size} rows: use the tokenizer "
                    "that belongs to the model, or add rows with resize_token_embeddings() of "
                    "transformers"
                )


def warn_of_length(hf_config, longest: int) -> None:
    """Warn on rank 0 if the longest row, of `longest` tokens, exceeds the model's context."""
    import torch.distributed as dist

    limit = getattr(hf_config, "max_position_embeddings", None)
    if limit is not None and longest > limit and dist.get_rank() == 0:
        print(
            f"warning: a row has {longest:,} tokens, more than the model's "
            f"max_position_embeddings={limit:,}: lower data.max_length unless the model is meant "
            "to learn longer positions",
            flush=True,
        )
