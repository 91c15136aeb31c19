"""Learning-rate schedules as pure functions of the step, so that a resume has nothing to restore.

Every schedule takes, by name, the step (from 0) and total_steps after the warm-up, decay_steps (optim.lr_decay_steps_ratio
of all steps), and returns the factor of the learning rate, 1 at its peak.
"""

import math
from collections.abc import Callable

from omegaconf import DictConfig

from common import plugins
from config import InputError


def constant(step: int, total_steps: int, **_) -> float:
    return 1.0


def linear(step: int, total_steps: int, **_) -> float:
    """1 - t, with t from 0 to 1 over all steps"""
    return 1 - min(1.0, step / max(1, total_steps))


def cosine(step: int, total_steps: int, **_) -> float:
    """(1 + cos(pi t)) / 2"""
    return (1 + math.cos(math.pi * min(1.0, step / max(1, total_steps)))) / 2


def wsd(step: int, total_steps: int, *, decay_steps: int, **_) -> float:
    """1, and a linear decay over the last decay_steps (Hu et al. 2024)"""
    decay = min(total_steps, max(1, decay_steps))
    return linear(max(0, step - (total_steps - decay)), decay)


SCHEDULES = {"constant": constant, "linear": linear, "cosine": cosine, "wsd": wsd}


def check(optim: DictConfig) -> None:
    """Raise InputError for a schedule that cannot be found or called, and for keys that it does not read."""
    function, kind = named(optim), optim.lr_scheduler_type
    if "decay_steps" not in plugins.parameters(function) and optim.lr_decay_steps_ratio != 0.1:
        raise InputError(
            f"optim.lr_decay_steps_ratio={optim.lr_decay_steps_ratio} has no effect without "
            "optim.lr_scheduler_type=wsd: leave it out"
        )
    if kind == "constant" and optim.min_lr_ratio != 0:
        raise InputError(
            f"optim.min_lr_ratio={optim.min_lr_ratio} has no effect with a constant schedule: set it to 0"
        )
    factor = function(step=0, total_steps=100, decay_steps=10)
    if not isinstance(factor, (int, float)):
        raise InputError(f"optim.lr_scheduler_type={kind} must return a number, not {factor!r}")


def named(optim: DictConfig) -> Callable[..., float]:
    return plugins.find(
        "optim.lr_scheduler_type",
        optim.lr_scheduler_type,
        SCHEDULES,
        ("step", "total_steps", "decay_steps"),
        "optim.lr_scheduler_kwargs",
        optim.lr_scheduler_kwargs,
    )


def learning_rate(optim: DictConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of total_steps.

    Warm-up: lr * (step + 1) / warm-up steps. Then lr * (min_lr_ratio + (1 - min_lr_ratio) * factor): a schedule whose
    factor ends at 0 would have min_lr_ratio in the step after the last one.
    """
    warmup = round(optim.lr_warmup_steps_ratio * total_steps)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    factor = named(optim)(
        step=step - warmup,
        total_steps=total_steps - warmup,
        decay_steps=round(optim.lr_decay_steps_ratio * total_steps),
    )
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * factor)
