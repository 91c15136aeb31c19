"""The safetensors files of a model directory."""

import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from omegaconf import DictConfig
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.checksum import checksum
from common.json_files import read_object
from config import InputError


def weight_files(path: Path) -> list[Path]:
    """Return the files listed in the index or, without an index, model.safetensors.

    Other files in the directory are ignored, since they may be variants of the same weights.

    Raises:
        InputError: if a file is missing, the index is damaged, or a name in it points outside the
            directory. Symbolic links may point elsewhere, as in the hub's cache.
    """
    index = path / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise InputError(f"{index} has no weight_map: copy the file of the model again")
        names = set(weight_map.values())
    else:
        names = {"model.safetensors"}
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise InputError(f"{index} names {name}, which is not in the model's directory")
    files = sorted(path / name for name in names)
    for file in files:
        if not file.exists():
            raise InputError(f"model.path={path} lacks {file.name}")
    return files


def check_is_no_adapter(path: Path) -> None:
    """Raise InputError for the directory of a PEFT adapter, which lacks the model's own weights."""
    if (path / "config.json").is_file() or not (path / "adapter_config.json").is_file():
        return
    raise InputError(
        f"model.path={path} is a PEFT adapter, not a complete model: merge it first, for a run of "
        "this repository with python -m engines.checkpoint export OUTPUT_DIR MERGED --merge"
    )


def is_only_described(config: DictConfig) -> bool:
    """Return whether this is a dry run of a model without weights, which config.json describes.

    Such a dry run estimates the memory, but cannot compare the model with its files.
    """
    return config.dry_run and not any(Path(config.model.path).glob("*.safetensors"))


def shapes_in_files(path: Path) -> dict[str, list[int]]:
    """Return the shape of every tensor in the files by name. Only headers are read.

    Raises:
        InputError: if a file is damaged.
    """
    shapes = {}
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    shapes[name] = tensors.get_slice(name).get_shape()
        except SafetensorError as error:
            raise InputError(f"{file} is damaged or incomplete: {error}") from None
    return shapes


def ignored_weights(path: Path, names: dict[str, str | None]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the files, tensor) for the weights that the model does not have.

    Args:
        names: name in the files -> name in the model, as returned by names.model_names().
    """
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                if names[name] is None:
                    yield name, tensors.get_tensor(name)


def fingerprint(path: Path) -> str:
    """Return the CRC-32 of a model's configuration and weights as eight hexadecimal digits."""
    files = [path / "config.json", *weight_files(path)]
    with ThreadPoolExecutor() as pool:
        checksums = " ".join(pool.map(checksum, files))
    return f"{zlib.crc32(checksums.encode()):08x}"
