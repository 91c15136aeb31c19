"""Which teachers a run has: the keys of the group `distill` (train_ppo.py: `algorithm.distill`).

teacher   one model, or "self": the student with another prompt
teachers  several models by name
"""

from omegaconf import DictConfig, OmegaConf

SELF = "self"
ROLE = "teacher"  # several teachers have the roles "teacher NAME"


def distill_group(config: DictConfig) -> str:
    """Return the full name of the group `distill`."""
    return "algorithm.distill" if "algorithm" in config else "distill"


def distill_settings(config: DictConfig) -> DictConfig | None:
    """Return the group of keys; None for a script that has none."""
    return OmegaConf.select(config, distill_group(config))


def uses_teacher(config: DictConfig) -> bool:
    """Return whether the loss contains the divergence from a teacher."""
    distill = distill_settings(config)
    return distill is not None and (distill.teacher is not None or has_several(config))


def has_several(config: DictConfig) -> bool:
    """Return whether each row names its teacher."""
    return bool(distill_settings(config).get("teachers"))


def is_self_taught(config: DictConfig) -> bool:
    """Return whether the teacher is the student itself, with another prompt."""
    distill = distill_settings(config)
    return distill is not None and distill.teacher == SELF


def teacher_paths(config: DictConfig) -> dict[str, str]:
    """Return configuration key -> path for each teacher that is not the student, in order."""
    distill = distill_settings(config)
    if distill is None or not uses_teacher(config) or is_self_taught(config):
        return {}
    group = distill_group(config)
    if not has_several(config):
        return {f"{group}.teacher": distill.teacher}
    return {f"{group}.teachers.{name}": path for name, path in distill.teachers.items()}


def teacher_roles(config: DictConfig) -> dict[str, str]:
    """Return role -> path for each teacher that is not the student, in order."""
    paths = teacher_paths(config).values()
    roles = [ROLE]
    if uses_teacher(config) and has_several(config):
        roles = [f"{ROLE} {name}" for name in distill_settings(config).teachers]
    return dict(zip(roles, paths))


def is_frozen(role: str | None) -> bool:
    """Return whether the model of a role is never trained."""
    if role is None:
        return False
    return role in ("reference", "reward model") or role.partition(" ")[0] == ROLE
