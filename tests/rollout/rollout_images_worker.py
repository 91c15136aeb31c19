"""The cases with images of test_rollout.py for one vLLM: it writes down numbers, which test_rollout.py judges.

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
from engines.parallel import device
from rollout.vllm.engine import Rollout
from rollout.vllm.image_prompts import ImagePrompt

MAX_TOKENS, GROUP = 12, 3
# One after the other, the sizes (height, width) of a prompt's images: tokens are 28 x 28 pixels.
SIZES = [[], [(56, 84)], [(28, 112), (56, 56)], [(84, 28)], []]
MANY = [
    [(28 * 16, 28 * 14)]
] * 12  # of 224 tokens each: prompts have two blocks of the KV cache, of 16, and soon need a third
KEPT = 500  # tokens that vLLM keeps the features of, as if steps in flight had all others


def main(folder: Path) -> None:
    this_device, results = device.init(), {}
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
        rollout.update_weights(weights_of(folder / "model", name).items())
        rollout.wake("kv_cache")

    def ask(sizes, n=GROUP, **sampling):
        inputs, shown = zip(
            *(asked(processor, *each) for each in enumerate(sizes) for _ in range(n))
        )
        return rollout.generate(
            [x["input_ids"][0].tolist() for x in inputs],
            range(len(inputs)),
            OmegaConf.merge(config.rollout, sampling),
            shown,
        )

    for name in WEIGHTS:
        push(name)
        results[name] = written(*ask(SIZES))
        results[f"{name}, greedy"] = written(*ask(SIZES, 1, temperature=0.0))
    push("as they are")
    texts = [asked(processor, 0, [])[1].input_ids] * GROUP
    results["text"] = written(*rollout.generate(texts, range(GROUP), config.rollout))
    scheduler, features = rollout.scheduler, rollout.scheduler.encoder_cache_manager
    features.cache_size = features.num_free_slots = features.num_freeable_slots = KEPT
    results["many"] = written(*ask(MANY, 1))
    results["steps"] = scheduler.num_steps, scheduler.num_vllm_steps
    rollout.scheduler = None  # vLLM's own code
    results["vLLM's"], results["vLLM's many"] = written(*ask(SIZES)), written(*ask(MANY, 1))
    inputs, (ids, _) = asked(processor, 2, SIZES[2])
    for said, size in (("another size", (56, 84, 3)), ("too long", (448, 448, 3))):
        try:
            rollout.generate(
                inputs["input_ids"].tolist(),
                [0],
                config.rollout,
                [ImagePrompt(ids, [np.zeros(size, np.uint8)] * 2)],
            )
        except InputError as error:
            results[said] = str(error)
    (folder / "results.json").write_text(json.dumps(results))
    rollout.shutdown()
    device.shutdown()


# What vLLM is given: name -> the changed tensors.
WEIGHTS = {
    "as they are": lambda weights: {},
    "another tower": lambda weights: {
        name: x + torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) / 5
        for name, x in weights.items()
        if name.startswith("visual.") and "layers.1.mlp" in name
    },
    "another projector": lambda weights: {
        name: x * 1.5 for name, x in weights.items() if name == "mlp_AR.linear_1.weight"
    },
    # The model often says what stands for an image.
    "placeholders": lambda weights: {
        "lm_head.weight": weights["lm_head.weight"] * (1 + 8 * (torch.arange(266) == 262)[:, None])
    },
}


def weights_of(path: Path, name: str) -> dict[str, torch.Tensor]:
    weights = load_file(path / "model.safetensors")
    return weights | WEIGHTS[name](weights)


def asked(processor, number: int, sizes: list) -> tuple[dict, ImagePrompt]:
    """Prompt number `number`, with images of these sizes: what the trainer has of it, and what vLLM is shown."""
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
    found = processor(
        text=[text], images=[*map(Image.fromarray, images)] or None, return_tensors="pt"
    )
    return found, ImagePrompt(processor.tokenizer(text)["input_ids"], images)


def written(batch, truncated) -> dict:
    return {
        "input_ids": batch.input_ids.tolist(),
        "lengths": batch.lengths,
        "truncated": truncated.tolist(),
        **{name: values.tolist() for name, values in batch.fields.items()},
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
