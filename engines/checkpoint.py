"""Checkpoints (torch.distributed.checkpoint) and export to Hugging Face format.

    python -m engines.checkpoint export CHECKPOINT OUT     a checkpoint's weights as a model directory, in one process
"""

import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from config import InputError
from engines.base import Engine

MAX_FILE_BYTES = 4 * 2**30


class Checkpointer:
    """{directory}/step_00000010/: the engine's sharded state, trainer.json, and hf/ (config and tokenizer).

    A checkpoint is written as step_*.tmp and renamed once all ranks' files are on disk, so that every step_* directory
    is complete whenever the process dies. `latest` names the newest one for people and scripts.
    """

    def __init__(self, directory: Path, max_checkpoints: int, asynchronous: bool):
        self.directory, self.max_checkpoints = directory, max_checkpoints
        # Background writes talk to other ranks while training does: they need a group of their own.
        self.group = dist.new_group(backend="gloo") if asynchronous else None
        self.background, self.pending = ThreadPoolExecutor(max_workers=1), None

    def latest(self) -> Path | None:
        found = sorted(p for p in self.directory.glob("step_*") if p.suffix != ".tmp")
        return found[-1] if found else None

    def save(self, step: int, engine: Engine, progress: dict, tokenizer, **others: Engine) -> None:
        """Write step_{step}; progress is what the script needs to go on, others are engines besides the one that is
        exported, e.g. critic=... Called by all ranks."""
        self.wait()
        target = self.directory / f"step_{step:08d}"
        temporary = target.with_suffix(".tmp")
        if dist.get_rank() == 0:
            for stale in self.directory.glob("step_*.tmp"):
                shutil.rmtree(stale)
            save_model_files(engine, tokenizer, temporary / "hf")
            (temporary / "trainer.json").write_text(json.dumps(progress, indent=1))
        dist.barrier()
        state = {name: e.state() for name, e in {"engine": engine, **others}.items()}
        state["rng"] = {f"rank_{dist.get_rank()}": rng_state()}
        writing = engine.write(state, temporary / "weights", self.group)
        if writing is None:
            self._publish(temporary, target)
        else:
            # Rank 0 coordinates: its future is done when the files of all ranks and their index are on disk.
            self.pending = self.background.submit(lambda: (writing.result(), self._publish(temporary, target)))

    def wait(self) -> None:
        """Wait until a background write has ended and is published; raise what it raised."""
        if self.pending is not None:
            self.pending.result()
            self.pending = None
        dist.barrier()

    def load(self, path: Path, engine: Engine, **others: Engine) -> dict:
        """Read a checkpoint, of whatever world size, into the engines; return its progress."""
        engines = {"engine": engine, **others}
        state = {name: e.state(loading=True) for name, e in engines.items()}
        state["rng"] = {f"rank_{dist.get_rank()}": rng_state()}
        state = engine.read(state, path / "weights")
        for name, e in engines.items():
            e.load_state(state[name])
        for generators in state.get("rng", {}).values():
            set_rng_state(generators)
        return read_progress(path)

    def _publish(self, temporary: Path, target: Path) -> None:
        if dist.get_rank() != 0:
            return
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
        latest = self.directory / "latest.tmp"
        latest.write_text(target.name + "\n")
        latest.rename(self.directory / "latest")
        if self.max_checkpoints > 0:
            complete = sorted(p for p in self.directory.glob("step_*") if p.suffix != ".tmp")
            for old in complete[:-self.max_checkpoints]:
                shutil.rmtree(old)


def read_progress(path: Path) -> dict:
    try:
        return json.loads((path / "trainer.json").read_text())
    except FileNotFoundError:
        raise InputError(f"{path} is not a checkpoint: it has no trainer.json") from None


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


def save_model_files(engine: Engine, tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True)
    engine.save_config(directory)
    tokenizer.save_pretrained(directory)


def export_hf(engine: Engine, tokenizer, directory: Path) -> None:
    """Write a model that transformers and vLLM load; replaces `directory` when complete. Called by all ranks."""
    temporary = directory.with_name(directory.name + ".tmp")
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        save_model_files(engine, tokenizer, temporary)
        write_safetensors(engine.export_weights(), temporary)
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
    else:
        for _ in engine.export_weights():
            pass
    dist.barrier()


def write_safetensors(weights: Iterable[tuple[str, Tensor]], directory: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
    """Weights, one at a time, into model-0000i-of-0000n.safetensors of at most max_bytes and their index."""
    part, size, parts, total = {}, 0, [], 0

    def close():
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


def export_checkpoint(checkpoint: Path, out: Path) -> None:
    """A checkpoint's weights in Hugging Face format, read tensor by tensor, without a process group."""
    progress = read_progress(checkpoint)
    if out.exists():
        raise InputError(f"{out} exists already: remove it or give another name")
    dtype = getattr(torch, progress["export_dtype"])
    if (checkpoint / "weights" / "metadata.json").exists():         # which megatron.core.dist_checkpointing writes
        from engines.megatron.checkpoint import hf_weights
        weights = hf_weights(checkpoint)
    else:
        weights = stored_weights(checkpoint)
    temporary = out.with_name(out.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(checkpoint / "hf", temporary)
    write_safetensors(((name, tensor.to(dtype)) for name, tensor in weights), temporary)
    temporary.rename(out)


def stored_weights(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor as it was stored), a tied output matrix left out."""
    reader = FileSystemReader(checkpoint / "weights")
    prefix = "engine.model."
    entries = {k.removeprefix(prefix): v for k, v in reader.read_metadata().state_dict_metadata.items()
               if k.startswith(prefix)}
    from transformers import AutoConfig
    tied = AutoConfig.from_pretrained(checkpoint / "hf").tie_word_embeddings

    for name, entry in entries.items():
        if tied and name == "lm_head.weight":
            continue
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        dcp.load({"engine": {"model": {name: tensor}}}, storage_reader=reader, no_dist=True)
        yield name, tensor


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] != "export":
        sys.exit(__doc__)
    try:
        export_checkpoint(Path(sys.argv[2]), Path(sys.argv[3]))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
