"""Map the names of a model's weights to their names in vLLM."""

from pathlib import Path

import torch

from engines.model.hf import build_on_meta, read_hf_config
from engines.model.names import model_names, text_name
from rollout.vllm.arguments import standalone_text_class


def vllm_weight_names(model_path: Path, with_images: bool) -> dict[str, str | None]:
    """Return {name in the model's files: name in vLLM} for the names that may differ.

    The name in vLLM is None for weights that vLLM does not need, such as the vision tower if there
    are no images. The names of a text model differ if its files leave out the prefix of the base
    model: transformers adds the prefix when it loads them, but vLLM does not.
    """
    hf_config = read_hf_config(model_path)
    model = build_on_meta(hf_config, torch.float32, images=with_images)
    name_in_model = model_names(model, model_path)
    if hf_config.get_text_config() is hf_config:
        return {
            name: own_name
            for name, own_name in name_in_model.items()
            if own_name == f"{model.base_model_prefix}.{name}"
        }
    is_text_alone = not with_images and standalone_text_class(hf_config) is not None
    name_in_vllm = {}
    for name, own_name in name_in_model.items():
        if own_name is None:
            name_in_vllm[name] = None
        elif is_text_alone:
            name_in_vllm[name] = text_name(model, own_name)
        else:
            name_in_vllm[name] = name
    return name_in_vllm
