"""The conditions under which keys have an effect, from the comments of configs/ppo.yaml.

Setting a key that has no effect in this run is an error. The key's comment has the condition:

    kl_loss_coef: 0.001   # coefficient of the divergence (needs algorithm.use_kl_loss=true)

A requirement is one condition, or several joined by "or":

    (needs algorithm.use_kl_loss=true)           a key has this value
    (needs rollout.speculative)                  a key is set: neither null, none, false nor {}
    (needs validation.temperature above 0)       a key is larger than a number
    (needs an adv_estimator that reads gamma)    the function in this key reads an input

A comment may have several requirements, which must all be met. The requirement of a group, in the
comment next to its name, applies to each of its keys.

The last form may name two keys and two inputs: "an adv_estimator or loss_mode that reads rewards or
outcome". One of the functions must then read one of the inputs.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from config import CONFIGS, InputError, default_keys
from configs.files import flatten, read_comments
from rl.functions import FUNCTIONS, built_in_readers, inputs_read

REQUIREMENT = re.compile(r"\(needs ([^()]*)\)")
UNSET = (None, "none", False)

FORMS = {
    "reads": re.compile(r"an? (\w+)(?: or (\w+))? that reads (\w+)(?: or (\w+))?"),
    "above": re.compile(r"([\w.]+) above (\d+)"),
    "equals": re.compile(r"([\w.]+)=(\w+)"),
    "is set": re.compile(r"\w+\.[\w.]+"),
}


@dataclass(frozen=True)
class Condition:
    """One alternative of a requirement.

    text   the condition as written in the comment
    form   a key of FORMS
    parts  the matched groups of the form's pattern; None for a group that is missing
    """

    text: str
    form: str
    parts: tuple[str | None, ...]

    def holds(self, config: DictConfig) -> bool:
        """Return whether the configuration meets this condition."""
        if self.form == "reads":
            function_keys, inputs = self._reading()
            return bool(inputs & inputs_read(config, *function_keys))
        if self.form == "is set":
            value = OmegaConf.select(config, self.text)
            return value not in UNSET and value != {}
        key, operand = self.parts
        value = OmegaConf.select(config, key)
        if self.form == "above":
            return value > float(operand)
        return str(value).lower() == operand

    def describe(self) -> str:
        """Describe the condition for an error message, with the built-in functions that meet it."""
        if self.form != "reads":
            return self.text
        function_keys, inputs = self._reading()
        described = []
        for key in function_keys:
            readers = [name for name in FUNCTIONS[key].built_in if reads_any(key, name, inputs)]
            if readers and len(inputs) == 1:
                described.append(f"algorithm.{key}={' or '.join(readers)}")
        return " or ".join(described) or self.text

    def _reading(self) -> tuple[list[str], set[str]]:
        """Return the keys of the functions, and the inputs; one function must read one input."""
        function_keys = [key for key in self.parts[:2] if key]
        inputs = {name for name in self.parts[2:] if name}
        return function_keys, inputs


def reads_any(key: str, name: str, inputs: set[str]) -> bool:
    """Return whether a built-in function of algorithm.{key} reads one of the inputs."""
    return any(name in built_in_readers(key, input_name) for input_name in inputs)


def parse(text: str) -> list[Condition]:
    """Return the alternatives of a requirement.

    Raises ValueError if the text matches none of the forms.
    """
    conditions = []
    rest = text
    while rest:
        condition, rest = parse_first(rest)
        conditions.append(condition)
    return conditions


def parse_first(text: str) -> tuple[Condition, str]:
    """Return the first condition of a requirement, and the text after the "or" that follows it."""
    for form, pattern in FORMS.items():
        match = pattern.match(text)
        if match is None:
            continue
        rest = text[match.end() :]
        if not rest or rest.startswith(" or "):
            return Condition(match[0], form, match.groups()), rest.removeprefix(" or ")
    raise ValueError(f"no condition begins with {text!r}: rl/requirements.py lists the forms")


@cache
def read_requirements(path: Path) -> list[tuple[str, list[Condition]]]:
    """Return (key or group, alternative conditions) for each requirement in a file's comments.

    Do not change the result.
    """
    requirements = []
    for key, comment in read_comments(path).items():
        for text in REQUIREMENT.findall(comment):
            requirements.append((key, parse(text)))
    return requirements


def check_keys_have_an_effect(config: DictConfig) -> None:
    """Raise InputError for a key that differs from its default although nothing reads it."""
    defaults = default_keys("ppo.yaml", config.model_engine)
    values = flatten(config)
    for name, conditions in read_requirements(CONFIGS / "ppo.yaml"):
        if any(condition.holds(config) for condition in conditions):
            continue
        for key, value in values.items():
            is_concerned = key == name or key.startswith(f"{name}.")
            if is_concerned and value != defaults[key]:
                needed = " or ".join(condition.describe() for condition in conditions)
                raise InputError(f"{key}={value} does nothing without {needed}: leave it out")
