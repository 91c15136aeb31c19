"""mbridge's mapping of weights in place of mapping.py's, for the families that both know. No other file knows mbridge.

mbridge 0.15.1 was written for transformers 4; what goes wrong with transformers 5 is corrected here. (Its successor
Megatron-Bridge needs transformers < 5 and TransformerEngine.)
"""

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from mbridge.core.bridge import _MODEL_REGISTRY
from megatron.core import parallel_state as mpu
from torch import Tensor, nn

from engines.megatron.mapping import Mapping, global_parameters

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


class MBridge(Mapping):
    def __init__(self, hf_config, dtype: torch.dtype, critic: bool = False):
        super().__init__(hf_config, critic)
        hf_config = copy.deepcopy(hf_config)
        hf_config.rope_theta = hf_config.rope_parameters["rope_theta"]
        family, own, num_ranks = _MODEL_REGISTRY[hf_config.model_type], self, mpu.get_tensor_model_parallel_world_size()

        # mbridge has one parameter per expert, experts.py one for all experts of a rank.
        def local_to_global(self, model: nn.Module, consider_ep: bool = True) -> dict[str, str]:
            return dict(zip((n for n, _ in model.named_parameters()), (n for n, _ in global_parameters(model)), strict=True))

        def names_in_layer(self, name: str) -> list[str]:
            if ".experts." not in name:
                return family._weight_name_mapping_mlp(self, name)
            number = self.config.num_moe_experts // self.mpu.ep_size
            return [n for i in range(number) for n in own.names(name, i + number * self.mpu.ep_rank)]

        def to_megatron(self, name: str, weights: list[Tensor]) -> Tensor:
            if ".experts." not in name:
                return family._weight_to_mcore_format(self, name, weights)
            number = self.config.num_moe_experts // self.mpu.ep_size
            return torch.cat(weights).to(self.dtype).unflatten(0, (number, -1))

        cls = type(family.__name__, (family,), {
            # A copy: for a tied model mbridge writes into the dictionary of its class, which all later models share.
            "_DIRECT_MAPPING": dict(self.outside), "_adjust_mapping_for_shared_weights": lambda self: None,
            "_get_gptmodel_args": lambda self: {}, "_weight_name_mapping_mcore_local_to_global": local_to_global,
            "_weight_name_mapping_mlp": names_in_layer, "_weight_to_mcore_format": to_megatron})
        self.bridge = cls(hf_config, dtype=dtype, make_vocab_size_divisible_by=num_ranks)
        self.bridge.vocab_size = hf_config.vocab_size
        self.bridge.padded_vocab_size = -(-hf_config.vocab_size // num_ranks) * num_ranks

    def names(self, name: str, expert: int | None = None) -> list[str]:
        return super().names(name, expert) if ".experts." in name else self.bridge._weight_name_mapping_mcore_to_hf(name)

    def separate(self, name: str, parts: list[Tensor], dim: int = 0) -> Iterator[tuple[str, Tensor]]:
        if ".experts." in name or name == "output_layer.weight" and len(parts[0]) == 1:
            return super().separate(name, parts, dim)
        whole = parts[0]
        if len(parts) > 1:
            whole.tensor_model_parallel, whole.partition_dim = True, dim
            whole = self.bridge._weight_merge_across_tp(name, parts, whole)
        return zip(*self.bridge._weight_to_hf_format(name, whole))

    def load(self, models: list[nn.Module], path: Path) -> None:
        self.bridge.load_weights(models, str(path))
