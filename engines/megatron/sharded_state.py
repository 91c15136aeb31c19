"""Checkpoints of Megatron engines: megatron.core.dist_checkpointing, readable at any layout of ranks."""

import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing, parallel_state as mpu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
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
from megatron.core.dist_checkpointing.utils import (
    add_prefix_for_sharding,
    extract_sharded_tensors_and_factories,
)
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn
from transformers import AutoConfig

from engines.checkpoint.storage import Writer, read_tensors
from engines.megatron import adapted_layers as lora, bridge
from engines.megatron.mapping import Mapping

# The distributed optimizer's state is stored by whole weights, which any layout can read. One of the ranks that share it
# gathers it in host memory. (Otherwise each of them gathers it, through the device, at 4 bytes per parameter.)
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}


def sharded_state(models: list[nn.Module], optimizer, loading: bool, by_layer: bool) -> dict:
    """One engine's state, as write() and read() take it. loading: for read(), which fills it. by_layer: every layer's tensors have
    names of their own, since frozen ones have no optimizer state, and what Megatron stacks must be whole."""
    metadata = {
        **METADATA,
        "non_homogeneous_layers": by_layer,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }
    names = [f"model{i}" for i in range(len(models))] if len(models) > 1 else ["model"]
    state = {
        name: lora.sharded_state(model)
        if lora.names_in(model)
        else model.sharded_state_dict(metadata=metadata)
        for name, model in zip(names, models)
    }
    if optimizer is not None:
        optimizers = optimizer.chained_optimizers  # experts have one of their own
        states = [optimizer_state(o, dict(state), loading) for o in optimizers]
        state["optimizer"] = {
            i: tensors for i, tensors in enumerate(states) if tensors
        }  # a stage may have nothing to train
        step = torch.tensor(
            max(map(get_step, optimizers)), device=next(models[0].parameters()).device
        )
        dist.all_reduce(step, dist.ReduceOp.MAX)  # such a stage counts none
        state["optimizer"]["step"] = step.item()
    return state


def load(models: list[nn.Module], optimizer, state: dict) -> None:
    for i, model in enumerate(models):
        missing, unexpected = model.load_state_dict(
            state[f"model{i}" if len(models) > 1 else "model"], strict=False
        )
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        missing = [
            n for n in missing if n not in frozen and not n.endswith("_extra_state")
        ]  # TransformerEngine's, for fp8
        assert not missing and not unexpected, (missing, unexpected)
    for i, o in enumerate(optimizer.chained_optimizers if optimizer is not None else []):
        load_optimizer(o, state["optimizer"].get(i, {}))
        set_step(o, state["optimizer"]["step"])


# -- optimizers: the same state per weight, whichever of Megatron's optimizers holds it --------------------------------


def optimizer_state(optimizer, model_state: dict, loading: bool) -> dict[int, dict]:
    """For each weight of an optimizer: exp_avg, exp_avg_sq and, if the weight is not fp32 itself, fp32_param."""
    optimizer.init_state_fn(
        optimizer.optimizer, optimizer.config
    )  # before the first step there is none
    set_step(optimizer, get_step(optimizer))  # which that call leaves out
    if isinstance(optimizer, DistributedOptimizer):
        count_padding(optimizer)
        state = (
            optimizer.sharded_param_state_fully_reshardable(model_state, loading, METADATA) or {}
        )
        if loading:  # only what this rank has a piece of
            state = {i: state[i] for i, _ in pieces(optimizer)}
        for tensors in state.values():
            main = tensors.pop("param")
            if optimizer.config.bf16:
                tensors["fp32_param"] = replace(
                    main, key=main.key.replace("state.param", "state.fp32_param", 1)
                )
        return state
    sharded = {
        id(x.data): x for x in nested_values(extract_sharded_tensors_and_factories(model_state)[0])
    }
    return {
        i: {
            name: make_sharded_optimizer_tensor(
                sharded[id(weight)], tensor, f"optimizer.state.{name}"
            )
            for name, tensor in tensors.items()
        }
        for i, (weight, tensors) in enumerate(replicated_states(optimizer))
    }


def pieces(optimizer: DistributedOptimizer) -> Iterator[tuple[int, Tensor]]:
    """(number in the state, weight) for each weight of which this data-parallel rank has a piece."""
    weights = enumerate(chain(*(buffer.param_index_map for buffer in optimizer.buffers)))
    return ((i, weight) for i, weight in weights if weight in optimizer.model_param_gbuf_map)


def count_padding(optimizer: DistributedOptimizer) -> None:
    """Keep the padding between buckets when the state is gathered. megatron-core 0.16.1 leaves it out, but still looks for
    each weight where it would be with padding, and so stores the state of all later weights shifted."""
    for buffer in optimizer.buffers:
        buffer.numel_unpadded = buffer.numel
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()


