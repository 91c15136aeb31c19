"""The order of the data: which rows each batch has, as `data.shuffle`, `weights` and `sampler` say.

The order has no state. Every rank computes the rows of a batch from the configuration and the
number of the batch, so a resumed run continues with the next batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from common import imports, plugins
from config import InputError
from data.batching import sampler
from data.batching.mixture import Mixture
from data.batching.order import RowsOfBatch, global_batch, unshuffled_batch
from data.batching.sampler import UserSampler
from data.sources import source_sizes
from engines.parallel.device import gather_values, on_all_ranks, on_rank0
from job.consistency import digest

NUM_SHOWN_ROWS = 8  # of the first batch, in the log


@dataclass(frozen=True)
class Order:
    """The rows of every batch.

    Attributes:
        rows_of_batch: the number of a batch, from 0 -> its rows, [data.train_batch_size] int64.
        identity: the settings of the order that must not change when a run resumes.
        notices: lines for the log.
    """

    rows_of_batch: RowsOfBatch
    identity: dict[str, Any]
    notices: list[str] = field(default_factory=list)


def check_order_settings(config: DictConfig) -> None:
    """Raise InputError if the settings of the order contradict each other.

    Imports the file of data.sampler, but needs no data.
    """
    data = config.data
    if data.sampler is None:
        if data.sampler_kwargs:
            name = next(iter(data.sampler_kwargs))
            raise InputError(
                f"data.sampler_kwargs.{name} does nothing without data.sampler: set it, or leave "
                f"out data.sampler_kwargs.{name}"
            )
    elif data.weights is not None or not data.shuffle:
        other = "data.shuffle=false" if data.weights is None else f"data.weights={data.weights}"
        raise InputError(
            f"{other} does nothing with data.sampler={data.sampler}, which chooses all rows: leave "
            "out one of the two"
        )
    else:
        sampler.find_sampler(data)
    if data.weights is not None:
        check_number_of_weights(data)


def check_number_of_weights(data: DictConfig) -> None:
    """Raise InputError unless every name in data.train_files has a weight."""
    files = data.train_files
    num_names = 1 if isinstance(files, str) else len(files)
    if len(data.weights) != num_names:
        raise InputError(
            f"data.weights={data.weights} must have one weight for each name in data.train_files, "
            f"which has {num_names}: {files}"
        )
    if num_names == 1:
        raise InputError(
            f"data.weights={data.weights} does nothing with a single name in data.train_files: "
            "leave it out, or list the files in data.train_files=[a.jsonl,b.jsonl]"
        )


def sampler_reads(config: DictConfig, name: str) -> bool:
    """Return whether the function of data.sampler names an input, such as rows."""
    if config.data.sampler is None:
        return False
    return name in plugins.parameters(sampler.find_sampler(config.data))


def make_order(config: DictConfig, train, total_steps: int) -> Order:
    """Return the order of the training rows. Called by all ranks.

    Args:
        train: the TokenDataset or PromptDataset.
        total_steps: the number of steps of the whole run.

    Raises:
        InputError: a name with a weight has no rows; or the user's sampler fails, returns anything
            but the rows of a batch, or returns different rows on another call or another rank.
    """
    data = config.data
    identity = {"data.shuffle": data.shuffle, "data.weights": "none", "data.sampler": "none"}
    if data.sampler is not None:
        return user_order(config, train, total_steps, identity)
    if data.weights is not None:
        return weighted_order(config, train, total_steps, identity)
    num_rows = len(train)
    batch_size = data.train_batch_size
    if data.shuffle:
        shuffled = partial(global_batch, num_rows, batch_size, config.trainer.seed)
        return Order(shuffled, identity)
    notices = []
    num_unused = num_rows % batch_size
    if num_unused:
        notices.append(
            f"data: data.shuffle=false never uses the last {num_unused} of {num_rows} rows, which "
            f"do not fill a batch of {batch_size}"
        )
    return Order(partial(unshuffled_batch, num_rows, batch_size), identity, notices)


# -- weights ---------------------------------------------------------------------------------------


def weighted_order(config: DictConfig, train, total_steps: int, identity: dict[str, Any]) -> Order:
    """Return the order that mixes the names in data.train_files by data.weights."""
    data = config.data
    sizes = on_rank0(source_sizes, data.train_files, train.file_rows)
    for name, size in zip(data.train_files, sizes):
        if not size:
            raise InputError(
                f"{name} has a weight in data.weights={data.weights}, but none of its rows is "
                "used: leave out its name and its weight"
            )
    weights = list(data.weights)
    mixture = Mixture(sizes, weights, data.train_batch_size, config.trainer.seed, data.shuffle)
    weighted_rows = [f"{weight} for {size} rows" for weight, size in zip(weights, sizes)]
    identity = identity | {"data.weights": ", ".join(weighted_rows)}
    notices = share_lines(mixture, list(data.train_files), total_steps * data.train_batch_size)
    return Order(mixture.rows_of_batch, identity, notices)


def share_lines(mixture: Mixture, names: Sequence[str], num_rows: int) -> list[str]:
    """Return a line about each source: its share of the rows, and the number of passes over it.

    Args:
        names: the names of the sources.
        num_rows: the number of rows that the run draws.
    """
    lines = []
    draws = mixture.draws_before(np.array([num_rows]))[:, 0].tolist()
    total_weight = sum(mixture.weights)
    for i, name in enumerate(names):
        share = mixture.weights[i] / total_weight
        passes = draws[i] / mixture.sizes[i]
        lines.append(
            f"data: {name}: {share:.1%} of each batch (data.weights), {passes:.2f} passes over its "
            f"{mixture.sizes[i]:,} rows"
        )
    return lines


# -- samplers of the user --------------------------------------------------------------------------


def user_order(config: DictConfig, train, total_steps: int, identity: dict[str, Any]) -> Order:
    """Return the order of the user's sampler, after a check of some of its batches."""
    data = config.data
    inputs = sampler_inputs(config, train, total_steps)
    user_sampler = UserSampler(data.sampler, sampler.find_sampler(data), inputs)
    num_batches = total_steps * batches_per_step(config)
    check_agreement(user_sampler, on_all_ranks(user_sampler.check, num_batches))
    rows_of_batch = partial(agreed_rows, user_sampler)
    first_batch = rows_of_batch(0)
    description = describe_sampler(config, total_steps, first_batch)
    shown = ", ".join(map(str, first_batch[:NUM_SHOWN_ROWS].tolist()))
    if len(first_batch) > NUM_SHOWN_ROWS:
        shown += ", ..."
    notice = f"data: {data.sampler} chooses the rows; first batch, counting rows from 0: {shown}"
    return Order(rows_of_batch, identity | {"data.sampler": description}, [notice])


