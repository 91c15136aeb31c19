"""One LoRA adapter that vLLM stores separately from a frozen base (model.lora.merge=false).

Every request uses the adapter. vLLM and the trainer may share the memory of the base.

vLLM wraps the layers that have adapters. Some of these layers are fused: q, k and v, or gate and
up, are one matrix in the base, but have two or three adapters. The model's lora_manager lists the
wrappers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from config import InputError
from engines.fsdp.sharding import is_replicated
from engines.model import lora
from engines.model.experts import expert_weights
from engines.model.hf import build_on_meta, read_hf_config
from engines.model.names import text_name
from rollout.vllm.copies import CopyRecorder

ADAPTER_ID = 1  # vLLM's ids begin here; 0 stands for no adapter


# -- the configuration ----------------------------------------------------------------------------


def has_separate_adapter(config: DictConfig) -> bool:
    """Return whether vLLM stores the adapter separately instead of merging it into the base."""
    return config.model.lora.rank > 0 and not config.model.lora.merge


def sharing_obstacle(config: DictConfig, world_size: int) -> str | None:
    """Return the reason why vLLM and the trainer cannot share the tensors of the frozen weights.

    Returns None if the configuration allows it.
    """
    if config.model_engine != "fsdp":
        return f"model_engine={config.model_engine} stores weights in a different layout than vLLM"
    tp_size = config.rollout.tensor_parallel_size
    if tp_size > 1:
        return f"rollout.tensor_parallel_size={tp_size} divides vLLM's weights"
    if config.rollout.quantization != "none":
        return f"rollout.quantization={config.rollout.quantization} stores them in 8 bits"
    if expert_weights(model_on_meta(config)):
        return "vLLM stores experts in a different layout"
    if not is_replicated(config, world_size):
        return (
            "the trainer's weights are sharded or offloaded (set engine.fsdp_size=1 and "
            "engine.cpu_offload=false to keep all of them on every rank)"
        )
    if torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "npu":
        return "vLLM changes the layout of weights on an NPU"
    return None


def shares_base(config: DictConfig, world_size: int) -> bool:
    """Return whether the trainer uses vLLM's tensors as its frozen weights: vLLM starts first."""
    return (
        has_separate_adapter(config)
        and config.rollout.share_base != "never"
        and sharing_obstacle(config, world_size) is None
    )


def check_adapter(config: DictConfig, world_size: int) -> None:
    """Raise InputError if vLLM cannot store the adapter separately, or cannot share the base."""
    share_base = config.rollout.share_base
    is_separate = has_separate_adapter(config)
    if share_base != "auto" and not is_separate:
        raise InputError(
            f"rollout.share_base={share_base} does nothing without model.lora.rank > 0 and "
            "model.lora.merge=false: leave it out"
        )
    if is_separate and config.engine.compute_dtype == "float32" and torch.cuda.is_available():
        raise InputError(
            "vLLM's CUDA kernels for adapters do not support float32: set "
            "engine.compute_dtype=bfloat16, or model.lora.merge=true"
        )
    if share_base == "always":
        obstacle = sharing_obstacle(config, world_size)
        if obstacle:
            raise InputError(f"rollout.share_base=always: {obstacle}")


def adapter_arguments(config: DictConfig) -> dict:
    """Return the arguments of `vllm.LLM` for the adapter. Imports vLLM.

    Raises:
        InputError: vLLM does not support adapters of this rank.
    """
    from vllm.config.lora import MaxLoRARanks

    rank = config.model.lora.rank
    vllm_ranks = get_args(MaxLoRARanks)  # ascending
    sufficient_ranks = [vllm_rank for vllm_rank in vllm_ranks if vllm_rank >= rank]
    if not sufficient_ranks:
        raise InputError(
            f"model.lora.rank={rank} is larger than vLLM supports ({max(vllm_ranks)}): lower it, "
            "or set model.lora.merge=true"
        )
    layers = {layer_of(name) for name in matrix_shapes(config)}
    adapted_modules = {layer.rpartition(".")[2] for layer in layers}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": sufficient_ranks[0],
        "lora_target_modules": sorted(adapted_modules),
    }


def layer_of(matrix_name: str) -> str:
    """Return the name of the layer that a matrix of an adapter belongs to."""
    return matrix_name.partition(".lora_")[0]


def model_on_meta(config: DictConfig) -> nn.Module:
    return build_on_meta(read_hf_config(config.model.path), torch.float32)


def matrix_shapes(config: DictConfig) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the adapter's matrices, named as in Engine.export_adapter()."""
    model = model_on_meta(config)
    lora.inject(model, config.model.lora)
    return lora.shapes(model)


def lora_request():
    """Return the LoRARequest of requests that use the adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name="policy", lora_int_id=ADAPTER_ID, lora_path="in memory")


# -- the adapter in vLLM --------------------------------------------------------------------------


class LayoutError(Exception):
    """The layout of some weights in vLLM differs from the layout in the model's files."""


# vLLM-private: its public interface loads adapters from a directory of files. The class below
# instead copies from memory to the buffers that CUDA graphs read, through vLLM's adapter manager.


