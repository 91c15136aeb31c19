"""Write Hugging Face models and PEFT adapters, from an engine or from a checkpoint."""

import itertools
import json
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from common import disk
from config import InputError
from engines.base import Engine
from engines.checkpoint import storage
from engines.checkpoint.checkpointer import removed_on_failure
from engines.checkpoint.model_config import SIDE_FILES
from engines.heads import Head
from engines.model import lora
from engines.model.classifier import SCORE, VALUE_HEADS, as_classifier
from engines.model.model_files import fingerprint, ignored_weights, weight_files
from engines.model.names import model_names, split_stacks, stacked
from engines.parallel.device import on_rank0

MAX_FILE_BYTES = 4 * 2**30


# -- from an engine --------------------------------------------------------------------------------


def export_hf(engine: Engine, tokenizer, directory: Path, base_name: str | None = None) -> None:
    """Write an engine's model in the format of transformers, PEFT and vLLM.

    The result is a model directory or, if the engine has adapters, a PEFT adapter. An existing
    `directory` is replaced once the new one is complete. All ranks call this together.

    Args:
        base_name: the directory or hub name of the frozen model, for an adapter's
            adapter_config.json; None: the directory in model.path.
    """
    base_name = base_name or str(Path(engine.config.model.path).absolute())
    temporary = directory.with_name(directory.name + ".tmp")
    weights = exported_weights(engine)

    def write_on_rank0() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            write_export(engine, tokenizer, weights, temporary, base_name)
        finally:
            # The other ranks take part in gathering every tensor, so rank 0 must do so even if it
            # failed to write one.
            exhaust(weights)
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)

    with removed_on_failure(temporary):
        if dist.get_rank() > 0:
            exhaust(weights)
        on_rank0(write_on_rank0, group=dist.group.WORLD)


def exported_weights(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the files, tensor) of an engine's model or, if there are any, its adapters.

    A value head is named as in a sequence classifier.
    """
    has_adapters = engine.config.model.lora.rank > 0
    if not engine.is_classifier:
        return engine.export_adapter() if has_adapters else engine.export_weights()
    if has_adapters:
        return as_classifier(engine.export_adapter())
    return as_classifier(engine.export_weights(include_unused=False))


def write_export(
    engine: Engine,
    tokenizer,
    weights: Iterable[tuple[str, Tensor]],
    directory: Path,
    base_name: str,
) -> None:
    """Write the tokenizer and, with it, either the adapters or config.json and all weights."""
    model = engine.config.model
    with disk.writing(directory):
        directory.mkdir(parents=True)
        tokenizer.save_pretrained(directory)
        if model.lora.rank:
            lora.write(weights, model.lora, base_name, directory, engine.has_unused_weights)
            return
        engine.save_config(directory)
    write_safetensors(weights, directory)


def exhaust(iterator: Iterable) -> None:
    """Consume an iterator without keeping its items."""
    deque(iterator, maxlen=0)


# -- safetensors files -----------------------------------------------------------------------------


def write_safetensors(
    weights: Iterable[tuple[str, Tensor]], directory: Path, max_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write model.safetensors or, if it would exceed max_bytes, several files and an index.

    Several files are named model-0000i-of-0000n.safetensors. No more than one file's tensors are in
    memory at a time.
    """
    writer = SafetensorsWriter(directory)
    for name, tensor in weights:
        num_bytes = tensor.numel() * tensor.element_size()
        if writer.tensors and writer.num_bytes + num_bytes > max_bytes:
            writer.close_file()
        writer.add(name, tensor)
    writer.close_file()
    writer.name_files()


