"""Checkpoint files of Megatron engines, in the format of megatron.core.dist_checkpointing."""

import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing, parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch import Tensor
from transformers import AutoConfig

from engines.checkpoint.storage import Writer, read_tensors
from engines.heads import Head
from engines.megatron.bridge import export_stored
from engines.megatron.mapping import Mapping
from engines.megatron.sharded_state import METADATA


class TorchWriter(TorchDistSaveShardedStrategy):
    """Writes Megatron's checkpoint format with torch's writer.

    Megatron's own writer forks this process, with all its threads, even to write in the foreground.
    In the background, it would finish with collectives in the groups that training uses.

    group: a gloo group to write in the background, or None to write in the foreground
    writing: a Future that is done when the files are complete; None in the foreground
    """

    def __init__(self, group: dist.ProcessGroup | None):
        super().__init__("torch_dist", 1)
        self.group = group
        self.writing: Future | None = None

    def save(self, sharded_state_dict: dict, checkpoint_dir: Path) -> None:
        parts = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=True
        )[0]
        if self.group is not None:
            copy_to_host(parts)
        arguments = {
            "state_dict": mcore_to_pyt_state_dict(parts),
            "storage_writer": Writer(checkpoint_dir),
            "planner": MCoreSavePlanner(flatten_state_dict=False),
        }
        if self.group is None:
            dcp.save(**arguments)
            return
        background = ThreadPoolExecutor(max_workers=1)
        self.writing = background.submit(dcp.save, **arguments, process_group=self.group)
        background.shutdown(wait=False)


def copy_to_host(parts: dict[str, list]) -> None:
    """Replace tensors by copies, because training continues to change the originals."""
    for part in chain.from_iterable(parts.values()):
        if isinstance(part, ShardedTensor):
            part.data = part.data.detach().to("cpu", copy=True)


def write(
    states: dict[str, dict], directory: Path, group: dist.ProcessGroup | None
) -> Future | None:
    """Write the states of engines into a new directory. All ranks call this together.

    Args:
        states: engine name -> sharded state; and "rng" -> {"rank_0": tensor}, this rank's name and
            the states of its random generators.
        group: a gloo group to write in the background, or None.

    Returns:
        None without a group. Otherwise a Future: once it is done on rank 0, all files are complete.
    """
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
    dist.barrier()
    writer = TorchWriter(group)
    strategy = FullyParallelSaveStrategyWrapper(
        writer, mpu.get_data_parallel_group(with_context_parallel=True)
    )
    # torch warns about the way in which Megatron calls it.
    with warnings.catch_warnings(action="ignore"):
        dist_checkpointing.save(
            with_prefixes(states), str(directory), strategy, content_metadata=METADATA
        )
    return writer.writing


def read(states: dict[str, dict], directory: Path) -> dict[str, dict]:
    """Return the states that write() has written.

    Args:
        states: as for write(), but from sharded_state() with loading=True.
    """
    strategy = FullyParallelLoadStrategyWrapper(
        TorchDistLoadShardedStrategy(), mpu.get_data_parallel_group(with_context_parallel=True)
    )
    with warnings.catch_warnings(action="ignore"):
        # Not validated, because Megatron expects that the ranks together read every weight's state.
        return dist_checkpointing.load(
            with_prefixes(states), str(directory), strategy, validate_access_integrity=False
        )


def with_prefixes(states: dict[str, dict]) -> dict:
    """Return the states with keys that are unique across engines and ranks."""
    prefixed = {}
    for name, state in states.items():
        if name == "rng":
            prefixed[name] = {
                rank: ShardedObject(f"rng.{rank}", tensor, (1,), (0,))
                for rank, tensor in state.items()
            }
        else:
            add_prefix_for_sharding(state, f"{name}.")
            prefixed[name] = state
    return prefixed


def hf_weights(checkpoint: Path, head: Head, has_adapters: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, stored tensor) from a checkpoint, without a process group.

    For a checkpoint with adapters, yield the adapter matrices under their names in PEFT's files,
    and the value head, if there is one, under its name in Megatron.
    """
    tensors = read_tensors(checkpoint, "engine.", is_not_a_weight)
    if has_adapters:
        yield from tensors
        return
    mapping = Mapping(AutoConfig.from_pretrained(checkpoint / "hf"), head)
    yield from export_stored(mapping, tensors)


def is_not_a_weight(name: str) -> bool:
    """Return whether a stored tensor is anything but a weight of the model."""
    return name.startswith("optimizer.") or "_extra_state" in name
