"""One LoRA adapter in vLLM, which every request uses, beside a frozen base that may be the trainer's own memory.

vLLM puts a wrapper with room for adapters around its layers: q, k and v, or gate and up, are one matrix of the base and two or
three adapters. What it is told is in arguments(); the wrappers are found through the model's lora_manager.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from config import InputError
from engines.fsdp.engine import is_replicated
from engines.model import lora
from engines.model.experts import stacks
from engines.model.hf import build_on_meta, read_hf_config, text_name

ADAPTER_ID = 1  # vLLM's ids begin here; 0 is the base


def are_swapped(config: DictConfig) -> bool:
    """Whether vLLM holds the base and the adapter apart from each other."""
    return config.model.lora.rank > 0 and not config.model.lora.merge


def why_not_shared(config: DictConfig, world_size: int) -> str | None:
    """Why the trainer's frozen weights cannot be vLLM's own tensors; None: they can, as far as the configuration says."""
    if config.model_engine != "fsdp":
        return f"model_engine={config.model_engine} keeps weights in another layout than vLLM"
    if config.rollout.tensor_parallel_size > 1:
        return f"rollout.tensor_parallel_size={config.rollout.tensor_parallel_size} divides vLLM's weights"
    if stacks(build_on_meta(read_hf_config(config.model.path), torch.float32)):
        return "vLLM keeps experts in another layout"
    if not is_replicated(config, world_size):
        return "not every rank holds all of the trainer's weights (on several they need engine.fsdp_size=1; no engine.cpu_offload)"
    if torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "npu":
        return "vLLM lays weights out anew on an NPU"
    return None


def is_shared(config: DictConfig, world_size: int) -> bool:
    """Whether vLLM starts before the trainer, which then uses its weights."""
    return (
        are_swapped(config)
        and config.rollout.share_base != "never"
        and why_not_shared(config, world_size) is None
    )


def check(config: DictConfig, world_size: int) -> None:
    """Raise InputError for adapters that vLLM cannot hold beside a base, and for a rollout.share_base without effect."""
    share = config.rollout.share_base
    if share != "auto" and not are_swapped(config):
        raise InputError(
            f"rollout.share_base={share} does nothing without model.lora.rank above 0 and model.lora.merge=false"
        )
    if (
        are_swapped(config)
        and config.engine.compute_dtype == "float32"
        and torch.cuda.is_available()
    ):
        raise InputError(
            "vLLM's kernels for adapters take bfloat16 alone: set engine.compute_dtype=bfloat16, or "
            "model.lora.merge=true"
        )
    reason = why_not_shared(config, world_size) if share == "always" else None
    if reason:
        raise InputError(f"rollout.share_base=always: {reason}")


def arguments(config: DictConfig) -> dict:
    """What vLLM is told of the adapter."""
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= config.model.lora.rank]
    if not ranks:
        raise InputError(
            f"model.lora.rank={config.model.lora.rank} is more than vLLM takes, {max(get_args(MaxLoRARanks))}: "
            "lower it, or set model.lora.merge=true"
        )
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in shapes(config)}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": ranks[0],
        "lora_target_modules": sorted(adapted),
    }


def shapes(config: DictConfig) -> dict[str, tuple[int, ...]]:
    """Of the matrices of the trainer's adapter, by name, as Engine.export_adapter() gives them."""
    hf = build_on_meta(read_hf_config(config.model.path), torch.float32)
    lora.inject(hf, config.model.lora)
    return lora.shapes(hf)