class SafetensorsWriter:
    """Writes files part-0, part-1..., and renames them once their number is known."""

    def __init__(self, directory: Path):
        self.directory = directory
        # The open file: its tensors and their size.
        self.tensors: dict[str, Tensor] = {}
        self.num_bytes = 0
        # For each closed file, the names of its tensors.
        self.closed_files: list[list[str]] = []
        # The size of all tensors so far, including those in the open file.
        self.total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        num_bytes = tensor.numel() * tensor.element_size()
        self.tensors[name] = tensor.cpu().contiguous()
        self.num_bytes += num_bytes
        self.total_bytes += num_bytes

    def close_file(self) -> None:
        """Write the open file. The next tensor starts a new one."""
        file = self.directory / f"part-{len(self.closed_files)}"
        with disk.writing(self.directory, self.num_bytes):
            save_file(self.tensors, file, metadata={"format": "pt"})
        self.closed_files.append(list(self.tensors))
        self.tensors.clear()
        self.num_bytes = 0

    def name_files(self) -> None:
        """Give the files the names that transformers expects; index them if there are several."""
        num_files = len(self.closed_files)
        if num_files == 1:
            (self.directory / "part-0").rename(self.directory / "model.safetensors")
            return
        weight_map = {}
        for number, names in enumerate(self.closed_files):
            file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
            (self.directory / f"part-{number}").rename(self.directory / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        index_file = self.directory / "model.safetensors.index.json"
        index_file.write_text(json.dumps(index, indent=1))


# -- from a checkpoint -----------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredModel:
    """The model in a checkpoint, as described by its trainer.json."""

    checkpoint: Path
    # The dtype of exported weights.
    dtype: torch.dtype
    # The run's settings for adapters, plus the directory of the frozen model under "base" and its
    # name under "base_name". None if the run has no adapters.
    adapter: DictConfig | None
    # Checksum of the frozen model, if there are adapters.
    base_fingerprint: str | None
    # The model directory with the weights that the engine did not use, such as a vision tower. None
    # if the engine used all weights.
    rest: Path | None
    # Whether it is a reward model, with a value head.
    is_classifier: bool = False

    @classmethod
    def of(cls, checkpoint: Path, progress: dict) -> "StoredModel":
        """Return the description of a checkpoint. progress: the contents of its trainer.json."""
        adapter = progress.get("lora")
        rest = progress.get("rest")
        is_classifier = progress.get("is_classifier", False)
        if is_classifier:
            rest = None
        return cls(
            checkpoint,
            dtype=getattr(torch, progress["export_dtype"]),
            adapter=OmegaConf.create(adapter) if adapter else None,
            base_fingerprint=progress.get("run", {}).get("frozen weights"),
            rest=Path(rest) if rest else None,
            is_classifier=is_classifier,
        )

    @property
    def base(self) -> Path:
        return Path(self.adapter.base)

    @property
    def base_name(self) -> str:
        """The directory or hub name of the frozen model. Older checkpoints have only the former."""
        return self.adapter.get("base_name", self.adapter.base)


def export_checkpoint(checkpoint: Path, out: Path, merge: bool = False) -> None:
    """Export a checkpoint to Hugging Face format, tensor by tensor, without a process group.

    Args:
        out: a directory that does not exist yet. It appears only once it is complete.
        merge: for a run with adapters, add the adapters to the frozen model and write the result,
            instead of the adapters alone.

    Raises:
        InputError: if the checkpoint is damaged, or a model directory that the export needs is
            missing.
    """
    manifest = storage.read_manifest(checkpoint)
    if out.exists():
        raise InputError(f"{out} already exists: remove it, or export to another directory")
    damage = storage.find_damage(checkpoint, manifest.checksums)
    if damage:
        raise InputError(f"{checkpoint} is damaged: {damage[0]}")
    stored = StoredModel.of(checkpoint, manifest.progress)
    if merge:
        check_merge(stored)
    if stored.rest and not stored.adapter and not stored.rest.is_dir():
        raise InputError(
            f"{checkpoint} has only the trained weights. The other weights were in {stored.rest}, "
            "which does not exist: restore that model"
        )

    temporary = out.with_name(out.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with disk.writing(temporary), storage.data_only(checkpoint):
            if stored.adapter and not merge:
                write_stored_adapter(stored, temporary)
            else:
                write_stored_model(stored, temporary, merge)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_merge(stored: StoredModel) -> None:
    """Raise InputError unless there are adapters, and the model they were trained with exists."""
    if not stored.adapter:
        raise InputError(f"--merge: {stored.checkpoint} has no adapters: leave out --merge")
    if not stored.base.is_dir():
        raise InputError(
            f"--merge: the frozen model was in {stored.base}, which does not exist: restore it"
        )
    if fingerprint(stored.base) != stored.base_fingerprint:
        raise InputError(
            f"--merge: the adapters in {stored.checkpoint} were trained with a different "
            f"model from the one that is now in {stored.base}: restore the original model"
        )


def write_stored_adapter(stored: StoredModel, directory: Path) -> None:
    """Write a checkpoint's adapters in PEFT's format, with the tokenizer."""
    model_files = shutil.ignore_patterns("config.json", *SIDE_FILES)
    shutil.copytree(stored.checkpoint / "hf", directory, ignore=model_files)
    weights = stored_weights(stored)
    lora.write(weights, stored.adapter, stored.base_name, directory, stored.rest is not None)


def write_stored_model(stored: StoredModel, directory: Path, merge: bool) -> None:
    """Write a model directory from a checkpoint.

    Args:
        merge: add the checkpoint's adapters to the frozen model.
    """
    shutil.copytree(stored.checkpoint / "hf", directory)
    weights = stored_weights(stored)
    if merge:
        merged = merged_classifier_weights if stored.is_classifier else merged_weights
        weights = merged(stored.base, dict(weights), stored.adapter, stored.dtype)
    else:
        weights = ((name, tensor.to(stored.dtype)) for name, tensor in weights)
    # Buffers keep the dtypes in which they were stored.
    buffers = dict(storage.read_tensors(stored.checkpoint, "engine.buffers.", lambda name: False))
    parameters = ((name, tensor) for name, tensor in weights if name not in buffers)
    untrained = ()
    if stored.rest and not merge:
        untrained = ignored_weights(stored.rest, read_model_names(stored.rest))
    write_safetensors(itertools.chain(parameters, buffers.items(), untrained), directory)


def stored_weights(stored: StoredModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor in its stored dtype) for the exported engine's weights."""
    head = Head.VALUES if stored.is_classifier else Head.LOG_PROBS
    # Only megatron.core.dist_checkpointing writes this file.
    if (stored.checkpoint / "weights" / "metadata.json").exists():
        from engines.megatron.checkpoint_files import hf_weights

        weights = hf_weights(stored.checkpoint, head, has_adapters=stored.adapter is not None)
    else:
        weights = stored_fsdp_weights(stored.checkpoint, head)
    return as_classifier(weights) if stored.is_classifier else weights


def stored_fsdp_weights(checkpoint: Path, head: Head) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor in its stored dtype), except for a tied output matrix."""
    from engines.model.hf import build_on_meta, read_hf_config

    hf_config = read_hf_config(str(checkpoint / "hf"))
    hf = build_on_meta(hf_config, torch.float32, head)
    has_tied_output = hf_config.tie_word_embeddings and head is not Head.VALUES

    def is_tied(name: str) -> bool:
        return has_tied_output and name.endswith("lm_head.weight")

    tensors = storage.read_tensors(checkpoint, "engine.model.", is_tied)
    plainly_named = ((lora.plain_name(name), tensor) for name, tensor in tensors)
    return split_stacks(plainly_named, stacked(hf))


def read_model_names(model: Path) -> dict[str, str | None]:
    """Return model_names() for the model in a directory."""
    from engines.model.hf import build_on_meta, read_hf_config

    return model_names(build_on_meta(read_hf_config(str(model)), torch.float32), model)


def merged_classifier_weights(
    base: Path, adapter: dict[str, Tensor], settings: DictConfig, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Do the same as merged_weights() for a reward model, without weights that it does not use."""
    yield SCORE, adapter.pop(SCORE).to(dtype)
    names = read_model_names(base)
    for name, weight in merged_weights(base, adapter, settings, dtype):
        is_of_base_alone = names[name] is None or name in (SCORE, *VALUE_HEADS)
        if not is_of_base_alone:
            yield name, weight


def merged_weights(
    base: Path, adapter: dict[str, Tensor], settings: DictConfig, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the files, tensor) for the model in `base` with an adapter added.

    Weights that the run used are cast to `dtype`, in which the run computed. Weights that it did
    not use, such as a vision tower, are unchanged.

    Args:
        adapter: the adapter's matrices, named as in engines/model/lora.py.

    Raises:
        InputError: if the adapter has a matrix for a layer that `base` lacks.
    """
    names = read_model_names(base)
    unused = dict(adapter)
    for file in weight_files(base):
        with safe_open(file, framework="pt") as tensors:
            for file_name in tensors.keys():
                weight = tensors.get_tensor(file_name)
                name = names[file_name]
                if name is not None:
                    weight = weight.to(dtype)
                    layer = name.removesuffix("weight")
                    a = unused.pop(f"{layer}lora_A.weight", None)
                    b = unused.pop(f"{layer}lora_B.weight", None)
                    if a is not None and b is not None:
                        weight = lora.merge(weight, a, b, settings)
                yield file_name, weight
    if unused:
        raise InputError(f"--merge: {base} has no weight for {min(unused)}")
