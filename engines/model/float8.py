"""engine.float8: the linear layers of a decoder multiply in 8-bit floating point (FP8), by torchao.

A matrix product reads both factors in FP8 and returns the compute dtype. Each factor is divided by
a scale first, so that its largest value is the largest that FP8 can represent:

* tensorwise: one scale per matrix. Factors of the forward pass are in E4M3 (3 bits of mantissa),
  gradients in E5M2 (2 bits, more range). The scale of the activations depends on all tokens of a
  micro-batch, and so, by rounding, does every token's output.
* rowwise: one scale per row of the first factor and per column of the second, in E4M3, rounded down
  to powers of two. In the forward pass a token's output depends on this token alone.

Weights, gradients, moments, checkpoints and exports do not change: weights are cast to FP8 in every
pass, with engine.float8_cache_weights once per batch (engines/fsdp/float8_cache.py), or with
engine.float8_all_gather when they are gathered (engines/fsdp/float8_gather.py). The output matrix,
routers, experts, adapters and a vision tower keep the compute dtype.

See "FP8 Formats for Deep Learning" (Micikevicius et al. 2022, arXiv:2209.05433).
"""

import importlib.util
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from common.counting import count_of
from config import InputError
from configs.environment import is_rank0
from engines.model.experts import router_modules
from engines.model.hf import layer_modules
from engines.model.lora import plain_name

# The sizes of a matrix must be multiples of this, for the GPU's FP8 instructions.
MULTIPLE = 16
# The first NVIDIA GPUs with FP8 instructions: Ada and Hopper.
MIN_CAPABILITY = (8, 9)


def is_used(config: DictConfig) -> bool:
    """Return whether this run has layers in FP8. Only the FSDP engine has the setting."""
    return config.engine.get("float8", "none") != "none"


# -- checks ----------------------------------------------------------------------------------------


def check(hf: nn.Module, config: DictConfig, reports: bool = False) -> None:
    """Check the settings, before any weights are read.

    Args:
        hf: the model on the meta device, with or without adapters.
        reports: whether rank 0 prints how many layers multiply in FP8.

    Raises:
        InputError: if this machine or this model cannot multiply in FP8, or a setting does nothing.
    """
    engine = config.engine
    if engine.get("float8_cache_weights") and engine.float8 != "tensorwise":
        raise InputError(
            "engine.float8_cache_weights=true needs engine.float8=tensorwise, not "
            f"{engine.float8}: set it, or leave float8_cache_weights out"
        )
    if not is_used(config):
        if engine.get("float8_exclude"):
            raise InputError(
                f"engine.float8_exclude={list(engine.float8_exclude)} does nothing with "
                "engine.float8=none: leave it out, or set engine.float8"
            )
        return
    setting = f"engine.float8={engine.float8}"
    check_machine(setting)
    check_patterns(engine.float8_exclude, linear_layers(hf))
    if not chosen_layers(hf, engine.float8_exclude):
        raise InputError(
            f"{setting}: no linear layer of the decoder is left to multiply in FP8, which needs "
            f"matrices whose sizes are multiples of {MULTIPLE}"
        )
    if reports and is_rank0():
        report(hf, config)


def report(hf: nn.Module, config: DictConfig) -> None:
    """Print how many layers multiply in FP8, and which cannot."""
    engine = config.engine
    candidates = linear_layers(hf)
    odd = {name: layer for name, layer in candidates.items() if not has_fitting_sizes(layer)}
    emulated = "" if torch.cuda.is_available() else ", emulated on this device"
    num_chosen = len(chosen_layers(hf, engine.float8_exclude))
    print(
        f"engine.float8={engine.float8}: {num_chosen} of "
        f"{count_of(len(candidates), 'linear layer')} of the decoder multiply in FP8{emulated}"
    )
    if odd:
        name, layer = next(iter(odd.items()))
        print(
            f"engine.float8={engine.float8}: {count_of(len(odd), 'linear layer')} cannot, since "
            f"FP8 needs sizes that are multiples of {MULTIPLE}, such as {name} "
            f"{list(layer.weight.shape)}"
        )


def check_machine(setting: str) -> None:
    """Raise InputError if torchao is not installed, or the accelerator cannot multiply in FP8."""
    if importlib.util.find_spec("torchao") is None:
        raise InputError(
            f"{setting} needs torchao: pip install --no-deps -r requirements-float8.txt"
        )
    check_accelerator(setting)


