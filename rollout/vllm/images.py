"""Images that go to vLLM beside a prompt."""

import re
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import torch.distributed as dist
from omegaconf import DictConfig
from PIL import Image

from config import InputError
from engines.model import mtp
from engines.model.hf import read_hf_config

CACHE_GIB = 1.0  # of images as the tower takes them; those of one prompt would be enough, as its samples follow each other


class Shown(NamedTuple):
    """A prompt as the chat template gives it, with one placeholder for each image, and the images: uint8 [height, width, 3]."""

    input_ids: list[int]
    images: list[np.ndarray]


def arguments() -> dict:
    """What vLLM is told of images. It reads them with the processor in the model's directory, which needs the tokenizer. Newer
    versions would normalise the pixels themselves, and leave them as they are where preprocessor_config.json does not say how."""
    from vllm import EngineArgs

    return {
        "limit_mm_per_prompt": {"video": 0, "audio": 0},
        "mm_processor_cache_gb": CACHE_GIB,
        "skip_tokenizer_init": False,
        **dict.fromkeys({"mm_device_do_normalize"} & vars(EngineArgs).keys(), False),
    }


def check(config: DictConfig) -> None:
    """Raise InputError for what vLLM does not do together with images."""
    if config.model.images and config.model.lora.rank and not config.model.lora.merge:
        raise InputError(
            "model.images=true with adapters needs model.lora.merge=true: vLLM has adapters in the text model alone"
        )
    if config.model.images and mtp.drafter(config):
        raise InputError(
            "model.images=true: vLLM's drafters do not see images: set model.mtp.enable_rollout=false and "
            "rollout.speculative=null"
        )


def check_packages(config: DictConfig) -> None:
    """Raise InputError where vLLM's class for a model of images cannot be imported, often for lack of torchvision."""
    from vllm import ModelRegistry

    for name in (
        read_hf_config(config.model.path).architectures or () if config.model.images else ()
    ):
        try:
            if name in ModelRegistry.models:
                ModelRegistry.models[name].load_model_cls()
        except ImportError as error:
            raise InputError(
                f"vLLM cannot import its {name}: {error}: pip install {error.name or 'torchvision'}"
            ) from error


def placeholder_ids(hf_config) -> list[int]:
    """The ids that stand for a part of an image or a video, whose features take their place."""
    names = [
        name
        for name in hf_config.to_dict()
        if re.fullmatch(r"(image|video|audio)_token_(id|index)", name)
    ]
    return sorted({getattr(hf_config, name) for name in names} - {None})


def requests_of(shown: Sequence[Shown]) -> list[dict]:
    """The prompts in vLLM's form. An image that several of them have is converted and hashed once."""
    distinct = {id(x): x for _, images in shown for x in images}
    pictures = {key: Image.fromarray(x) for key, x in distinct.items()}
    names = {
        key: f"{x.shape} {sha256(np.ascontiguousarray(x)).hexdigest()}"
        for key, x in distinct.items()
    }
    return [
        {
            "prompt_token_ids": ids,
            "multi_modal_data": {"image": [pictures[id(x)] for x in images]},
            "multi_modal_uuids": {"image": [names[id(x)] for x in images]},
        }
        for ids, images in shown
    ]


def enqueue(
    llm, prompts: Sequence[list[int]], shown: Sequence[Shown], params: list, placeholders: list[int]
) -> None:
    """Give vLLM the prompts with their images. Raises InputError on all ranks where what it makes of one differs from `prompts`,
    the ids that the trainer has. Called by all ranks together."""
    problem = None
    try:
        llm.enqueue(requests_of(shown), params, use_tqdm=False)
    except Exception as error:  # of a kind of each version's, such as that a prompt is too long
        problem = f"vLLM refuses a prompt with images: {error}"
    requests = llm.llm_engine.engine_core.engine_core.scheduler.requests.values()
    for ours, (_, images), request in zip(prompts, shown, requests):
        theirs = list(request.prompt_token_ids)
        if theirs != ours and not problem:
            vllms, trainers = (int(np.isin(ids, placeholders).sum()) for ids in (theirs, ours))
            sizes = ", ".join(f"{image.shape[1]} x {image.shape[0]}" for image in images)
            problem = (
                f"vLLM sees {vllms} image tokens in a prompt of {len(theirs)} tokens with images of {sizes} pixels, and the "
                f"trainer {trainers} in {len(ours)} tokens: the versions of vLLM and transformers do not fit each other"
            )
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if any(problems):
        raise InputError(next(filter(None, problems)))
