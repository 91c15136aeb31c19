"""LoRA (Hu et al. 2021): y = W x + alpha / rank * B A x, with a frozen W and an adapter A, B.

This file is shared by both engines. It chooses the matrices that get adapters, initialises the
adapters, and reads and writes PEFT's files.

Adapters have the names of PEFT's files, without their prefix: for example
model.layers.0.self_attn.q_proj.lora_A.weight [rank, in features] and lora_B [out features, rank].
"""

import json
import re
import zlib
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from config import InputError, defaults
from engines.heads import Head
from engines.model.classifier import SCORE
from engines.model.experts import expert_weights

# The prefix of names in PEFT's files.
PREFIX = "base_model.model."

# Keys of adapter_config.json that change the formula, with their values for plain LoRA.
PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "lora_bias": False,
    "layer_replication": None,
    "use_qalora": False,
    "alora_invocation_tokens": None,
}
# Keys that do not change the formula. Any other key may belong to a newer variant of LoRA in PEFT.
HARMLESS = (
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "megatron_config",
    "megatron_core",
    "qalora_group_size",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "runtime_config",
    "ensure_weight_tying",
    "init_lora_weights",
)
# Values of init_lora_weights that do not modify the frozen weights.
SUPPORTED_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


def plain_name(name: str) -> str:
    """Return a parameter's name in the files, given its name in a model after inject()."""
    return name.replace(".base_layer.", ".").replace(".default.", ".")


# -- adapters in a model -------------------------------------------------------------------------


def check_config(config: DictConfig, hf: nn.Module) -> None:
    """Raise InputError for settings of model.lora that have no effect or cannot work.

    Args:
        hf: the model on the meta device. This function adds adapters to it.
    """
    lora = config.model.lora
    if not lora.rank:
        for key, default in defaults("model.lora").items():
            if lora.get(key, default) != default:
                raise InputError(
                    f"model.lora.{key}={lora[key]} does nothing with model.lora.rank=0: give "
                    "model.lora.rank"
                )
        return
    if lora.target_modules == "all-linear" and expert_weights(hf):
        raise InputError(
            "model.lora.target_modules=all-linear would adapt experts and routers too, which is "
            "not supported: give model.lora.target_modules=[q_proj, k_proj, v_proj, o_proj]"
        )
    inject(hf, lora)
    if lora.adapter_path:
        read(lora, shapes(hf))


def inject(hf: nn.Module, lora: DictConfig, head: Head = Head.LOG_PROBS) -> list[nn.Module]:
    """Let PEFT add adapters to a model's linear layers, on the meta device.

    All other parameters are frozen, except for a value head, which gets the adapters' dtype.

    Returns:
        The layers that have an adapter.

    Raises:
        InputError: if a name in the settings matches anything but linear layers in decoder layers.
    """
    from peft.tuners.lora import Linear  # imported here because it is slow

    inject_with_peft(hf, lora)
    layers = {name: module for name, module in hf.named_modules() if isinstance(module, Linear)}
    check_adapted_layers(hf, lora, layers)
    check_names(hf, lora)

    dtype = getattr(torch, lora.dtype)
    for name, parameter in hf.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    for layer in layers.values():
        layer.cast_input_dtype_enabled = False
        for matrix in (*layer.lora_A.values(), *layer.lora_B.values()):
            matrix.to(dtype).__class__ = CastLinear
    if head is Head.VALUES:
        hf.get_output_embeddings().to(dtype).requires_grad_()
    return list(layers.values())


def inject_with_peft(hf: nn.Module, lora: DictConfig) -> None:
    """Add adapters; raise InputError in one line if PEFT rejects the settings."""
    from peft import LoraConfig, inject_adapter_in_model

    settings = OmegaConf.to_container(lora)
    try:
        peft_config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=settings["target_modules"],
            exclude_modules=settings["exclude_modules"] or None,
        )
        inject_adapter_in_model(peft_config, hf, low_cpu_mem_usage=True)
    except (ValueError, re.error) as error:
        # If PEFT cannot adapt a module, its message contains the whole module after "(\n".
        reason, separator, _ = str(error).partition("(\n")
        if separator:
            reason += " is not a linear layer"
        raise InputError(f"model.lora.target_modules={lora.target_modules}: {reason}") from None


def check_adapted_layers(hf: nn.Module, lora: DictConfig, layers: dict[str, nn.Module]) -> None:
    """Raise InputError if anything but linear layers in decoder layers has an adapter.

    Args:
        layers: the linear layers with an adapter, by name.
    """
    decoder_layers = [
        module for module in hf.modules() if type(module).__name__ in hf._no_split_modules
    ]
    inside = {module for layer in decoder_layers for module in layer.modules()}
    adapted = [name.split(".lora_")[0] for name, _ in hf.named_parameters() if ".lora_" in name]
    unsupported = [name for name in adapted if name not in layers]
    # fan_in_fan_out: GPT-2's Conv1D, whose matrix is transposed.
    unsupported += [
        name for name, module in layers.items() if module not in inside or module.fan_in_fan_out
    ]
    if unsupported:
        raise InputError(
            f"model.lora.target_modules={lora.target_modules} names {unsupported[0]}: adapters "
            "are supported only for linear layers (nn.Linear) in decoder layers; exclude other "
            "modules with model.lora.exclude_modules"
        )