def replicated_states(optimizer) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """(weight, its state) of an optimizer that is not distributed."""
    mains = optimizer.get_parameters()
    for weight, main in zip(
        chain(*optimizer.float16_groups) if optimizer.config.bf16 else mains, mains, strict=True
    ):
        state = optimizer.optimizer.state[main]
        tensors = {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
        yield weight, tensors | ({"fp32_param": main} if optimizer.config.bf16 else {})


@torch.no_grad()
def load_optimizer(optimizer, state: dict[int, dict[str, Tensor]]) -> None:
    if not isinstance(optimizer, DistributedOptimizer):
        for i, (_, tensors) in enumerate(replicated_states(optimizer)):
            for name, tensor in tensors.items():
                tensor.copy_(state[i][name])
        return
    for i, weight in pieces(optimizer):
        piece, mine = (
            of(weight)
            for of in (
                optimizer._get_model_param_range_map,
                optimizer._get_main_param_and_optimizer_states,
            )
        )
        for name, tensor in state[i].items():
            mine["param" if name == "fp32_param" else name].copy_(
                tensor.flatten()[piece["param"].start : piece["param"].end]
            )


def get_step(optimizer) -> float:
    """torch counts steps per weight, TransformerEngine and apex per group of weights."""
    inner = optimizer.optimizer
    counters = inner.state.values() if USING_PYTORCH_OPTIMIZER else inner.param_groups
    return max((float(counter.get("step", 0)) for counter in counters), default=0.0)


def set_step(optimizer, step: float) -> None:
    if USING_PYTORCH_OPTIMIZER:
        for state in optimizer.optimizer.state.values():
            state["step"] = torch.tensor(
                step, device=state["exp_avg"].device
            )  # the fused step counts there
    else:
        for group in optimizer.optimizer.param_groups:
            group["step"] = int(step)


# -- files -------------------------------------------------------------------------------------------------------------


class TorchWriter(TorchDistSaveShardedStrategy):
    """Megatron's format, written by torch. Megatron's own writer forks this process, with all its threads, even when it writes
    in the foreground; in the background it ends with collectives of the groups that train."""

    def __init__(self, group: dist.ProcessGroup | None):
        super().__init__("torch_dist", 1)
        self.group, self.writing = group, None

    def save(self, sharded_state_dict: dict, checkpoint_dir: Path) -> None:
        parts = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=True
        )[0]
        for part in (
            x for same_key in parts.values() for x in same_key if isinstance(x, ShardedTensor)
        ):
            if self.group is not None:
                part.data = part.data.detach().to(
                    "cpu", copy=True
                )  # training goes on with the original
        arguments = dict(
            state_dict=mcore_to_pyt_state_dict(parts),
            storage_writer=Writer(checkpoint_dir),
            planner=MCoreSavePlanner(flatten_state_dict=False),
        )
        if self.group is None:
            dcp.save(**arguments)
            return
        background = ThreadPoolExecutor(max_workers=1)
        self.writing = background.submit(dcp.save, **arguments, process_group=self.group)
        background.shutdown(wait=False)


def write(
    states: dict[str, dict], directory: Path, group: dist.ProcessGroup | None
) -> Future | None:
    """states: engines by name, and "rng": {"rank_0": tensor} of this rank. Called by all ranks. With a group (gloo) the
    files are written in the background; when the Future is done on rank 0 all of them and their index are complete."""
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
    dist.barrier()
    writer = TorchWriter(group)
    strategy = FullyParallelSaveStrategyWrapper(
        writer, mpu.get_data_parallel_group(with_context_parallel=True)
    )
    with warnings.catch_warnings(action="ignore"):  # torch's, about how Megatron uses it
        dist_checkpointing.save(
            _prefixed(states), str(directory), strategy, content_metadata=METADATA
        )
    return writer.writing


def read(states: dict[str, dict], directory: Path) -> dict[str, dict]:
    """The states as they were written."""
    strategy = FullyParallelLoadStrategyWrapper(
        TorchDistLoadShardedStrategy(), mpu.get_data_parallel_group(with_context_parallel=True)
    )
    with warnings.catch_warnings(action="ignore"):
        # Its validation expects every rank to take every weight's state.
        return dist_checkpointing.load(
            _prefixed(states), str(directory), strategy, validate_access_integrity=False
        )


def hf_weights(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor as it was stored) for every weight of a checkpoint, or of one with adapters, for every matrix
    of those. For a process without a group."""
    tensors = read_tensors(
        checkpoint, "engine.", lambda name: name.startswith("optimizer.") or "_extra_state" in name
    )
    first = next(tensors)
    tensors = chain([first], tensors)
    if ".lora_" in first[0]:  # adapters are stored under their own names
        yield from tensors
        return
    yield from bridge.export_tensors(
        Mapping(AutoConfig.from_pretrained(checkpoint / "hf")), tensors
    )


def _prefixed(states: dict[str, dict]) -> dict:
    """With keys that tell engines apart, and every rank's generators under a key of its own."""
    prefixed = {}
    for name, state in states.items():
        if name == "rng":
            state = {
                rank: ShardedObject(f"rng.{rank}", tensor, (1,), (0,))
                for rank, tensor in state.items()
            }
        else:
            add_prefix_for_sharding(state, f"{name}.")
        prefixed[name] = state
    return prefixed