class Adapter:
    """The adapter in vLLM's model on this rank, at a fixed address, which CUDA graphs use."""

    def __init__(self, vllm_model: nn.Module, config: DictConfig):
        """
        Raises:
            InputError: vLLM does not support the adapter of a layer.
        """
        self.vllm_model = vllm_model
        self.manager = vllm_model.lora_manager
        self.model = model_on_meta(config)
        self.rank = config.model.lora.rank
        self.scale = config.model.lora.alpha / self.rank
        recorder = CopyRecorder(matrix_shapes(config), torch.float32)
        with recorder:
            self._set(recorder.weights)
        missing = recorder.weights.keys() - recorder.copies.keys()
        if missing:
            raise InputError(
                f"vLLM does not support an adapter for {layer_of(min(missing))}: exclude it with "
                "model.lora.exclude_modules, or set model.lora.merge=true"
            )
        self.copies = recorder.copies

    def _set(self, matrices: dict[str, Tensor]) -> None:
        """Make vLLM copy the matrices into its own buffers."""
        matrices = {text_name(self.model, name): matrix for name, matrix in matrices.items()}
        for name, layer in self.manager.modules.items():
            is_fused = name in self.manager.packed_modules
            parts = self.manager.packed_modules[name] if is_fused else [name]
            lora_a = [matrices.get(f"{part}.lora_A.weight") for part in parts]
            lora_b = [matrices.get(f"{part}.lora_B.weight") for part in parts]
            if is_fused:
                layer.set_lora(0, lora_a, lora_b)
            elif lora_a[0] is not None:
                layer.set_lora(0, lora_a[0], lora_b[0])

    def register(self) -> None:
        """Activate an adapter of zeros.

        This is necessary at the start, and after reloading the base, which removes all adapters.
        """
        from vllm.lora.lora_model import LoRAModel

        self.manager.remove_all_adapters()
        # add_adapter() rejects an adapter without matrices.
        self.manager._registered_adapters[ADAPTER_ID] = LoRAModel(ADAPTER_ID, self.rank, {})
        self.manager.activate_adapter(ADAPTER_ID)
        self.forget_mapping()

    def forget_mapping(self) -> None:
        """Make the next step write the mapping from tokens to adapters again, as after a sleep.

        vLLM writes this mapping only when it changes, but its memory is lost during a sleep.
        """
        self.manager._last_mapping = None

    def update(self, matrices: dict[str, Tensor]) -> None:
        """Copy the matrices into vLLM's own buffers. Modifies the dictionary `matrices`.

        Args:
            matrices: As in Engine.export_adapter(). In vLLM's buffers, B includes the factor
                alpha / rank.
        """
        if matrices.keys() != self.copies.keys():
            raise RuntimeError(
                f"vLLM expects {len(self.copies)} adapter matrices and got {len(matrices)}; the "
                f"first difference is {min(matrices.keys() ^ self.copies.keys())}"
            )
        b_names = [name for name in matrices if ".lora_B." in name]
        b_matrices = [matrices[name].float() for name in b_names]
        matrices |= zip(b_names, torch._foreach_mul(b_matrices, self.scale))

        destinations = []
        sources = []
        for name, matrix in matrices.items():
            matrix = matrix.contiguous()
            for copy in self.copies[name]:
                # The recorded source is a view of a matrix that starts at offset 0 of its storage.
                # This matrix may start at another offset, e.g. in the buffer of a collective.
                offset = matrix.storage_offset() + copy.source.storage_offset()
                source = matrix.as_strided(copy.source.size(), copy.source.stride(), offset)
                destinations.append(copy.destination)
                sources.append(source)
        # One kernel launch instead of hundreds, one per small matrix.
        torch._foreach_copy_(destinations, sources)

    @contextmanager
    def unwrapped(self) -> Iterator[None]:
        """Within this block, remove the layers' wrappers, so weights have their usual names."""
        from vllm.lora.utils import replace_submodule

        for name, layer in self.manager.modules.items():
            replace_submodule(self.vllm_model, name, layer.base_layer)
        try:
            yield
        finally:
            for name, layer in self.manager.modules.items():
                replace_submodule(self.vllm_model, name, layer)

    def base_weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return {name in the model's files: a view of vLLM's tensor with that weight}.

        Raises:
            LayoutError: vLLM stores a weight in pieces, or in a different shape or dtype.
        """
        shapes = {name: weight.shape for name, weight in self.model.named_parameters()}
        recorder = CopyRecorder(shapes, dtype)
        weights = ((text_name(self.model, name), x) for name, x in recorder.weights.items())
        with self.unwrapped(), recorder:
            self.vllm_model.load_weights(weights)
        views = {}
        for name, weight in recorder.weights.items():
            destinations = [copy.destination for copy in recorder.copies[name]]
            if len(destinations) != 1 or not has_layout_of(destinations[0], weight):
                raise LayoutError(f"vLLM stores {name} in a different layout than the model's file")
            views[name] = destinations[0]
        return views


def has_layout_of(view: Tensor, weight: Tensor) -> bool:
    """Return whether a view of vLLM's memory has the layout of a weight."""
    return view.shape == weight.shape and view.dtype == weight.dtype and view.is_contiguous()
