"""LoRA (Hu et al. 2021): a frozen matrix W and its adapter, y = W x + alpha / rank * B A x. What both engines share: which
matrices get adapters, what adapters begin with, and PEFT's files.

Adapters are named as in PEFT's files, without its prefix: model.layers.0.self_attn.q_proj.lora_A.weight [rank, in features],
and lora_B [out features, rank].
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
from engines.model.experts import stacks

PREFIX = "base_model.model."
# Of adapter_config.json: what would make another adapter of the same two matrices,
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
# and what would not. Any other key that is set may be a variant that PEFT has since got.
HARMLESS = """task_type auto_mapping peft_version base_model_name_or_path revision inference_mode r lora_alpha lora_dropout
    target_modules exclude_modules layers_to_transform layers_pattern megatron_config megatron_core qalora_group_size
    loftq_config eva_config corda_config lora_ga_config runtime_config ensure_weight_tying init_lora_weights""".split()
# Of init_lora_weights: those after which the frozen weights are still the model's own.
INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


def inject(hf: nn.Module, lora: DictConfig, head: Head = Head.LOG_PROBS) -> list[nn.Module]:
    """Let PEFT put adapters, without memory, beside a model's linear layers; returns the layers that have one. All of the model
    is frozen but for them, and for a value head, which gets their dtype. Raises InputError for names that mean no
    linear layer of a decoder layer."""
    from peft import LoraConfig, inject_adapter_in_model  # slow: only for those who use it
    from peft.tuners.lora import Linear

    keys = OmegaConf.to_container(lora)
    try:
        inject_adapter_in_model(
            LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,
                lora_dropout=lora.dropout,
                target_modules=keys["target_modules"],
                exclude_modules=keys["exclude_modules"] or None,
            ),
            hf,
            low_cpu_mem_usage=True,
        )
    except (ValueError, re.error) as error:
        reason, _, block = str(error).partition(
            "(\n"
        )  # PEFT prints all of a module that it cannot adapt
        raise InputError(
            f"model.lora.target_modules={lora.target_modules}: {reason}"
            f"{' is no linear layer' * bool(block)}"
        ) from None
    layers = {name: module for name, module in hf.named_modules() if isinstance(module, Linear)}
    inside = [
        m
        for layer in hf.modules()
        if type(layer).__name__ in hf._no_split_modules
        for m in layer.modules()
    ]
    strange = [
        name
        for name, p in hf.named_parameters()
        if ".lora_" in name and name.split(".lora_")[0] not in layers
    ]
    # Conv1D, of GPT-2, has its matrix the other way round.
    strange += [
        name for name, module in layers.items() if module not in inside or module.fan_in_fan_out
    ]
    if strange:
        raise InputError(
            f"model.lora.target_modules={lora.target_modules} names {strange[0].split('.lora_')[0]}: adapters "
            "belong to the linear layers of decoder layers (nn.Linear); model.lora.exclude_modules leaves others out"
        )
    linear = [
        f".{name}" for name, module in hf.named_modules() if isinstance(module, (nn.Linear, Linear))
    ]
    for key in ("target_modules", "exclude_modules"):
        for given in keys[key] if isinstance(keys[key], list) else ():
            if not any(
                name.endswith(f".{given}") for name in linear
            ):  # of a block of layers PEFT would exclude none
                raise InputError(f"model.lora.{key}: the model has no linear layer named {given}")
    for name, parameter in hf.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    for layer in layers.values():
        layer.cast_input_dtype_enabled = False
        for matrix in (*layer.lora_A.values(), *layer.lora_B.values()):
            matrix.to(getattr(torch, lora.dtype)).__class__ = CastLinear
    if head is Head.VALUES:
        hf.get_output_embeddings().to(getattr(torch, lora.dtype)).requires_grad_()
    return list(layers.values())


class CastLinear(nn.Linear):
    """Computes in the dtype of its input. PEFT would take it to the dtype of the adapter, fp32, which is slow."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def shapes(hf: nn.Module) -> dict[str, tuple[int, ...]]:
    """name -> shape of each adapter matrix of a model after inject()."""
    return {
        plain_name(name): tuple(p.shape) for name, p in hf.named_parameters() if ".lora_" in name
    }


def plain_name(name: str) -> str:
    """Of a parameter after inject(): its name in the files of the model, or of an adapter."""
    return name.replace(".base_layer.", ".").replace(".default.", ".")


