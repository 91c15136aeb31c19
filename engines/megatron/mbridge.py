"""The mbridge package as an alternative to mapping.py, for dense families that both support.

This is the only file that imports mbridge. mbridge 0.15.1 was written for transformers 4; the parts
that break with transformers 5 are corrected here. Its successor, Megatron-Bridge, needs
transformers < 5 and TransformerEngine.
"""

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from mbridge.core.bridge import _MODEL_REGISTRY
from megatron.core import parallel_state as mpu
from torch import Tensor, nn

from engines.heads import Head
from engines.megatron.mapping import OUTPUT_LAYER, Mapping, global_parameters


class MBridge:
    """Has the interface of Mapping, for the layout that parallel_state currently describes."""

    def __init__(self, hf_config, dtype: torch.dtype, head: Head = Head.LOG_PROBS):
        own_mapping = Mapping(hf_config, head)
        self.hf_config = hf_config
        self.rows_per_group = own_mapping.rows_per_group
        num_ranks = mpu.get_tensor_model_parallel_world_size()

        hf_config = copy.deepcopy(hf_config)
        hf_config.rope_theta = hf_config.rope_parameters["rope_theta"]
        bridge_class = corrected_class(hf_config.model_type, own_mapping.outside_layers)
        self.bridge = bridge_class(hf_config, dtype=dtype, make_vocab_size_divisible_by=num_ranks)
        self.bridge.vocab_size = hf_config.vocab_size
        self.bridge.padded_vocab_size = -(-hf_config.vocab_size // num_ranks) * num_ranks

    def hf_names(self, name: str) -> list[str]:
        return self.bridge._weight_name_mapping_mcore_to_hf(name)

    def to_hf(self, name: str, parts: list[Tensor], dim: int = 0) -> Iterator[tuple[str, Tensor]]:
        whole = parts[0]
        is_value_head = name == OUTPUT_LAYER and len(whole) == 1
        if is_value_head:  # A value head has no vocabulary padding, which mbridge would cut off.
            return iter([("lm_head.weight", whole)])
        if len(parts) > 1:
            whole.tensor_model_parallel = True
            whole.partition_dim = dim
            whole = self.bridge._weight_merge_across_tp(name, parts, whole)
        return zip(*self.bridge._weight_to_hf_format(name, whole))

    def load(self, models: list[nn.Module], path: Path) -> None:
        self.bridge.load_weights(models, str(path))


def corrected_class(model_type: str, names_outside_layers: dict[str, str]) -> type:
    """Return a subclass of mbridge's class for a family, corrected to work with transformers 5.

    The subclass has its own mapping of names outside layers. For a tied model, mbridge would
    modify the mapping in its class, which all later models share.
    """
    family = _MODEL_REGISTRY[model_type]

    def local_to_global(self, model: nn.Module, consider_ep: bool = True) -> dict[str, str]:
        local_names = [name for name, _ in model.named_parameters()]
        global_names = [name for name, _ in global_parameters(model)]
        return dict(zip(local_names, global_names, strict=True))

    overrides = {
        "_DIRECT_MAPPING": dict(names_outside_layers),
        "_adjust_mapping_for_shared_weights": lambda self: None,
        "_weight_name_mapping_mcore_local_to_global": local_to_global,
    }
    return type(family.__name__, (family,), overrides)