def check_accelerator(setting: str) -> None:
    """Raise InputError if the accelerator cannot multiply in FP8. A CPU can, slowly.

    Args:
        setting: "key=value", for the beginning of the error message.
    """
    if not torch.accelerator.is_available():
        return
    if torch.accelerator.current_accelerator().type != "cuda":
        raise InputError(f"{setting} needs NVIDIA GPUs: leave it out")
    if torch.cuda.get_device_capability() < MIN_CAPABILITY:
        raise InputError(
            f"{setting}: {torch.cuda.get_device_name()} has no FP8 instructions, unlike Ada (L40S) "
            "and Hopper (H100): leave it out"
        )


def check_patterns(patterns: Iterable[str], candidates: Iterable[str]) -> None:
    """Raise InputError for a pattern that is not a regular expression or matches no layer."""
    for pattern in patterns:
        try:
            matches = any(re.search(pattern, name) for name in candidates)
        except re.error as error:
            raise InputError(
                f"engine.float8_exclude: {pattern!r} is not a regular expression: {error}"
            ) from error
        if not matches:
            raise InputError(
                f"engine.float8_exclude: {pattern!r} matches no linear layer of the decoder, such "
                f"as {next(iter(candidates), None)}"
            )


# -- layers ----------------------------------------------------------------------------------------


def linear_layers(hf: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers in the decoder's layers, by their names in the files.

    Routers are left out. So are adapters, whose class is not nn.Linear itself.
    """
    decoder_layers = layer_modules(hf, hf.get_decoder())
    in_decoder = {module for layer in decoder_layers for module in layer.modules()}
    in_routers = {module for router in router_modules(hf) for module in router.modules()}
    return {
        plain_name(f"{name}.weight").removesuffix(".weight"): module
        for name, module in hf.named_modules()
        if type(module) is nn.Linear and module in in_decoder and module not in in_routers
    }


def chosen_layers(hf: nn.Module, excluded: Iterable[str]) -> dict[str, nn.Linear]:
    """Return the layers that multiply in FP8: sizes fit, and no pattern matches the name."""
    chosen = linear_layers(hf)
    for pattern in excluded:
        chosen = {name: layer for name, layer in chosen.items() if not re.search(pattern, name)}
    return {name: layer for name, layer in chosen.items() if has_fitting_sizes(layer)}


def has_fitting_sizes(layer: nn.Linear) -> bool:
    return layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0


def gathered_layers(
    layers: Iterable[nn.Linear], recurrent_layers: Iterable[nn.Module], num_shards: int
) -> list[nn.Linear]:
    """Return the layers in FP8 whose weights can also be gathered in FP8.

    Each rank needs the same number of a weight's rows, since FSDP2 would have to pad them.
    Recurrent layers read some of their weights without calling the linear layer, so all of theirs
    are left out.
    """
    in_recurrent = {module for layer in recurrent_layers for module in layer.modules()}
    return [
        layer
        for layer in layers
        if layer.out_features % num_shards == 0 and layer not in in_recurrent
    ]


def convert_layers(hf: nn.Module, config: DictConfig, device_type: str) -> None:
    """Make the chosen layers multiply in FP8. Their parameters stay the same objects.

    On devices other than NVIDIA's, torchao emulates the instructions: it rounds to FP8, and
    multiplies in the compute dtype.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name(config.engine.float8)
    # A weight's gradient sums over tokens, whose number need not be a multiple of 16.
    float8_config = replace(recipe, pad_inner_dim=True, emulate=device_type != "cuda")
    chosen = {*chosen_layers(hf, config.engine.float8_exclude).values()}
    convert_to_float8_training(
        hf, module_filter_fn=lambda module, _: module in chosen, config=float8_config
    )


@contextmanager
def disabled(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within this block, all layers of these modules multiply in the compute dtype.

    For checks that compare results up to the rounding error of the compute dtype. Do not run
    compiled layers within the block.
    """
    layers = []
    for root in modules:
        layers += [layer for layer in root.modules() if is_float8(layer)]
    float8_classes = [type(layer) for layer in layers]
    for layer in layers:
        layer.__class__ = PlainLinear
    try:
        yield
    finally:
        for layer, float8_class in zip(layers, float8_classes):
            layer.__class__ = float8_class


class PlainLinear(nn.Linear):
    """A linear layer that multiplies in the compute dtype, even if its weight is in FP8."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if hasattr(weight, "to_original_precision"):  # torchao's tensor
            weight = weight.to_original_precision()
        return F.linear(x, weight, self.bias)


def is_float8(module: nn.Module) -> bool:
    """Return whether this is torchao's layer or derived from it. Does not import torchao."""
    return any(base.__name__ == "Float8Linear" for base in type(module).__mro__)