def check(config: DictConfig, hf: nn.Module) -> None:
    """Raise InputError for adapters that cannot work; hf: the model on the meta device, into which they are put."""
    lora = config.model.lora
    if not lora.rank:
        for key, default in defaults("model.lora").items():
            if lora.get(key, default) != default:
                raise InputError(
                    f"model.lora.{key}={lora[key]} does nothing with model.lora.rank=0: give model.lora.rank"
                )
        return
    if lora.target_modules == "all-linear" and stacks(hf):
        raise InputError(
            "model.lora.target_modules=all-linear would adapt experts and routers too, which is not supported: give "
            "model.lora.target_modules=[q_proj, k_proj, v_proj, o_proj]"
        )
    inject(hf, lora)
    if lora.adapter_path:
        read(lora, shapes(hf))


def start(lora: DictConfig, shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """What adapters of these shapes begin with, by name, whole: those of model.lora.adapter_path, or new ones."""
    return (
        read(lora, shapes)
        if lora.adapter_path
        else {name: initial(name, shape, seed) for name, shape in shapes.items()}
    )


def initial(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """What a new adapter matrix begins with, [shape] fp32: B zeros, A uniform in +-1 / sqrt(in features), as in PEFT. The same
    for every engine and layout of ranks."""
    if "lora_B" in name:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return nn.init.kaiming_uniform_(torch.empty(shape), a=5**0.5, generator=generator)


def read(lora: DictConfig, expected: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The adapter in model.lora.adapter_path, by name. Raises InputError unless it is what the other keys describe."""
    path = Path(lora.adapter_path)
    try:
        settings = json.loads((path / "adapter_config.json").read_text())
        tensors = {
            name.removeprefix(PREFIX): x
            for name, x in load_file(path / "adapter_model.safetensors").items()
        }
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(
            f"model.lora.adapter_path={path} is not a directory with a PEFT adapter: {error}"
        ) from None
    rank, alpha, method = (settings.get(key) for key in ("r", "lora_alpha", "init_lora_weights"))
    strange = [
        f"{key}={x}"
        for key, x in settings.items()
        if key not in HARMLESS and x and x != PLAIN.get(key)
    ]
    strange += [f"init_lora_weights={method}"] * (method not in INITS)
    strange += [f"lora_alpha={alpha}"] * (isinstance(alpha, float) and not alpha.is_integer())
    if strange:
        raise InputError(
            f"model.lora.adapter_path={path}: {strange[0]} in adapter_config.json is not supported"
        )
    if (rank, alpha) != (lora.rank, lora.alpha):
        raise InputError(
            f"model.lora.adapter_path={path} has r={rank} and lora_alpha={alpha}: give model.lora.rank={rank} "
            f"model.lora.alpha={alpha}"
        )
    found = {name: tuple(x.shape) for name, x in tensors.items()}
    different = [
        name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
    ]
    if different:
        raise InputError(
            f"model.lora.adapter_path={path} and model.lora.target_modules={lora.target_modules} differ in "
            f"{len(different)} matrices, {min(different)} among them"
        )
    return tensors


def write(
    adapter: Iterable[tuple[str, Tensor]],
    lora: DictConfig,
    base: str,
    directory: Path,
    is_part: bool = False,
) -> None:
    """adapter_model.safetensors and adapter_config.json, as peft and vLLM load them. base: the frozen model's directory; is_part:
    it has more than the model with the adapter, maybe layers of the same names."""
    adapter = {PREFIX + name: x.cpu().contiguous() for name, x in adapter}
    modules = {name.removeprefix(PREFIX).split(".lora_")[0] for name in adapter}
    given = (
        lora.target_modules
    )  # as [layers.0.self_attn.q_proj], where q_proj alone would mean more
    by_name = (
        given == "all-linear"
        or not isinstance(given, str)
        and not any("." in name for name in given)
    )
    if by_name and not lora.exclude_modules and not is_part:
        modules = {name.rpartition(".")[2] for name in modules}
    save_file(adapter, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(
        json.dumps(
            {
                **PLAIN,
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": str(Path(base).absolute()),
                "r": lora.rank,
                "lora_alpha": lora.alpha,
                "lora_dropout": lora.dropout,
                "target_modules": sorted(modules),
                "inference_mode": True,
            },
            indent=2,
        )
        + "\n"
    )


def merge(weight: Tensor, a: Tensor, b: Tensor, lora: DictConfig) -> Tensor:
    """W + alpha / rank * B A, in fp32, in the dtype of W."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=lora.alpha / lora.rank).to(
        weight.dtype
    )