def check_names(hf: nn.Module, lora: DictConfig) -> None:
    """Raise InputError if a name in the settings is not the name of a linear layer.

    PEFT would silently ignore the name of a larger module, such as `mlp`.
    """
    from peft.tuners.lora import Linear

    linear_layers = [
        f".{name}" for name, module in hf.named_modules() if isinstance(module, (nn.Linear, Linear))
    ]
    settings = OmegaConf.to_container(lora)
    for key in ("target_modules", "exclude_modules"):
        names = settings[key] if isinstance(settings[key], list) else ()
        for name in names:
            if not any(layer.endswith(f".{name}") for layer in linear_layers):
                raise InputError(f"model.lora.{key}: the model has no linear layer named {name}")


class CastLinear(nn.Linear):
    """A linear layer that computes in the dtype of its input.

    PEFT would compute in the adapter's dtype. That is fp32, which is slow.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def shapes(hf: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each adapter matrix by name. Call this after inject()."""
    return {
        plain_name(name): tuple(parameter.shape)
        for name, parameter in hf.named_parameters()
        if ".lora_" in name
    }


# -- values --------------------------------------------------------------------------------------


def initial_adapter(
    lora: DictConfig, shapes: dict[str, tuple[int, ...]], seed: int
) -> dict[str, Tensor]:
    """Return the unsharded adapter matrices before the first step, by name.

    They are read from model.lora.adapter_path if it is set, and initialised otherwise.
    """
    if lora.adapter_path:
        return read(lora, shapes)
    return {name: initial_matrix(name, shape, seed) for name, shape in shapes.items()}


def initial_matrix(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Initialise an adapter matrix in fp32, independently of the engine and the layout of ranks.

    As in PEFT, B is zero, and A is uniform in +-1 / sqrt(in features).
    """
    if "lora_B" in name:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return nn.init.kaiming_uniform_(torch.empty(shape), a=5**0.5, generator=generator)


def merge(weight: Tensor, a: Tensor, b: Tensor, lora: DictConfig) -> Tensor:
    """Return W + alpha / rank * B A, computed in fp32, in the dtype of W."""
    scale = lora.alpha / lora.rank
    merged = torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)
    return merged.to(weight.dtype)


# -- PEFT's files --------------------------------------------------------------------------------


def read(lora: DictConfig, expected: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Read the adapter in model.lora.adapter_path.

    Args:
        expected: the shape of each matrix by name.

    Raises:
        InputError: if the adapter is not plain LoRA, or differs in rank, alpha or layers from the
            settings in model.lora.
    """
    path = Path(lora.adapter_path)
    try:
        settings = json.loads((path / "adapter_config.json").read_text())
        tensors = {
            name.removeprefix(PREFIX): tensor
            for name, tensor in load_file(path / "adapter_model.safetensors").items()
        }
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(
            f"model.lora.adapter_path={path} is not a directory with a PEFT adapter: {error}"
        ) from None
    check_is_plain(settings, path)
    rank = settings.get("r")
    alpha = settings.get("lora_alpha")
    if (rank, alpha) != (lora.rank, lora.alpha):
        raise InputError(
            f"model.lora.adapter_path={path} has r={rank} and lora_alpha={alpha}: give "
            f"model.lora.rank={rank} model.lora.alpha={alpha}"
        )
    in_file = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    names = expected.keys() | in_file.keys()
    different = [name for name in names if expected.get(name) != in_file.get(name)]
    if different:
        raise InputError(
            f"model.lora.adapter_path={path} and "
            f"model.lora.target_modules={lora.target_modules} differ in {len(different)} "
            f"matrices, such as {min(different)}"
        )
    return tensors


def check_is_plain(settings: dict, path: Path) -> None:
    """Raise InputError if adapter_config.json describes a variant of LoRA."""
    unsupported = [
        f"{key}={value}"
        for key, value in settings.items()
        if key not in HARMLESS and value and value != PLAIN.get(key)
    ]
    init = settings.get("init_lora_weights")
    if init not in SUPPORTED_INITS:
        unsupported.append(f"init_lora_weights={init}")
    alpha = settings.get("lora_alpha")
    if isinstance(alpha, float) and not alpha.is_integer():
        unsupported.append(f"lora_alpha={alpha}")
    if unsupported:
        raise InputError(
            f"model.lora.adapter_path={path}: {unsupported[0]} in adapter_config.json is not "
            "supported"
        )


def write(
    adapter: Iterable[tuple[str, Tensor]],
    lora: DictConfig,
    base: str,
    directory: Path,
    is_part: bool = False,
) -> None:
    """Write adapter_model.safetensors and adapter_config.json for PEFT and vLLM.

    The score head of a reward model is not an adapter: PEFT loads it as a whole.

    Args:
        base: the absolute path or the hub name of the frozen model.
        is_part: whether `base` also contains other modules, such as a vision tower. Their layers
            may have the same last names as the adapted layers.
    """
    tensors = {PREFIX + name: tensor.cpu().contiguous() for name, tensor in adapter}
    is_classifier = PREFIX + SCORE in tensors
    modules = {name.removeprefix(PREFIX).split(".lora_")[0] for name in tensors if ".lora_" in name}
    if selects_by_last_name(lora) and not is_part:
        modules = {name.rpartition(".")[2] for name in modules}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        **PLAIN,
        "task_type": "SEQ_CLS" if is_classifier else "CAUSAL_LM",
        "modules_to_save": ["score"] if is_classifier else None,
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(modules),
        "inference_mode": True,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (directory / "adapter_config.json").write_text(text)


def selects_by_last_name(lora: DictConfig) -> bool:
    """Return whether all layers with the same last name, such as q_proj, have adapters.

    This is false if the settings name a single layer, such as layers.0.self_attn.q_proj, or exclude
    modules.
    """
    if lora.exclude_modules:
        return False
    targets = lora.target_modules
    if isinstance(targets, str):
        return targets == "all-linear"
    return not any("." in name for name in targets)
