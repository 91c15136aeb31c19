"""The names of weights in vLLM, and the text model in a checkpoint of images and text, as vLLM runs it: with its vision tower, by
itself or, where vLLM does not have it so, without the tower."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from engines.model.hf import build_on_meta, read_hf_config, text_name
from engines.model.weights import model_names
from rollout.vllm import images


def text_class(hf_config) -> str | None:
    """The class of the text model by itself, if vLLM has that."""
    from vllm import ModelRegistry

    kind = AutoModelForCausalLM._model_mapping.get(type(hf_config.get_text_config()), None)
    return kind.__name__ if kind and kind.__name__ in ModelRegistry.get_supported_archs() else None


def arguments_of_kind(hf_config, tied: bool, with_images: bool) -> dict:
    """What vLLM is told of any model, for it to have images or text alone, with embeddings that are tied or not."""
    if hf_config.get_text_config() is hf_config:
        return {"hf_overrides": {"tie_word_embeddings": tied}}
    if with_images or (architecture := text_class(hf_config)) is None:
        return {
            "hf_overrides": {
                "tie_word_embeddings": tied,
                "text_config": {"tie_word_embeddings": tied},
            },
            **(images.arguments() if with_images else {"language_model_only": True}),
        }

    def text_alone(whole):
        text = whole.get_text_config()
        text.update({"tie_word_embeddings": tied, "architectures": [architecture]})
        return text

    return {"hf_overrides": text_alone}


def names_in_vllm(path: Path, with_images: bool) -> dict[str, str | None]:
    """name in the files -> name in vLLM, or None for what it does without. Of a model of text alone: where the files leave out the
    prefix of the base model, which transformers adds and vLLM does not."""
    hf_config = read_hf_config(path)
    hf = build_on_meta(hf_config, torch.float32, images=with_images)
    if hf_config.get_text_config() is hf_config:
        return {
            name: own
            for name, own in model_names(hf, path).items()
            if own == f"{hf.base_model_prefix}.{name}"
        }
    by_itself = not with_images and text_class(hf_config) is not None
    return {
        name: own and (text_name(hf, own) if by_itself else name)
        for name, own in model_names(hf, path).items()
    }
