"""Checkpoints (torch.distributed.checkpoint) and export to Hugging Face format."""

import itertools
import json
import re
import shutil
from collections import ChainMap, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from common import disk
from config import InputError
from engines.base import SIDE_FILES, Engine
from engines.checkpoint import storage
from engines.model import lora
from engines.model.weights import (
    fingerprint,
    ignored_weights,
    in_files,
    model_names,
    stacked,
    weight_files,
)
from engines.parallel.device import on_rank0

MAX_FILE_BYTES = 4 * 2**30


class Checkpointer:
    """{directory}/step_00000010/: the engine's sharded state, hf/ (config and tokenizer), and trainer.json.

    A checkpoint is written as step_*.tmp and renamed once all ranks' files are on the disk, so every step_* directory is
    complete whenever the process dies. `latest` names the newest one for people and scripts. All ranks call find, save, wait
    and load together. A full disk is an InputError on all of them, and earlier checkpoints stay.
    """

    def __init__(self, directory: Path, max_checkpoints: int, asynchronous: bool):
        self.directory, self.max_checkpoints, self.asynchronous = (
            directory,
            max_checkpoints,
            asynchronous,
        )
        # Background writes talk to other ranks while training does: they need a group of their own.
        self.group = dist.new_group(backend="gloo")
        self.background, self.pending = ThreadPoolExecutor(max_workers=1), None

    def latest(self) -> Path | None:
        return next(reversed(checkpoints(self.directory)), None)

    def find(self, resume: str, dry_run: bool = False) -> Path | None:
        """The newest intact checkpoint in the directory or, if it has none at all, the one whose path `resume` is. All ranks
        share the reading. Damaged ones are reported and, except in a dry run, renamed to *.damaged. Raises InputError if the one
        that `resume` names is damaged, or all of them are."""
        if resume == "never":
            return self.latest()
        paths, damage = on_rank0(self._candidates, resume, group=self.group), {}
        for path in paths:
            try:
                checksums = on_rank0(storage.read_trainer, path, group=self.group)[1]
                found = self._gather(
                    storage.find_damage(path, checksums, dist.get_rank(), dist.get_world_size())
                )
                if not any(found):
                    break
                damage[path] = f"{path} is damaged: {next(itertools.chain(*found))}"
            except InputError as error:
                damage[path] = str(error)
        else:
            path = None
        if damage and (path is None or path.parent != self.directory):
            raise InputError(
                f"{damage[paths[0]]}; {path or 'no other checkpoint beside it'} is intact"
            )
        on_rank0(self._set_aside, damage, path, dry_run, group=self.group)
        return path

    def _candidates(self, resume: str) -> list[Path]:
        """Checkpoints in the order in which to try them."""
        named = Path(resume)
        others = [path for path in checkpoints(named.parent)[::-1] if path != named]
        return checkpoints(self.directory)[::-1] or (
            [named, *others] if (named / "trainer.json").is_file() else []
        )

    def _set_aside(self, damage: dict[Path, str], intact: Path, dry_run: bool) -> None:
        for path, text in damage.items():
            if dry_run:
                print(f"{text}; the run would go on from {intact}", flush=True)
                continue
            names = (path.with_name(f"{path.name}.damaged{i or ''}") for i in itertools.count())
            aside = path.rename(next(name for name in names if not name.exists()))
            self._point_to(intact)
            print(f"{text}; it is {aside.name} now, and the run goes on from {intact}", flush=True)

    def save(self, step: int, engine: Engine, progress: dict, tokenizer, **others: Engine) -> None:
        """Write step_{step}; progress is what the script needs to go on, others are engines besides the one that is
        exported, e.g. critic=... An export takes weights that the engine leaves alone from progress["rest"], a directory."""
        self.wait()
        target = self.directory / f"step_{step:08d}"
        temporary = target.with_suffix(".tmp")
        with removed_if_it_fails(temporary):
            on_rank0(self._begin, temporary, engine, tokenizer, group=self.group)
            state = {name: e.state() for name, e in {"engine": engine, **others}.items()}
            state["rng"] = {f"rank_{dist.get_rank()}": rng_state()}
            writing = engine.write(
                state, temporary / "weights", self.group if self.asynchronous else None
            )
        rest = (
            {"rest": str(Path(engine.config.model.path).absolute())} if engine.leaves_alone else {}
        )
        arguments = temporary, target, progress | rest, writing
        if writing is None:
            self._complete(*arguments)
        else:
            self.pending = self.background.submit(self._complete, *arguments)

    def wait(self) -> None:
        """Wait until a background write has ended and is published; raise what it raised."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def load(self, path: Path, engine: Engine, **others: Engine) -> dict:
        """Read a checkpoint of any world size into the engines; return its progress. Raises InputError if it holds more than
        data."""
        engines = {"engine": engine, **others}
        state = {name: e.state(loading=True) for name, e in engines.items()}
        with storage.data_alone(path):
            rng, stored = (
                f"rank_{dist.get_rank()}",
                FileSystemReader(path / "weights").read_metadata().state_dict_metadata,
            )
            if any(
                name.partition("/")[0] == f"rng.{rng}" for name in stored
            ):  # or there was no such rank
                state["rng"] = {rng: rng_state()}
            state = engine.read(state, path / "weights")
        for name, e in engines.items():
            e.load_state(state[name])
        for generators in state.get("rng", {}).values():
            set_rng_state(generators)
        return read_progress(path)

    def _begin(self, temporary: Path, engine: Engine, tokenizer) -> None:
        for stale in self.directory.glob("step_*.tmp"):
            shutil.rmtree(stale)
        with disk.writing(temporary):
            (temporary / "hf").mkdir(parents=True)
            engine.save_config(temporary / "hf")
            tokenizer.save_pretrained(temporary / "hf")

    def _complete(
        self, temporary: Path, target: Path, progress: dict, writing: Future | None
    ) -> None:
        """After the engines' files: their checksums, each from the rank that wrote the file, and the final name."""
        with removed_if_it_fails(temporary):
            if writing is not None:
                writing.result()
            mine = (temporary / "weights").glob(f"__{dist.get_rank()}_*")
            parts = self._gather({f"weights/{path.name}": storage.checksum(path) for path in mine})
            on_rank0(
                self._publish, temporary, target, progress, dict(ChainMap(*parts)), group=self.group
            )

    def _publish(
        self, temporary: Path, target: Path, progress: dict, checksums: dict[str, str]
    ) -> None:
        with disk.writing(temporary):
            storage.write_trainer(temporary, progress, checksums)
        if target.exists():
            delete(target)
        temporary.rename(target)
        self._point_to(target)
        if self.max_checkpoints > 0:
            for old in checkpoints(self.directory)[: -self.max_checkpoints]:
                delete(old)

    def _point_to(self, target: Path) -> None:
        latest = self.directory / "latest.tmp"
        latest.write_text(target.name + "\n")
        latest.rename(self.directory / "latest")
        storage.sync_directory(self.directory)

    def _gather(self, value) -> list:
        """The value of every rank, on all of them."""
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.group)
        return values


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a directory, oldest first, without *.tmp, *.damaged, or any other name."""
    named = [path for path in directory.glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name)]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step_")))


def delete(checkpoint: Path) -> None:
    """Renamed first: a process that dies meanwhile must not leave half a checkpoint."""
    shutil.rmtree(checkpoint.rename(checkpoint.with_suffix(".deleted.tmp")))


@contextmanager
def removed_if_it_fails(directory: Path) -> Iterator[None]:
    """Around code in which all ranks write a directory: raises InputError if the disk is full."""
    try:
        with disk.writing(directory), storage.unwrapped():
            yield
    except Exception:
        if dist.get_rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
        raise


def read_progress(path: Path) -> dict:
    return storage.read_trainer(path)[0]


def rng_state() -> Tensor:
    """[n] uint8: torch's generators of this rank, CPU then accelerator."""
    states = [torch.get_rng_state()]
    if torch.accelerator.is_available():
        states.append(torch.get_device_module().get_rng_state())
    return torch.cat(states)