def request():
    """What a request that uses the adapter says."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name="policy", lora_int_id=ADAPTER_ID, lora_path="in memory")


class Adapter:
    """The adapter of vLLM's model on this rank. Its place in memory never changes: CUDA graphs read it there."""

    def __init__(self, model: nn.Module, config: DictConfig):
        """Raises InputError for a layer that has an adapter and that vLLM has no room beside."""
        self.model, self.manager = model, model.lora_manager
        self.hf = build_on_meta(read_hf_config(config.model.path), torch.float32)
        self.rank, self.scale = (
            config.model.lora.rank,
            config.model.lora.alpha / config.model.lora.rank,
        )
        places = Places(shapes(config), torch.float32)
        with places:
            self._load(places.weights)
        missing = places.weights.keys() - places.found.keys()
        if missing:
            raise InputError(
                f"vLLM has no room for an adapter of {min(missing).split('.lora_')[0]}: leave it out "
                "(model.lora.exclude_modules), or set model.lora.merge=true"
            )
        self.places = places.found

    def _load(self, tensors: dict[str, Tensor]) -> None:
        """Let vLLM copy an adapter's matrices to where it reads them."""
        tensors = {text_name(self.hf, name): x for name, x in tensors.items()}
        for name, layer in self.manager.modules.items():
            parts = self.manager.packed_modules.get(name, [name])
            a, b = (
                [tensors.get(f"{part}.{kind}.weight") for part in parts]
                for kind in ("lora_A", "lora_B")
            )
            if name in self.manager.packed_modules:
                layer.set_lora(0, a, b)
            elif a[0] is not None:
                layer.set_lora(0, a[0], b[0])

    def register(self) -> None:
        """Make an adapter of zeros the active one. A reload of the base has removed it, or it was never there."""
        from vllm.lora.lora_model import LoRAModel

        self.manager.remove_all_adapters()
        self.manager._registered_adapters[ADAPTER_ID] = LoRAModel(
            ADAPTER_ID, self.rank, {}
        )  # add_adapter() refuses none
        self.manager.activate_adapter(ADAPTER_ID)
        self.forget()

    def forget(self) -> None:
        """Memory that has slept may say otherwise which token uses the adapter: let the next step write it anew."""
        self.manager._last_mapping = None

    def update(self, tensors: dict[str, Tensor]) -> None:
        """Copy what Engine.export_adapter() gives to where vLLM reads it; alpha / rank is a part of B there."""
        if tensors.keys() != self.places.keys():
            raise RuntimeError(
                f"vLLM expects {len(self.places)} adapter matrices and got {len(tensors)}, "
                f"{min(tensors.keys() ^ self.places.keys())} being the first that differs"
            )
        scaled = [name for name in tensors if ".lora_B." in name]
        tensors |= zip(
            scaled, torch._foreach_mul([tensors[name].float() for name in scaled], self.scale)
        )
        # `part` is a view of a matrix that begins its memory; these may begin inside a larger one.
        tensors = {name: x.contiguous() for name, x in tensors.items()}
        copies = [
            (
                place,
                x.as_strided(
                    part.size(), part.stride(), x.storage_offset() + part.storage_offset()
                ),
            )
            for name, x in tensors.items()
            for place, part in self.places[name]
        ]
        torch._foreach_copy_(
            *map(list, zip(*copies))
        )  # hundreds of small matrices: one launch, not one for each

    @contextmanager
    def unwrapped(self) -> Iterator[None]:
        """Meanwhile the model has its layers without wrappers, under the names that its files have for them."""
        from vllm.lora.utils import replace_submodule

        for name, layer in self.manager.modules.items():
            replace_submodule(self.model, name, layer.base_layer)
        try:
            yield
        finally:
            for name, layer in self.manager.modules.items():
                replace_submodule(self.model, name, layer)

    def base(self, config: DictConfig) -> dict[str, Tensor] | str:
        """Where this model keeps the weights of its files: name -> a view of its tensor; or why some have no such place."""
        dtype = getattr(torch, config.engine.compute_dtype)
        places = Places({name: p.shape for name, p in self.hf.named_parameters()}, dtype)
        with self.unwrapped(), places:
            self.model.load_weights(
                (text_name(self.hf, name), x) for name, x in places.weights.items()
            )
        for name, weight in places.weights.items():
            found = [place for place, _ in places.found[name]]
            if (
                len(found) != 1
                or found[0].shape != weight.shape
                or found[0].dtype != dtype
                or not found[0].is_contiguous()
            ):
                return f"vLLM keeps {name} in another layout than its file"
        return {name: found[0][0] for name, found in places.found.items()}


class Places(TorchDispatchMode):
    """Notes where a loader copies `weights`, which have no memory, instead of copying them: found[name] lists (a view of the
    place, the part of the weight that goes there)."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype):
        super().__init__()
        self.weights = {
            name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()
        }
        self.found: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self.name_of = {
            weight.untyped_storage()._cdata: name for name, weight in self.weights.items()
        }

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default and args[1].is_meta:
            self.found[self.name_of[args[1].untyped_storage()._cdata]].append(
                (args[0].detach(), args[1])
            )
            return args[0]
        return function(*args, **(kwargs or {}))


def keep_plain_weights() -> None:
    """Before vLLM starts on a CPU: let it multiply with weights as they are. It would pack them, and drop those given."""
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: setattr(
        layer, "cpu_linear", nn.functional.linear
    )


# -- sleep, of a base that stays valid ---------------------------------------------------------------------------------


def allocations(tag: str) -> Iterable:
    """What vLLM's sleep allocator has allocated under this tag, "weights" or "kv_cache"."""
    from vllm.device_allocator.cumem import CuMemAllocator

    return [
        data for data in CuMemAllocator.get_instance().pointer_to_data.values() if data.tag == tag
    ]


def drop_kv_cache() -> None:
    """Give its memory back, and nothing else."""
    from vllm.device_allocator.cumem import unmap_and_release

    torch.cuda.synchronize()
    for data in allocations("kv_cache"):
        if not data.is_asleep:
            unmap_and_release(data.handle)
            data.is_asleep = True


def host_copies() -> dict[int, Tensor]:
    """address -> the copy in host memory from which waking fills it."""
    return {data.handle[2]: data.cpu_backup_tensor for data in allocations("weights")}


def wake_from(copies: dict[int, Tensor]) -> None:
    """Let memory that sleeps be filled from copies that were made before: the base is frozen."""
    for data in allocations("weights"):
        data.cpu_backup_tensor = copies[data.handle[2]]
