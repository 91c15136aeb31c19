"""A small model of vLLM, whose layers vLLM has wrapped for adapters, without an engine.

Importing this takes seconds, as vLLM does.
"""

from dataclasses import dataclass

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.layers import LoRAMapping
from vllm.lora.model_manager import LRUCacheLoRAModelManager, create_lora_manager
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)

from rollout.vllm import cpu
from rollout.vllm.adapters import lora_request
from rollout.vllm.arguments import Host, engine_arguments

NUM_TOKENS = 5


def build(config: DictConfig) -> tuple[nn.Module, list[str]]:
    """Return vLLM's model with random weights, and the names of its parameters before wrapping.

    Call this only in a fork, such as of on_ranks().
    """
    cpu.keep_plain_weights()
    arguments = engine_arguments(config, Host(1, "cpu", 0, "0.32.0"), True)
    arguments["distributed_executor_backend"] = "uni"
    vllm_config = EngineArgs(**arguments).create_engine_config()
    with set_current_vllm_config(vllm_config):
        init_distributed_environment(1, 0, "env://", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        model = initialize_model(vllm_config)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        cpu_device = torch.device("cpu")
        process_weights_after_loading(model, vllm_config.model_config, cpu_device)
        names = [name for name, _ in model.named_parameters()]
        create_lora_manager(
            model,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            vocab_size=vllm_config.model_config.get_vocab_size(),
            lora_config=vllm_config.lora_config,
            vllm_config=vllm_config,
            device=cpu_device,
            lora_manager_cls=LRUCacheLoRAModelManager,
        )
    return model, names


def map_tokens(model: nn.Module, have_adapter: bool = True) -> None:
    """Let the next tokens use the adapter of requests, or none, as vLLM does before each step."""
    ids = (lora_request().lora_int_id if have_adapter else 0,) * NUM_TOKENS
    model.lora_manager.set_adapter_mapping(LoRAMapping(ids, ids, is_prefill=True))


@dataclass
class Outputs:
    """The output of each layer with an adapter, and what its base alone would put out."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    of_base: dict[str, Tensor]

    @staticmethod
    def of(model: nn.Module) -> "Outputs":
        generator = torch.Generator().manual_seed(0)
        inputs = {}
        outputs = {}
        of_base = {}
        for name, layer in model.lora_manager.modules.items():
            weight = layer.base_layer.weight
            inputs[name] = torch.randn(NUM_TOKENS, weight.shape[1], generator=generator)
            outputs[name] = layer(inputs[name])[0]
            of_base[name] = inputs[name] @ weight.T
        return Outputs(inputs, outputs, of_base)

    @property
    def effects(self) -> dict[str, Tensor]:
        """What the adapters add to the outputs of the base."""
        return {name: output - self.of_base[name] for name, output in self.outputs.items()}
