"""Learning-rate schedules as pure functions of the step, so that a resume has nothing to restore.

Every schedule is a function that is called with these inputs by name, and returns a factor of the
peak learning rate. With **_ in its signature, it ignores inputs that it does not need.

    step         the number of steps since the warm-up, from 0
    total_steps  the number of steps after the warm-up
    decay_steps  optim.lr_decay_steps_ratio times the number of all steps, warm-up included
"""

import math
from collections.abc import Callable

from omegaconf import DictConfig

from common import plugins
from config import InputError, defaults

INPUTS = ("step", "total_steps", "decay_steps")


def constant(step: int, total_steps: int, **_) -> float:
    """Return 1."""
    return 1.0


def linear(step: int, total_steps: int, **_) -> float:
    """Return 1 - t, with t from 0 to 1 over all steps."""
    return 1 - min(1.0, step / max(1, total_steps))


def cosine(step: int, total_steps: int, **_) -> float:
    """Return (1 + cos(pi t)) / 2, with t from 0 to 1 over all steps."""
    return (1 + math.cos(math.pi * min(1.0, step / max(1, total_steps)))) / 2


def wsd(step: int, total_steps: int, *, decay_steps: int, **_) -> float:
    """Return 1, then decay linearly over the last decay_steps (Hu et al. 2024)."""
    decay = min(total_steps, max(1, decay_steps))
    return linear(max(0, step - (total_steps - decay)), decay)


SCHEDULES = {"constant": constant, "linear": linear, "cosine": cosine, "wsd": wsd}


def check_schedule(optim: DictConfig) -> None:
    """Raise InputError for a schedule that cannot be called, and for keys that it does not read."""
    schedule = find_schedule(optim)
    kind = optim.lr_scheduler_type
    reads_decay_steps = "decay_steps" in plugins.parameters(schedule)
    has_default = optim.lr_decay_steps_ratio == defaults("optim").lr_decay_steps_ratio
    if not reads_decay_steps and not has_default:
        raise InputError(
            f"optim.lr_decay_steps_ratio={optim.lr_decay_steps_ratio} has no effect without "
            "optim.lr_scheduler_type=wsd: leave it out"
        )
    if kind == "constant" and optim.min_lr_ratio != 0:
        raise InputError(
            f"optim.min_lr_ratio={optim.min_lr_ratio} has no effect with a constant schedule: "
            "set it to 0"
        )
    factor = schedule(step=0, total_steps=100, decay_steps=10)
    if not isinstance(factor, (int, float)):
        raise InputError(
            f"optim.lr_scheduler_type={kind} returned {factor!r}: it must return a number"
        )


def find_schedule(optim: DictConfig) -> Callable[..., float]:
    """Return the function that optim.lr_scheduler_type names, with its kwargs bound."""
    return plugins.find(
        "optim.lr_scheduler_type",
        optim.lr_scheduler_type,
        SCHEDULES,
        INPUTS,
        "optim.lr_scheduler_kwargs",
        optim.lr_scheduler_kwargs,
    )


def learning_rate(optim: DictConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0) of total_steps.

    In the warm-up: lr * (step + 1) / warm-up steps.
    After it: lr * (min_lr_ratio + (1 - min_lr_ratio) * factor).
    A schedule that decays to a factor of 0 would reach it only in the step after the last one.
    """
    warmup_steps = round(optim.lr_warmup_steps_ratio * total_steps)
    if step < warmup_steps:
        return optim.lr * (step + 1) / warmup_steps
    factor = find_schedule(optim)(
        step=step - warmup_steps,
        total_steps=total_steps - warmup_steps,
        decay_steps=round(optim.lr_decay_steps_ratio * total_steps),
    )
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * factor)
