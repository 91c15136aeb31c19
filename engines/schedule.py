"""Learning-rate schedules as pure functions of the step, so that a resume has nothing to restore."""

import math

from omegaconf import DictConfig

from config import InputError


def check(optim: DictConfig) -> None:
    """Raise InputError for what the schedule does not read."""
    if optim.lr_scheduler_type != "wsd" and optim.lr_decay_steps_ratio != 0.1:
        raise InputError(f"optim.lr_decay_steps_ratio={optim.lr_decay_steps_ratio} has no effect without "
                         "optim.lr_scheduler_type=wsd: leave it out")
    if optim.lr_scheduler_type == "constant" and optim.min_lr_ratio != 0:
        raise InputError(f"optim.min_lr_ratio={optim.min_lr_ratio} has no effect with a constant schedule: set it to 0")


def learning_rate(optim: DictConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of total_steps.

    Warm-up: lr * (step + 1) / warm-up steps. Then, with t from 0 to 1 over the rest: constant 1; linear 1 - t;
    cosine (1 + cos(pi t)) / 2; wsd (Hu et al. 2024) 1, and linear decay over the last lr_decay_steps_ratio of all
    steps; each scaled so that the step after the last one would have min_lr_ratio.
    """
    warmup = round(optim.lr_warmup_steps_ratio * total_steps)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    decay = total_steps - warmup
    if optim.lr_scheduler_type == "wsd":
        decay = min(decay, max(1, round(optim.lr_decay_steps_ratio * total_steps)))
    t = min(1.0, max(0.0, (step - (total_steps - decay)) / max(1, decay)))
    shape = {"constant": 1.0, "linear": 1 - t, "wsd": 1 - t, "cosine": (1 + math.cos(math.pi * t)) / 2}
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * shape[optim.lr_scheduler_type])
