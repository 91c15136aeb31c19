"""mbridge's mapping of weights in place of mapping.py's, for dense families that both know. No other file knows mbridge.

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

from engines.heads import Head
from engines.megatron.mapping import Mapping, global_parameters


class MBridge:
    """What Mapping is, on the layout that parallel_state has now."""

    def __init__(self, hf_config, dtype: torch.dtype, head: Head = Head.LOG_PROBS):
        own, num_ranks = Mapping(hf_config, head), mpu.get_tensor_model_parallel_world_size()
        self.hf_config, self.in_turn = hf_config, own.in_turn
        hf_config = copy.deepcopy(hf_config)
        hf_config.rope_theta = hf_config.rope_parameters["rope_theta"]
        family = _MODEL_REGISTRY[hf_config.model_type]

        def local_to_global(self, model: nn.Module, consider_ep: bool = True) -> dict[str, str]:
            return dict(
                zip(
                    (n for n, _ in model.named_parameters()),
                    (n for n, _ in global_parameters(model)),
                    strict=True,
                )
            )

        # A copy: for a tied model mbridge writes into the dictionary of its class, which all later models share.
        self.bridge = type(
            family.__name__,
            (family,),
            {
                "_DIRECT_MAPPING": dict(own.outside),
                "_adjust_mapping_for_shared_weights": lambda self: None,
                "_weight_name_mapping_mcore_local_to_global": local_to_global,
            },
        )(hf_config, dtype=dtype, make_vocab_size_divisible_by=num_ranks)
        self.bridge.vocab_size = hf_config.vocab_size
        self.bridge.padded_vocab_size = -(-hf_config.vocab_size // num_ranks) * num_ranks

    def names(self, name: str) -> list[str]:
        return self.bridge._weight_name_mapping_mcore_to_hf(name)

    def separate(
        self, name: str, parts: list[Tensor], dim: int = 0
    ) -> Iterator[tuple[str, Tensor]]:
        whole = parts[0]
        if (
            name == "output_layer.weight" and len(whole) == 1
        ):  # a value head: no vocabulary, no padding
            return iter([("lm_head.weight", whole)])
        if len(parts) > 1:
            whole.tensor_model_parallel, whole.partition_dim = True, dim
            whole = self.bridge._weight_merge_across_tp(name, parts, whole)
        return zip(*self.bridge._weight_to_hf_format(name, whole))

    def load(self, models: list[nn.Module], path: Path) -> None:
        self.bridge.load_weights(models, str(path))
