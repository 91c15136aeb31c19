"""Helpers of the scripts that run TRL: optimizer options, and the result as a JSON line.

They may run in an environment that has TRL and lacks this repository's requirements, so only
harness.py may be imported from here.
"""

import argparse
import json
import os
from pathlib import Path

import torch


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def is_on_cpu() -> bool:
    return not torch.cuda.is_available()


def add_optimizer_options(parser: argparse.ArgumentParser, lr: float, weight_decay: float) -> None:
    """Take the options of AdamW, with defaults for these two."""
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.95))
    parser.add_argument("--eps", type=float, default=1e-8)
    parser.add_argument("--weight-decay", type=float, default=weight_decay)
    parser.add_argument("--clip-grad", type=float, default=1.0)


def trainer_settings(arguments: argparse.Namespace, scratch: str) -> dict:
    """Return arguments of transformers' TrainingArguments that are the same for both trainers.

    scratch: an empty folder, since a trainer wants one even if it saves nothing.
    """
    on_cpu = is_on_cpu()
    return {
        "output_dir": scratch,
        "use_cpu": on_cpu,
        "ddp_backend": "gloo" if on_cpu and world_size() > 1 else None,
        "dataloader_pin_memory": not on_cpu,
        "gradient_checkpointing": False,
        "max_steps": arguments.steps,
        "optim": "adamw_torch_fused",
        "learning_rate": arguments.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": arguments.betas[0],
        "adam_beta2": arguments.betas[1],
        "adam_epsilon": arguments.eps,
        "weight_decay": arguments.weight_decay,
        "max_grad_norm": arguments.clip_grad,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def report(result: dict, out: Path | None) -> None:
    """Print the result as one line of JSON on rank 0, and write it to a file if there is one."""
    if int(os.environ.get("RANK", 0)) > 0:
        return
    line = json.dumps(result)
    print(line)
    if out:
        out.write_text(line + "\n")
