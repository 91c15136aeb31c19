"""The teacher of train_sft.py. The student learns its distributions on the answers in the data.

At each trained token, the student's distribution is compared with the distribution of a frozen
teacher, which sees the same tokens (Hinton et al. 2015). The loss is the sum of the cross-entropy
and distill.coef times the mean divergence; with distill.only, it is only the latter term.
"""

from typing import Any

from omegaconf import DictConfig
from torch import Tensor

from config import CONFIGS, InputError
from configs.errors import errors_about_model
from configs.files import read_defaults
from engines.base import Engine, LossFn
from engines.build import engine_class
from engines.teacher_settings import (
    ROLE,
    is_self_taught,
    teacher_roles,
    uses_teacher,
)
from engines.teaching import (
    Teachers,
    check_teacher_layout,
    check_top_k,
    check_vocabulary,
    teacher_config,
)


def role_configs(config: DictConfig) -> dict[str | None, DictConfig]:
    """Return the configuration of each engine by role: None for the student, and the teacher's."""
    roles: dict[str | None, DictConfig] = {None: config}
    for role, path in teacher_roles(config).items():
        roles[role] = teacher_config(config, path)
    return roles


def check_distillation(config: DictConfig) -> None:
    """Raise InputError for settings of a teacher that have no effect."""
    if is_self_taught(config):
        raise InputError(
            "distill.teacher=self does not work in train_sft.py, where the model would be its own "
            "teacher with the same prompt: name another model, or use train_ppo.py with "
            "data.teacher_prompt_key"
        )
    if uses_teacher(config):
        check_divergence_is_alone(config)
        return
    for key, default in read_defaults(CONFIGS / "sft.yaml").distill.items():
        value = config.distill[key]
        if value != default:
            raise InputError(
                f"distill.{key}={value} does nothing without distill.teacher: leave it out"
            )


def check_divergence_is_alone(config: DictConfig) -> None:
    """Raise InputError if distill.only leaves out one loss of the answers, but not another one."""
    mtp = config.model.mtp
    if config.distill.only and mtp.enable_train and not mtp.detach_encoder:
        raise InputError(
            "distill.only=true makes the divergence the whole loss, but with "
            "model.mtp.enable_train=true the model also learns the answers through its MTP layers: "
            "set model.mtp.detach_encoder=true, so that only these layers do, or distill.only=false"
        )


def check_models(config: DictConfig, world_size: int) -> Any:
    """Check the models, and return the Hugging Face configuration of the student.

    Raises InputError for a model that its engine cannot run, and for a teacher with another
    vocabulary.
    """
    check = engine_class(config.model_engine).check
    check_teacher_layout(config, world_size)
    roles = role_configs(config)
    hf_configs = {}
    for role, settings in roles.items():
        key = "distill.teacher" if role == ROLE else "model.path"
        with errors_about_model(key, settings.model.path):
            hf_configs[role] = check(settings, world_size)
    student = hf_configs[None]
    if ROLE in hf_configs:
        path = config.distill.teacher
        num_teacher_tokens = hf_configs[ROLE].vocab_size
        check_top_k(config, min(student.vocab_size, num_teacher_tokens))
        name = f"distill.teacher={path}"
        check_vocabulary(config, name, path, student.vocab_size, num_teacher_tokens)
    return student


def build_teachers(config: DictConfig, student: Engine, num_steps: int) -> Teachers | None:
    """Build the engine of the teacher; None without one."""
    if not uses_teacher(config):
        return None
    build = engine_class(config.model_engine)
    settings = role_configs(config)[ROLE]
    engine = build(settings, student.device, num_steps, optimize=False)
    return Teachers(config, [engine], student, offloaded=[])


def distillation_loss(config: DictConfig, num_tokens: int) -> LossFn:
    """Return the student's loss function. It reads the field `divergence`, which the engine adds.

    It returns the contribution of one micro-batch; the contributions add up to means.

    Args:
        num_tokens: number of trained tokens in the whole batch, over all ranks.
    """
    distill = config.distill

    def loss_fn(
        log_probs: Tensor, entropy: Tensor, fields: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        weight = fields["loss_mask"] / num_tokens
        cross_entropy = -(log_probs * weight).sum()
        divergence = (fields["divergence"] * weight).sum()
        loss = distill.coef * divergence
        if not distill.only:
            loss = loss + cross_entropy
        amounts = {
            "entropy": (entropy.detach() * weight).sum(),
            "cross_entropy": cross_entropy.detach(),
            "distill/divergence": divergence.detach(),
        }
        return loss, amounts

    return loss_fn
