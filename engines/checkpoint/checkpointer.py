"""Save a run's checkpoints, find the one to resume from, and load it."""

import itertools
import re
import shutil
from collections import ChainMap
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from common import disk
from common.checksum import checksum
from config import InputError
from engines.base import Engine
from engines.checkpoint import storage
from engines.parallel.device import gather_values, on_rank0

FILES = "files"  # a checkpoint's directory of files that are not weights


@dataclass(frozen=True)
class UnpublishedCheckpoint:
    """A checkpoint whose files are being written."""

    # The directory in which the files are written.
    temporary: Path
    # The directory's name once all files are complete.
    target: Path
    # The contents of trainer.json, without checksums.
    progress: dict
    # The files that this rank has written besides the weights.
    own_files: list[Path]


class Checkpointer:
    """Writes {directory}/step_00000010/: sharded weights, hf/ and trainer.json.

    A checkpoint is written as step_*.tmp and renamed once all ranks' files are on the disk, so
    every step_* directory is complete, no matter when the process dies. The file `latest` names the
    newest checkpoint, for people and scripts.

    All ranks call find, save, wait and load together. If the disk is full, all of them raise
    InputError and earlier checkpoints stay intact.

    Args:
        max_checkpoints: the number of checkpoints to keep; 0 or less keeps all.
        asynchronous: whether to write in the background while training continues.
    """

    def __init__(self, directory: Path, max_checkpoints: int, asynchronous: bool):
        self.directory = directory
        self.max_checkpoints = max_checkpoints
        self.asynchronous = asynchronous
        # Background writes communicate at the same time as training, so they need their own group.
        self.group = dist.new_group(backend="gloo")
        self.background = ThreadPoolExecutor(max_workers=1)
        self.pending: Future | None = None

    def latest(self) -> Path | None:
        """Return the newest checkpoint in the directory, without verifying it."""
        return next(reversed(checkpoints(self.directory)), None)

    # -- resuming ----------------------------------------------------------------------------------

    def find(self, resume: str, dry_run: bool = False) -> Path | None:
        """Return the newest intact checkpoint in the directory, or None.

        If the directory has no checkpoints, `resume` may be the path of a checkpoint elsewhere. The
        ranks share the work of verification. Damaged checkpoints in the directory are reported and,
        except in a dry run, renamed to *.damaged.

        Raises:
            InputError: if every checkpoint is damaged, or the checkpoint at `resume` is.
        """
        if resume == "never":
            return self.latest()
        candidates = on_rank0(self._candidates, resume, group=self.group)
        damage: dict[Path, str] = {}
        intact = None
        for path in candidates:
            problem = self._find_damage(path)
            if problem is None:
                intact = path
                break
            damage[path] = problem

        can_continue = intact is not None and intact.parent == self.directory
        if damage and not can_continue:
            alternative = f"{intact} is intact" if intact else "no other checkpoint is intact"
            raise InputError(f"{damage[candidates[0]]}; {alternative}")
        on_rank0(self._set_aside, damage, intact, dry_run, group=self.group)
        return intact

    def _candidates(self, resume: str) -> list[Path]:
        """Return the checkpoints to try, the preferred one first."""
        own = checkpoints(self.directory)[::-1]
        if own:
            return own
        named = Path(resume)
        if not (named / "trainer.json").is_file():
            return []
        siblings = [path for path in checkpoints(named.parent)[::-1] if path != named]
        return [named, *siblings]

    def _find_damage(self, path: Path) -> str | None:
        """Verify a checkpoint on all ranks together; return the first problem found, or None."""
        try:
            manifest = on_rank0(storage.read_manifest, path, group=self.group)
        except InputError as error:
            return str(error)
        own_damage = storage.find_damage(
            path, manifest.checksums, dist.get_rank(), dist.get_world_size()
        )
        damage = list(itertools.chain(*gather_values(own_damage, self.group)))
        if damage:
            return f"{path} is damaged: {damage[0]}"
        return None

    def _set_aside(self, damage: dict[Path, str], intact: Path, dry_run: bool) -> None:
        """Report damaged checkpoints, and rename them unless this is a dry run."""
        for path, problem in damage.items():
            if dry_run:
                print(f"{problem}; the run would resume from {intact}", flush=True)
                continue
            renamed = path.rename(unused_name(path))
            self._point_latest_to(intact)
            print(
                f"{problem}; renamed to {renamed.name}, resuming from {intact}",
                flush=True,
            )

    def load(self, path: Path, engine: Engine, **other_engines: Engine) -> dict:
        """Read a checkpoint into the engines, and return its progress.

        The checkpoint may have been saved by any number of ranks. A rank whose random generators
        were not saved keeps its current ones.

        Raises:
            InputError: if a pickle in the checkpoint contains more than data.
        """
        engines = {"engine": engine, **other_engines}
        state = {name: member.state(loading=True) for name, member in engines.items()}
        with storage.data_only(path):
            rank = f"rank_{dist.get_rank()}"
            if holds_rng_state(path, rank):
                state["rng"] = {rank: rng_state()}
            state = engine.read(state, path / "weights")
        for name, member in engines.items():
            member.load_state(state[name])
        for generators in state.get("rng", {}).values():
            set_rng_state(generators)
        return read_progress(path)

    # -- saving ------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        engine: Engine,
        progress: dict,
        tokenizer,
        files: dict[str, bytes] | None = None,
        **other_engines: Engine,
    ) -> None:
        """Write the checkpoint step_{step}.

        Args:
            engine: the engine whose weights an export of this checkpoint will contain.
            progress: the script's state, which becomes trainer.json. If the engine does not use
                some of the model's weights, this method adds "rest": the model directory from which
                an export takes them.
            files: further files of this rank, by name; read_files() reads the files of all ranks.
            other_engines: other engines to save, such as critic=...
        """
        self.wait()
        target = self.directory / f"step_{step:08d}"
        temporary = target.with_suffix(".tmp")
        with removed_on_failure(temporary):
            on_rank0(self._begin, temporary, engine, tokenizer, group=self.group)
            own_files = write_files(temporary / FILES, files or {})
            engines = {"engine": engine, **other_engines}
            state = {name: member.state() for name, member in engines.items()}
            state["rng"] = {f"rank_{dist.get_rank()}": rng_state()}
            group = self.group if self.asynchronous else None
            writing = engine.write(state, temporary / "weights", group)
        if engine.has_unused_weights:
            progress = progress | {"rest": str(Path(engine.config.model.path).absolute())}
        checkpoint = UnpublishedCheckpoint(temporary, target, progress, own_files)
        if writing is None:
            self._complete(checkpoint, writing)
        else:
            self.pending = self.background.submit(self._complete, checkpoint, writing)

    def wait(self) -> None:
        """Wait for the background write to be published; raise its error if it failed."""
        pending = self.pending
        self.pending = None
        if pending is not None:
            pending.result()

    def _begin(self, temporary: Path, engine: Engine, tokenizer) -> None:
        """Remove leftovers of crashed runs, and write everything but the weights."""
        for stale in self.directory.glob("step_*.tmp"):
            shutil.rmtree(stale)
        with disk.writing(temporary):
            (temporary / "hf").mkdir(parents=True)
            engine.save_config(temporary / "hf")
            tokenizer.save_pretrained(temporary / "hf")

    def _complete(self, checkpoint: UnpublishedCheckpoint, writing: Future | None) -> None:
        """Wait for the engines' files, checksum the files that this rank wrote, and publish."""
        with removed_on_failure(checkpoint.temporary):
            if writing is not None:
                writing.result()
            weights = checkpoint.temporary / "weights"
            own_files = [*weights.glob(f"__{dist.get_rank()}_*"), *checkpoint.own_files]
            own_checksums = {
                str(path.relative_to(checkpoint.temporary)): checksum(path) for path in own_files
            }
            checksums = dict(ChainMap(*gather_values(own_checksums, self.group)))
            on_rank0(self._publish, checkpoint, checksums, group=self.group)

    def _publish(self, checkpoint: UnpublishedCheckpoint, checksums: dict[str, str]) -> None:
        """Rename a complete checkpoint, then update `latest`, then delete old checkpoints."""
        with disk.writing(checkpoint.temporary):
            storage.write_manifest(checkpoint.temporary, checkpoint.progress, checksums)
        if checkpoint.target.exists():
            delete(checkpoint.target)
        checkpoint.temporary.rename(checkpoint.target)
        self._point_latest_to(checkpoint.target)
        if self.max_checkpoints > 0:
            for old in checkpoints(self.directory)[: -self.max_checkpoints]:
                delete(old)

    def _point_latest_to(self, target: Path) -> None:
        disk.replace(self.directory / "latest", target.name + "\n")
        storage.sync_directory(self.directory)


