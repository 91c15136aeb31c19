"""The cases of test_images.py for one number of ranks. It writes numbers, which the test judges.

    torchrun --nproc-per-node N tests/data/images_worker.py FOLDER

Reads models from FOLDER/{family} and rows from FOLDER/rows.jsonl. Writes FOLDER/{N}.json, the
trained models, and FOLDER/{N} {case}.safetensors with the results of log_probs().
"""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoTokenizer

from config import InputError, load
from data.batching.packing import partition
from data.dataset import TokenDataset, tokenize
from data.images.processor import Processor
from engines.checkpoint.export import export_hf
from engines.fsdp.engine import FSDPEngine
from engines.parallel import device

STEPS = 4
LR = 2e-3


@dataclass
class Case:
    """A family of models, and settings separated by spaces."""

    family: str
    settings: str = ""


PADDED = "engine.use_remove_padding=false"
RECOMPUTE = "engine.activation_checkpointing=true"
CASES = {
    1: {
        "qwen2_5_vl": Case("qwen2_5_vl"),
        "qwen3_vl padded": Case("qwen3_vl", PADDED),
        "llava": Case("llava"),
        "frozen": Case("qwen2_5_vl", "model.freeze=[visual]"),
        "gemma3": Case("gemma3"),
        "gemma3 padded": Case("gemma3", PADDED),
    },
    2: {
        "qwen2_5_vl recompute": Case("qwen2_5_vl", RECOMPUTE),
        "qwen3_vl": Case("qwen3_vl"),
        "qwen3_5": Case("qwen3_5"),
        "frozen": Case("llava", f"model.freeze=[vision_tower] {PADDED}"),
    },
}


def configure(folder, case, *overrides):
    return load(
        "sft.yaml",
        [
            f"model.path={folder / case.family}",
            "model.images=true",
            f"data.train_files={folder / 'rows.jsonl'}",
            f"output_dir={folder / 'out'}",
            "data.train_batch_size=6",
            "data.max_tokens_per_micro_batch=150",
            f"optim.lr={LR}",
            "optim.lr_scheduler_type=constant",
            "optim.lr_warmup_steps_ratio=0",
            "engine.compute_dtype=float32",
            *case.settings.split(),
            *overrides,
        ],
    )


def rows(folder, config, processor):
    path = tokenize(
        str(folder / "rows.jsonl"),
        AutoTokenizer.from_pretrained(config.model.path),
        config.data,
        folder / "cache" / f"{dist.get_world_size()}",
        config.model.path,
        processor,
    )
    return TokenDataset.load(path, processor)


def loss_of(num_trained):
    def loss_fn(log_probs, entropy, fields):
        return -(log_probs * fields["loss_mask"]).sum() / num_trained, {}

    return loss_fn


def main(folder):
    this_device = device.init()
    results = {}
    for name, case in CASES[dist.get_world_size()].items():
        config = configure(folder, case)
        try:
            with redirect_stdout(StringIO()):
                engine = FSDPEngine(config, this_device, STEPS)
        except InputError as error:
            results[name] = {"error": str(error)}
            continue
        train = rows(folder, config, Processor(config.model.path))
        batch = train.batch(range(len(train)))
        loss_fn = loss_of(int(batch.fields["loss_mask"].sum()))
        steps = []
        for step in range(STEPS):
            share = batch.select(partition(batch.lengths, engine.dp_size)[engine.dp_rank])
            steps.append(engine.train_batch(share, loss_fn, step))
        log_probs = engine.log_probs(batch)[0].cpu()
        export_hf(
            engine,
            AutoTokenizer.from_pretrained(config.model.path),
            folder / f"{dist.get_world_size()} {name}",
        )
        results[name] = {
            "steps": steps,
            "stats": train.stats,
            "input_ids": batch.input_ids.tolist(),
            "lengths": batch.lengths,
            "mask": batch.fields["loss_mask"].tolist(),
        }
        if dist.get_rank() == 0:
            save_file(
                {"log_probs": log_probs}, folder / f"{dist.get_world_size()} {name}.safetensors"
            )
    if dist.get_rank() == 0:
        (folder / f"{dist.get_world_size()}.json").write_text(json.dumps(results))
    device.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