def batches_per_step(config: DictConfig) -> int:
    """Return the largest number of batches that a step may draw."""
    filter_groups = OmegaConf.select(config, "algorithm.filter_groups")
    if filter_groups is None or not filter_groups.enable:
        return 1
    return filter_groups.max_num_gen_batches


def sampler_inputs(config: DictConfig, train, total_steps: int) -> dict[str, Any]:
    """Return sampler.INPUTS without batch_index. Arrays are read-only copies."""
    sources = None
    if sampler_reads(config, "sources"):
        sizes = on_rank0(source_sizes, config.data.train_files, train.file_rows)
        sources = read_only(np.repeat(np.arange(len(sizes)), sizes))
    return {
        "seed": config.trainer.seed,
        "batch_size": config.data.train_batch_size,
        "num_rows": len(train),
        "total_steps": total_steps,
        "lengths": read_only(train.lengths.copy()),
        "sources": sources,
        "rows": train.rows,
    }


def read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def describe_sampler(config: DictConfig, total_steps: int, first_batch: np.ndarray) -> str:
    """Return everything about the user's sampler that must not change when a run resumes."""
    data = config.data
    path = imports.path_of(data.sampler)
    function_name = data.sampler.rpartition(":")[2]
    parts = [f"file {digest(path.read_bytes())}"]
    parts += [f"{name}={value}" for name, value in sorted(data.sampler_kwargs.items())]
    if sampler_reads(config, "total_steps"):
        parts.append(f"{total_steps} steps")
    parts.append(f"first batch {sampler.digest(first_batch)}")
    return f"{Path(path).name}:{function_name} ({', '.join(parts)})"


def agreed_rows(user_sampler: UserSampler, batch_index: int) -> np.ndarray:
    """Return the rows of a batch: [batch_size] int64. Called by all ranks.

    Raises InputError on all ranks if the sampler fails on one of them, or if their rows differ.
    """
    rows = on_all_ranks(user_sampler.rows_of_batch, batch_index)
    check_agreement(user_sampler, {batch_index: sampler.digest(rows)})
    return rows


def check_agreement(user_sampler: UserSampler, digests: dict[int, str]) -> None:
    """Raise InputError on all ranks if a batch has other rows on one of them than on rank 0.

    Args:
        digests: the number of a batch -> the fingerprint of its rows on this rank.
    """
    first, *others = gather_values(digests)
    for rank, other in enumerate(others, start=1):
        for batch_index, value in other.items():
            if value != first[batch_index]:
                raise InputError(
                    f"{user_sampler.setting}: batch {batch_index} has other rows on rank {rank} "
                    "than on rank 0: the rows must follow from the arguments alone, not from the "
                    "rank, the machine or the time"
                )
