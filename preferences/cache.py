"""The reference's log-probabilities of all rows, computed once and kept in the cache directory.

The name of the folder is a hash of everything that they depend on: the reference's weights, the
tokens (and so the rows, the tokenizer and the template), and how they are computed. Another run
uses them only if all of these are the same.
"""

import gc
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from tqdm import tqdm

from common import disk
from data.batching.batch import Batch
from data.cache import is_intact, working_folder, write_checksums
from data.preference_dataset import PreferenceDataset
from engines.model.model_files import fingerprint
from engines.parallel.device import on_rank0
from preferences.reference import Reference

VERSION = 1  # increase it when log-probabilities or the files of a folder change
FILE = "ref_log_probs.npy"
# Keys of `engine` that decide how precisely log-probabilities are computed.
PRECISION = ("compute_dtype", "param_dtype", "float8", "float8_exclude")


def cache_folder(config: DictConfig, dataset: PreferenceDataset, cache_dir: Path) -> Path:
    """Return the folder of a data set's log-probabilities. Reads the model's files: rank 0 only."""
    settings = [
        VERSION,
        fingerprint(Path(config.reference.path or config.model.path)),
        dataset.name,
        config.model_engine,
    ]
    # Megatron has only the first of these.
    settings += [str(config.engine.get(key)) for key in PRECISION]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    return cache_dir / f"{key}-reference"


def cache_reference(
    config: DictConfig,
    datasets: Sequence[PreferenceDataset],
    cache_dir: Path,
    make_reference: Callable[[], Reference],
) -> None:
    """Attach the reference's log-probabilities to data sets; first compute those that are missing.

    Called by all ranks.

    Args:
        make_reference: builds the reference, which is needed only if some are missing.
    """
    missing = {}
    for dataset in datasets:
        folder = on_rank0(cache_folder, config, dataset, cache_dir)
        if not attach_cached(dataset, folder):
            missing[folder] = dataset
    if not missing:
        return
    reference = make_reference()
    for folder, dataset in missing.items():
        if dist.get_rank() == 0:
            print(
                f"reference: computing the log-probabilities of {len(dataset):,} rows once, for "
                f"{folder}",
                flush=True,
            )
        write_cache(reference, dataset, folder, config.data.train_batch_size)
        attach_cached(dataset, folder)
    del reference
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def attach_cached(dataset: PreferenceDataset, folder: Path) -> bool:
    """Attach the log-probabilities in a folder to the data set, and return whether there are any.

    Called by all ranks.
    """
    if not on_rank0(is_intact, folder):
        return False
    dataset.attach(np.load(folder / FILE, mmap_mode="r"))
    return True


def write_cache(
    reference: Reference, dataset: PreferenceDataset, folder: Path, batch_size: int
) -> None:
    """Compute the log-probabilities of all rows and write them. Called by all ranks.

    Each batch is divided over the ranks as in training; rank 0 writes the results of all ranks.
    """
    writer = Writer(folder, len(dataset.input_ids))
    group = dist.new_group(backend="gloo")
    hides_bar = None if dist.get_rank() == 0 else True
    starts = range(0, len(dataset), batch_size)
    try:
        on_rank0(writer.open, group=group)
        for start in tqdm(starts, desc="reference", leave=False, disable=hides_bar):
            stop = min(start + batch_size, len(dataset))
            log_probs = log_probs_of_rows(reference, dataset, range(start, stop))
            first_token = int(dataset.cu_seqlens[start])
            on_rank0(writer.write, first_token, log_probs, group=group)
        on_rank0(writer.finish, group=group)
    finally:
        writer.close()
        dist.destroy_process_group(group)


def log_probs_of_rows(reference: Reference, dataset: PreferenceDataset, rows: range) -> np.ndarray:
    """Return the log-probabilities of all tokens of some rows, on every rank: float32 [T]."""
    engine = reference.engine
    batch = dataset.batch(rows)
    plan = engine.plan(batch.lengths)
    share = batch.select(plan.sequences)
    own = reference.log_probs(share, plan.micro_batches)
    # A sequence that several ranks share counts once.
    is_reported = plan.reported_by(engine.dp_rank)
    own *= torch.repeat_interleave(is_reported.float(), share.cu_seqlens.diff())
    numbers = torch.arange(len(batch.input_ids))
    tokens = Batch(numbers, batch.cu_seqlens).select(plan.sequences).input_ids
    everywhere = torch.zeros(len(numbers)).index_add(0, tokens, own)
    return engine.sum_over_dp(everywhere).cpu().numpy()


class Writer:
    """Writes an array of T numbers into a cache folder, which is renamed when it is complete.

    Rank 0 calls the methods; close() may be called by all ranks.
    """

    def __init__(self, folder: Path, num_tokens: int):
        self.folder = folder
        self.num_tokens = num_tokens
        self.stack = ExitStack()

    def open(self) -> None:
        """Create the array in a temporary folder."""
        self.work = self.stack.enter_context(working_folder(self.folder))
        disk.require(self.work, 4 * self.num_tokens)
        self.array = np.lib.format.open_memmap(
            self.work / FILE, mode="w+", dtype=np.float32, shape=(self.num_tokens,)
        )

    def write(self, start: int, values: np.ndarray) -> None:
        self.array[start : start + len(values)] = values

    def finish(self) -> None:
        """Write the checksums, and rename the temporary folder."""
        self.array.flush()
        write_checksums(self.work)
        if self.folder.exists() and not is_intact(self.folder):
            shutil.rmtree(self.folder, ignore_errors=True)
        try:
            self.work.rename(self.folder)
        except OSError:
            if not is_intact(self.folder):  # else another run was faster
                raise

    def close(self) -> None:
        """Remove the files if they are not complete."""
        self.stack.close()
