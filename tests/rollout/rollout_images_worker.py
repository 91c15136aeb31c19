"""Run the cases with images of test_rollout_images.py with one vLLM, and write down numbers.

    torchrun --nproc-per-node 1 tests/rollout/rollout_images_worker.py FOLDER

Reads the model in FOLDER/model; writes FOLDER/results.json.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoProcessor

from config import InputError, load
from data.images.processor import ImageStore, Processor
from data.prompts import Prompt, PromptDataset
from engines.parallel import device
from rollout.drawing import Assignment, Request, Sampler
from rollout.vllm.engine import Rollout
from rollout.vllm.image_prompts import ImagePrompt

MAX_TOKENS = 12
GROUP_SIZE = 3
PLACEHOLDER = 262  # the token that stands for a part of an image
# The sizes (height, width) of each prompt's images. A token is 28 x 28 pixels.
SIZES = [[], [(56, 84)], [(28, 112), (56, 56)], [(84, 28)], []]
# Of 224 tokens each: prompts fill two of the 16 blocks of the KV cache, and soon need a third.
MANY_SIZES = [[(28 * 16, 28 * 14)]] * 12
# Tokens whose features vLLM keeps, as if steps in flight took the rest.
FEATURE_CACHE_TOKENS = 500


def main(folder: Path) -> None:
    this_device = device.init()
    results = {}
    config = load(
        "ppo.yaml",
        [
            f"model.path={folder / 'model'}",
            "model.images=true",
            "data.train_files=unused",
            "engine.compute_dtype=float32",
            "data.max_prompt_length=300",
            f"rollout.max_tokens={MAX_TOKENS}",
            "validation.max_tokens=1",
            "rollout.kv_cache_gib=0.0032",
            "rollout.max_num_seqs=20",
        ],
    )
    processor = AutoProcessor.from_pretrained(folder / "model")
    rollout = Rollout(config, this_device)

    def push(name):
        rollout.sleep()
        rollout.wake("weights")
        rollout.update_weights(changed_weights(folder / "model", name).items())
        rollout.wake("kv_cache")

    def generate(sizes, group_size=GROUP_SIZE, **sampling):
        prompts = []
        image_prompts = []
        for number, image_sizes in enumerate(sizes):
            for _ in range(group_size):
                inputs, image_prompt = make_prompt(processor, number, image_sizes)
                prompts.append(inputs["input_ids"][0].tolist())
                image_prompts.append(image_prompt)
        merged = OmegaConf.merge(config.rollout, sampling)
        return written(*rollout.generate(prompts, range(len(prompts)), merged, image_prompts))

    for name in WEIGHTS:
        push(name)
        results[name] = generate(SIZES)
        results[f"{name}, greedy"] = generate(SIZES, 1, temperature=0.0)
    push("as they are")
    texts = [make_prompt(processor, 0, [])[1].input_ids] * GROUP_SIZE
    results["text"] = written(*rollout.generate(texts, range(GROUP_SIZE), config.rollout))
    sampling = OmegaConf.merge(config.rollout, {"n": 2})
    dataset = FixedPrompts(processor, folder / "model")
    results["of a replica"] = images_of_second_replica(rollout, dataset, sampling)
    scheduler = rollout.scheduler
    features = scheduler.encoder_cache_manager
    features.cache_size = FEATURE_CACHE_TOKENS
    features.num_free_slots = FEATURE_CACHE_TOKENS
    features.num_freeable_slots = FEATURE_CACHE_TOKENS
    results["many"] = generate(MANY_SIZES, 1)
    results["steps"] = [scheduler.num_steps, scheduler.num_vllm_steps]
    rollout.scheduler = None  # from here on, vLLM's own code
    results["vLLM's"] = generate(SIZES)
    results["vLLM's many"] = generate(MANY_SIZES, 1)
    inputs, (ids, _) = make_prompt(processor, 2, SIZES[2])
    for name, shape in (("another size", (56, 84, 3)), ("too long", (448, 448, 3))):
        wrong_images = [np.zeros(shape, np.uint8)] * 2
        try:
            rollout.generate(
                inputs["input_ids"].tolist(),
                [0],
                config.rollout,
                [ImagePrompt(ids, wrong_images)],
            )
        except InputError as error:
            results[name] = str(error)
    (folder / "results.json").write_text(json.dumps(results))
    rollout.shutdown()
    device.shutdown()


class FixedPrompts(PromptDataset):
    """The prompts with images of SIZES, which are in no file."""

    def __init__(self, processor, path: Path):
        self.prompts = []
        for number, sizes in enumerate(SIZES):
            inputs, (ids, images) = make_prompt(processor, number, sizes)
            trainer_ids = inputs["input_ids"][0].tolist()
            prompt = Prompt(trainer_ids, "", {}, images=images, before_images=ids)
            self.prompts.append(prompt)
        self.image_store = ImageStore([prompt.images for prompt in self.prompts], Processor(path))

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]


def images_of_second_replica(rollout: Rollout, dataset: FixedPrompts, sampling) -> dict:
    """Generate as a replica that has only the last two of five prompts.

    Returns the rows of the batch, and the sizes of its images.
    """
    position = torch.arange(5).repeat_interleave(sampling.n)
    owner = (position >= 3).long()
    replica = owner.nonzero()[:, 0]
    assignment = Assignment(position, owner, replica, held=torch.ones(len(replica), dtype=bool))
    request = Request(dataset, [4, 2, 0, 3, 1], sampling, seed=(0,))
    sampler = Sampler(
        rollout,
        grader=None,
        tokenizer=None,
        host_group=None,
        max_failure_rate=0.0,
        skip_special_tokens=True,
    )
    batch = sampler.generate(request, assignment).batch
    return {"rows": batch.rows.tolist(), "sizes": [image.shape[:2] for image in batch.images]}


def with_another_tower(weights: dict) -> dict:
    changed = {}
    for name, weight in weights.items():
        if name.startswith("visual.") and "layers.1.mlp" in name:
            generator = torch.Generator().manual_seed(1)
            changed[name] = weight + torch.randn(weight.shape, generator=generator) / 5
    return changed


def with_another_projector(weights: dict) -> dict:
    name = "mlp_AR.linear_1.weight"
    return {name: weights[name] * 1.5}


def with_likely_placeholders(weights: dict) -> dict:
    """The model often samples the token that stands for an image."""
    is_placeholder = torch.arange(266) == PLACEHOLDER
    return {"lm_head.weight": weights["lm_head.weight"] * (1 + 8 * is_placeholder[:, None])}


# Name of a round -> a function that returns the tensors that are changed in it.
WEIGHTS = {
    "as they are": lambda weights: {},
    "another tower": with_another_tower,
    "another projector": with_another_projector,
    "placeholders": with_likely_placeholders,
}


def changed_weights(path: Path, name: str) -> dict[str, torch.Tensor]:
    weights = load_file(path / "model.safetensors")
    return weights | WEIGHTS[name](weights)


def make_prompt(processor, number: int, sizes: list) -> tuple[dict, ImagePrompt]:
    """Return a prompt with images of these sizes, as the trainer's inputs and as vLLM takes it."""
    images = [
        np.random.default_rng([number, i]).integers(0, 256, (*size, 3), np.uint8)
        for i, size in enumerate(sizes)
    ]
    content = [{"type": "text", "text": f"Number {number}: "}]
    for _ in images:
        content += [{"type": "image"}, {"type": "text", "text": " and"}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    pictures = [Image.fromarray(image) for image in images]
    inputs = processor(text=[text], images=pictures or None, return_tensors="pt")
    return inputs, ImagePrompt(processor.tokenizer(text)["input_ids"], images)


def written(batch, truncated) -> dict:
    return {
        "input_ids": batch.input_ids.tolist(),
        "lengths": batch.lengths,
        "truncated": truncated.tolist(),
        **{name: values.tolist() for name, values in batch.fields.items()},
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