def set_rng_state(state: Tensor) -> None:
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size])
    if len(state) > size and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(state[size:])


def export_hf(engine: Engine, tokenizer, directory: Path) -> None:
    """Write a model that transformers and vLLM load, or where there are adapters what PEFT does; replaces `directory` when
    complete. Called by all ranks."""
    model, temporary = engine.config.model, directory.with_name(directory.name + ".tmp")
    weights = engine.export_adapter() if model.lora.rank else engine.export_weights()

    def write() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            with disk.writing(temporary):
                temporary.mkdir(parents=True)
                tokenizer.save_pretrained(temporary)
                if model.lora.rank:
                    lora.write(weights, model.lora, model.path, temporary, engine.leaves_alone)
                else:
                    engine.save_config(temporary)
            if not model.lora.rank:
                write_safetensors(weights, temporary)
        finally:
            deque(
                weights, 0
            )  # the other ranks gather all of them, even if this one could not write the first
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)

    with removed_if_it_fails(temporary):
        if dist.get_rank() > 0:
            deque(weights, 0)
        on_rank0(write, group=dist.group.WORLD)


def write_safetensors(
    weights: Iterable[tuple[str, Tensor]], directory: Path, max_bytes: int = MAX_FILE_BYTES
) -> None:
    """Weights, one at a time, into model-0000i-of-0000n.safetensors of at most max_bytes and their index."""
    part, size, parts, total = {}, 0, [], 0

    def close():
        with disk.writing(directory, size):
            save_file(part, directory / f"part-{len(parts)}", metadata={"format": "pt"})
        parts.append(list(part))
        part.clear()

    for name, tensor in weights:
        num_bytes = tensor.numel() * tensor.element_size()
        if part and size + num_bytes > max_bytes:
            close()
            size = 0
        part[name] = tensor.cpu().contiguous()
        size, total = size + num_bytes, total + num_bytes
    close()
    if len(parts) == 1:
        (directory / "part-0").rename(directory / "model.safetensors")
        return
    index = {"metadata": {"total_size": total}, "weight_map": {}}
    for i, names in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        (directory / f"part-{i}").rename(directory / file)
        index["weight_map"] |= dict.fromkeys(names, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def export_checkpoint(checkpoint: Path, out: Path, merge: bool = False) -> None:
    """A checkpoint's weights in Hugging Face format, read tensor by tensor, without a process group. Of a run with adapters:
    these in PEFT's, or merged with the frozen weights."""
    progress, checksums = storage.read_trainer(checkpoint)
    if out.exists():
        raise InputError(f"{out} exists already: remove it or give another name")
    if damage := storage.find_damage(checkpoint, checksums):
        raise InputError(f"{checkpoint} is damaged: {damage[0]}")
    adapted, dtype, rest = (
        progress.get("lora"),
        getattr(torch, progress["export_dtype"]),
        progress.get("rest"),
    )
    if merge and not adapted:
        raise InputError(f"--merge: {checkpoint} has no adapters")
    if merge and not Path(adapted["base"]).is_dir():
        raise InputError(f"--merge: the frozen model was in {adapted['base']}, which is not there")
    if merge and fingerprint(Path(adapted["base"])) != progress["run"]["frozen weights"]:
        raise InputError(
            f"--merge: {adapted['base']} is not the model whose adapters {checkpoint} holds"
        )
    if rest and not adapted and not Path(rest).is_dir():
        raise InputError(
            f"{checkpoint} holds what was trained, and {rest}, which had the other weights, is not there"
        )
    if (
        checkpoint / "weights" / "metadata.json"
    ).exists():  # which megatron.core.dist_checkpointing writes
        from engines.megatron.sharded_state import hf_weights

        weights = hf_weights(checkpoint)
    else:
        weights = stored_weights(checkpoint)
    temporary = out.with_name(out.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with disk.writing(temporary), storage.data_alone(checkpoint):
            as_adapter = adapted and not merge
            left_out = ("config.json", *SIDE_FILES) if as_adapter else ()
            shutil.copytree(checkpoint / "hf", temporary, ignore=shutil.ignore_patterns(*left_out))
            if as_adapter:
                lora.write(
                    weights, OmegaConf.create(adapted), adapted["base"], temporary, rest is not None
                )
            else:
                weights = (
                    merged(Path(adapted["base"]), dict(weights), OmegaConf.create(adapted), dtype)
                    if merge
                    else ((name, tensor.to(dtype)) for name, tensor in weights)
                )
                buffers = dict(
                    storage.stored_tensors(checkpoint, "engine.buffers.", lambda _: False)
                )
                parameters = ((name, tensor) for name, tensor in weights if name not in buffers)
                others = (
                    ignored_weights(Path(rest), names_in(Path(rest))) if rest and not merge else ()
                )
                write_safetensors(itertools.chain(parameters, buffers.items(), others), temporary)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def stored_weights(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor as it was stored), a tied output matrix left out."""
    from engines.model.hf import build_on_meta, read_hf_config

    hf_config = read_hf_config(str(checkpoint / "hf"))
    tied, hf = hf_config.tie_word_embeddings, build_on_meta(hf_config, torch.float32)
    tensors = storage.stored_tensors(
        checkpoint, "engine.model.", lambda name: tied and name.endswith("lm_head.weight")
    )
    return in_files(((lora.plain_name(name), tensor) for name, tensor in tensors), stacked(hf))


def names_in(model: Path) -> dict[str, str | None]:
    """As model_names(), of a directory."""
    from engines.model.hf import build_on_meta, read_hf_config

    return model_names(build_on_meta(read_hf_config(str(model)), torch.float32), model)


def merged(
    base: Path, adapter: dict[str, Tensor], settings: DictConfig, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the model in `base` with an adapter added, in this dtype, as the run computed with it; what is no part of
    the model, such as a vision tower, is as in the files. Raises InputError for an adapter of a layer that is not there."""
    names, left = names_in(base), dict(adapter)
    for file in weight_files(base):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                weight, own = tensors.get_tensor(name), names[name]
                if own is not None:
                    weight = weight.to(dtype)
                    pair = [
                        left.pop(f"{own.removesuffix('weight')}lora_{x}.weight", None) for x in "AB"
                    ]
                    weight = weight if None in pair else lora.merge(weight, *pair, settings)
                yield name, weight
    if left:
        raise InputError(f"--merge: {base} has no weight for {min(left)}")