# -- directories -----------------------------------------------------------------------------------


def checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints in a directory, oldest first, except *.tmp and *.damaged."""
    named = [path for path in directory.glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name)]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step_")))


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a path means.

    Args:
        path: a checkpoint, a run's directory, its directory checkpoints/ or the file `latest` in
            it. For all but the first, the newest checkpoint is chosen, and printed.

    Raises:
        InputError: if there is no checkpoint.
    """
    if (path / "trainer.json").is_file():
        return path
    newest = newest_checkpoint(path)
    if newest is None:
        exists = "has no checkpoint" if path.exists() else "does not exist"
        raise InputError(
            f"{path} {exists}: give a directory such as output_dir/checkpoints/step_00000010, or "
            "output_dir for the newest checkpoint"
        )
    print(f"checkpoint: {newest}", flush=True)
    return newest


def newest_checkpoint(path: Path) -> Path | None:
    """Return the newest checkpoint of a run, or None if it has none.

    Args:
        path: the run's directory, its directory checkpoints/ or the file `latest` in it.
    """
    if path.name == "latest" and path.is_file():
        newest = path.with_name(path.read_text().strip())
        return newest if newest.is_dir() else None
    oldest_first = checkpoints(path / "checkpoints") or checkpoints(path)
    return oldest_first[-1] if oldest_first else None


