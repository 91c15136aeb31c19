"""Pass prompts with images to vLLM."""

import re
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from omegaconf import DictConfig
from PIL import Image

from config import InputError
from engines.model import mtp
from engines.model.hf import read_hf_config
from rollout.vllm.versions import keep_pixels_normalized

# The size of vLLM's cache of processed images. One prompt's images would be enough, because all
# responses to a prompt are requested one after the other.
CACHE_GIB = 1.0


class ImagePrompt(NamedTuple):
    """A prompt and its images.

    Attributes:
        input_ids: The prompt as the chat template renders it, with one placeholder per image.
        images: uint8 [height, width, 3] each.
    """

    input_ids: list[int]
    images: list[np.ndarray]


def image_arguments() -> dict:
    """Return the arguments of `vllm.LLM` for a vision-language model."""
    return {
        "limit_mm_per_prompt": {"video": 0, "audio": 0},
        "mm_processor_cache_gb": CACHE_GIB,
        # vLLM uses the processor in the model's directory, which needs a tokenizer.
        "skip_tokenizer_init": False,
        **keep_pixels_normalized(),
    }


def check_images(config: DictConfig) -> None:
    """Raise InputError if images are combined with a feature that vLLM lacks for images."""
    if not config.model.images:
        return
    if config.model.lora.rank and not config.model.lora.merge:
        raise InputError(
            "model.images=true with adapters needs model.lora.merge=true: vLLM supports adapters "
            "only in text models"
        )
    if mtp.drafter(config):
        raise InputError(
            "model.images=true: vLLM's drafters do not support images: set "
            "model.mtp.enable_rollout=false and rollout.speculative=null"
        )


def check_packages(config: DictConfig) -> None:
    """Raise InputError if vLLM's class for a vision-language model cannot be imported.

    The usual reason is that torchvision is missing.
    """
    from vllm import ModelRegistry

    if not config.model.images:
        return
    for name in read_hf_config(config.model.path).architectures or ():
        try:
            if name in ModelRegistry.models:
                ModelRegistry.models[name].load_model_cls()
        except ImportError as error:
            raise InputError(
                f"vLLM cannot import its {name}: {error}: pip install {error.name or 'torchvision'}"
            ) from error


def find_placeholder_ids(hf_config) -> list[int]:
    """Return the ids of the placeholder tokens that a model replaces by features of images etc."""
    ids = set()
    for name in hf_config.to_dict():
        if re.fullmatch(r"(image|video|audio)_token_(id|index)", name):
            ids.add(getattr(hf_config, name))
    return sorted(ids - {None})


def vllm_prompts(image_prompts: Sequence[ImagePrompt]) -> list[dict]:
    """Return the prompts in vLLM's format.

    An image that several prompts share is converted and hashed only once.
    """
    arrays = {}
    for _, images in image_prompts:
        for array in images:
            arrays[id(array)] = array
    pil_images = {}
    hashes = {}
    for key, array in arrays.items():
        pil_images[key] = Image.fromarray(array)
        digest = sha256(np.ascontiguousarray(array)).hexdigest()
        hashes[key] = f"{array.shape} {digest}"

    prompts = []
    for input_ids, images in image_prompts:
        keys = [id(array) for array in images]
        prompt = {
            "prompt_token_ids": input_ids,
            "multi_modal_data": {"image": [pil_images[key] for key in keys]},
            "multi_modal_uuids": {"image": [hashes[key] for key in keys]},
        }
        prompts.append(prompt)
    return prompts


def enqueue_image_prompts(
    llm,
    prompts: Sequence[list[int]],
    image_prompts: Sequence[ImagePrompt],
    params: list,
    placeholder_ids: list[int],
) -> list[str]:
    """Add the requests of this rank, with their images, to vLLM, and return their ids.

    Args:
        prompts: The ids of each prompt in the trainer, with one placeholder per image feature.

    Raises:
        InputError: vLLM rejects a prompt, or expands it to ids that differ from the trainer's.
    """
    if not prompts:
        return []
    try:
        request_ids = llm.enqueue(vllm_prompts(image_prompts), params, use_tqdm=False)
    except Exception as error:  # its type depends on the vLLM release
        raise InputError(f"vLLM rejects a prompt with images: {error}") from error
    # vLLM-private: enqueue() does not return the ids that it expands a prompt to.
    requests = llm.llm_engine.engine_core.engine_core.scheduler.requests.values()
    for trainer_ids, (_, images), request in zip(prompts, image_prompts, requests):
        vllm_ids = list(request.prompt_token_ids)
        if vllm_ids != trainer_ids:
            raise InputError(describe_mismatch(vllm_ids, trainer_ids, images, placeholder_ids))
    return request_ids


def describe_mismatch(
    vllm_ids: list[int],
    trainer_ids: list[int],
    images: list[np.ndarray],
    placeholder_ids: list[int],
) -> str:
    """Describe how vLLM's expansion of a prompt differs from the trainer's."""
    num_in_vllm = int(np.isin(vllm_ids, placeholder_ids).sum())
    num_in_trainer = int(np.isin(trainer_ids, placeholder_ids).sum())
    sizes = ", ".join(f"{image.shape[1]} x {image.shape[0]}" for image in images)
    return (
        f"vLLM sees {num_in_vllm} image tokens in a prompt of {len(vllm_ids)} tokens with images "
        f"of {sizes} pixels, but the trainer sees {num_in_trainer} in {len(trainer_ids)} tokens: "
        "the installed versions of vLLM and transformers are incompatible"
    )
