"""Exports and checkpoint states of a sharded model, with weights named as in the model's files."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from engines.adamw import KeepsDtypes, local, moment_bytes
from engines.fsdp.sharding import full_tensor
from engines.model import lora
from engines.model.classifier import value_head_name
from engines.model.names import model_names, split_stacks, stacked, stored_tensors

FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)


class ModelState:
    """Exports a model's weights, and saves and loads its state. All ranks call methods together.

    names  name in the files of model.path -> name in the model, or None for a weight that the model
           does not have
    """

    def __init__(
        self,
        hf: nn.Module,
        adapted_layers: list[nn.Module],
        config: DictConfig,
        device: torch.device,
    ):
        self.hf = hf
        self.adapted_layers = adapted_layers
        self.lora = config.model.lora
        self.export_dtype = getattr(torch, config.engine.compute_dtype)
        self.device = device
        self.names = model_names(hf, Path(config.model.path))
        self._file_names = {name: file_name for file_name, name in self.names.items() if name}
        # Stacked parameters, such as experts, that are several weights in the files.
        self._stacks = {
            name: parts for name, parts in stacked(hf).items() if name not in self._file_names
        }

    # -- exports -----------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the files, full tensor in the compute dtype), with adapters merged."""
        return split_stacks(self._whole_weights(), self._stacks)

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        adapted = {
            layer.base_layer.weight: layer
            for layer in self.adapted_layers
            if not layer.disable_adapters
        }
        for name, tensor in stored_tensors(self.hf):
            if ".lora_" in name:
                continue
            weight = self._whole(tensor)
            if isinstance(tensor, nn.Parameter):  # buffers keep their dtypes
                weight = weight.to(self.export_dtype)
            if tensor in adapted:
                weight = self._merge(weight, adapted[tensor])
            yield self._name_in_files(lora.plain_name(name)), weight

    def _merge(self, weight: Tensor, layer: nn.Module) -> Tensor:
        a = self._whole(layer.lora_A["default"].weight)
        b = self._whole(layer.lora_B["default"].weight)
        return lora.merge(weight, a, b, self.lora)

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name as in PEFT's files, full tensor) of each adapter matrix, and a value head."""
        value_head = value_head_name(self.hf) if self.adapted_layers else None
        for name, parameter in self.hf.named_parameters():
            if ".lora_" in name or name == value_head:
                yield lora.plain_name(name), self._whole(parameter)

    def use_adapters(self, use: bool) -> None:
        for layer in self.adapted_layers:
            layer._disable_adapters = not use  # enable_adapters() would also freeze them

    def _whole(self, tensor: Tensor) -> Tensor:
        return full_tensor(tensor.detach().to(self.device))

    def _name_in_files(self, name: str) -> str:
        return self._file_names.get(name, name)

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self, optimizers: list[torch.optim.Optimizer]) -> dict:
        """Return the sharded state: "model" and "buffers" by name in the files, and "optimizer".

        With adapters, frozen parameters are left out. Buffers are stored separately from parameters
        because an export casts only parameters.
        """
        options = StateDictOptions(ignore_frozen_params=bool(self.adapted_layers))
        weights = get_model_state_dict(self.hf, options=options)
        buffer_names = {name for name, _ in self.hf.named_buffers()}
        state = {"model": {}, "buffers": {}}
        for name, tensor in weights.items():
            part = "buffers" if name in buffer_names else "model"
            state[part][self._name_in_files(name)] = tensor
        if optimizers:
            state["optimizer"] = get_optimizer_state_dict(self.hf, optimizers, options=FLATTENED)
        return state

    def load_state_dict(self, state: dict, optimizers: list[torch.optim.Optimizer]) -> None:
        """Load a state that state_dict() returned."""
        weights = {
            self.names.get(file_name, file_name): tensor
            for part in ("model", "buffers")
            for file_name, tensor in state[part].items()
        }
        options = StateDictOptions(strict=not self.adapted_layers)
        set_model_state_dict(self.hf, weights, options=options)
        if optimizers:
            set_optimizer_state_dict(self.hf, optimizers, state["optimizer"], options=FLATTENED)


def optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Tensor]:
    """Yield the tensors of the optimizers' states."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    yield value


def future_optimizer_sizes(
    optimizers: Iterable[torch.optim.Optimizer], device_type: str
) -> Iterator[int]:
    """Yield the sizes in bytes of the moments that the first step will create on a type of device.

    Adam has two moments per parameter, Muon has one. For the user's own optimizer, two are assumed.
    """
    for optimizer in optimizers:
        if optimizer.state:
            continue
        num_moments = 1 if isinstance(optimizer, torch.optim.Muon) else 2
        state_dtype = None
        if isinstance(optimizer, KeepsDtypes):
            state_dtype = optimizer.storage.state_dtype
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.device.type == device_type:
                    yield from [moment_bytes(local(parameter), state_dtype)] * num_moments