def unused_name(path: Path) -> Path:
    """Return the first of {path}.damaged, {path}.damaged1, ... that does not exist."""
    for number in itertools.count():
        renamed = path.with_name(f"{path.name}.damaged{number or ''}")
        if not renamed.exists():
            return renamed


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a crash cannot leave a partial step_*."""
    shutil.rmtree(checkpoint.rename(checkpoint.with_suffix(".deleted.tmp")))


@contextmanager
def removed_on_failure(directory: Path) -> Iterator[None]:
    """Remove a directory if the block fails. All ranks write to the directory within the block.

    Raises:
        InputError: if the disk is full.
    """
    try:
        with disk.writing(directory), storage.original_errors():
            yield
    except Exception:
        if dist.get_rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
        raise


def read_progress(path: Path) -> dict:
    """Return the script's state that was saved with a checkpoint."""
    return storage.read_manifest(path).progress


# -- further files ---------------------------------------------------------------------------------


def write_files(directory: Path, files: dict[str, bytes]) -> list[Path]:
    """Write files, by name, and return their paths."""
    paths = []
    for name, content in files.items():
        directory.mkdir(exist_ok=True)
        path = directory / name
        path.write_bytes(content)
        paths.append(path)
    return paths


def read_files(checkpoint: Path) -> list[bytes]:
    """Return the further files of all ranks in a checkpoint, in the order of their names."""
    return [path.read_bytes() for path in sorted((checkpoint / FILES).glob("*"))]


# -- random generators -----------------------------------------------------------------------------


def holds_rng_state(checkpoint: Path, rank: str) -> bool:
    """Return whether a checkpoint contains the random generators of `rank`, such as "rank_0"."""
    stored = FileSystemReader(checkpoint / "weights").read_metadata().state_dict_metadata
    return any(name.partition("/")[0] == f"rng.{rank}" for name in stored)


def rng_state() -> Tensor:
    """Return the states of torch's generators on this rank, CPU first, as [n] uint8."""
    states = [torch.get_rng_state()]
    if torch.accelerator.is_available():
        states.append(torch.get_device_module().get_rng_state())
    return torch.cat(states)


def set_rng_state(state: Tensor) -> None:
    """Restore the states that rng_state() returned."""
    cpu_size = len(torch.get_rng_state())
    torch.set_rng_state(state[:cpu_size])
    if len(state) > cpu_size and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(state[cpu_size:])
