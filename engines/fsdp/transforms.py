"""Everything that changes a Hugging Face model before it is sharded, in order.

build_model() applies the transforms that decide what is computed and what is trained. They work on
the meta device, so that estimates of memory can use them. prepare_layers() applies those that
decide how layers run; it comes last, since compiled code captures what layers call. A transform
changes the model in place; a new one is a function and a line in one of the two lists.
"""

import torch
from omegaconf import DictConfig
from torch import nn

from engines.context_parallel import shares_sequences
from engines.fsdp.tower_attention import WINDOWS, vision_tower_configs
from engines.fsdp.vision import multiply_patches
from engines.heads import Head
from engines.model import experts, freeze, lora
from engines.model.hf import build_on_meta, layer_modules, plain_attention, read_hf_config


def build_model(config: DictConfig, head: Head) -> tuple[nn.Module, list[nn.Module]]:
    """Return the model on the meta device, transformed, and its layers that have adapters."""
    hf_config = read_hf_config(config.model.path)
    hf = build_on_meta(hf_config, storage_dtype(config), head, images=config.model.images)
    choose_attention(hf, config)
    attend_in_windows(hf)
    multiply_patches(hf)
    leave_router_logits_inside(hf)
    freeze.apply(config, hf, head)
    adapted_layers = add_adapters(hf, config, head)
    return hf, adapted_layers


def prepare_layers(hf: nn.Module, config: DictConfig, device_type: str) -> None:
    """Checkpoint activations and compile layers, as configured."""
    if config.engine.activation_checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    if uses_compile(config.engine, device_type):
        compile_layers(hf)


# -- transforms ------------------------------------------------------------------------------------


def choose_attention(hf: nn.Module, config: DictConfig) -> None:
    """Let the decoder's layers attend to packed or shared sequences, or to padded rows."""
    engine = config.engine
    packed = engine.use_remove_padding or shares_sequences(engine)
    hf.get_decoder().set_attn_implementation("packed" if packed else plain_attention(hf))


def attend_in_windows(hf: nn.Module) -> None:
    """Let vision towers attend to all windows of a layer in one call."""
    for tower_config in vision_tower_configs(hf):
        # set_attn_implementation() would look for a package, because of the name.
        tower_config._attn_implementation = WINDOWS


def leave_router_logits_inside(hf: nn.Module) -> None:
    """Keep the model from collecting its routers' logits: experts.Routers does that."""
    hf.get_decoder().config.output_router_logits = False


def add_adapters(hf: nn.Module, config: DictConfig, head: Head) -> list[nn.Module]:
    """Add LoRA adapters, freeze everything else but a value head, and return the adapted layers."""
    settings = config.model.lora
    return lora.inject(hf, settings, head) if settings.rank else []


def compile_layers(hf: nn.Module) -> None:
    """Compile each decoder layer, except its experts."""
    experts.leave_uncompiled(hf)
    for layer in layer_modules(hf, hf.get_decoder()):
        layer.forward = torch.compile(layer.forward, dynamic=True)


# -- settings --------------------------------------------------------------------------------------


def storage_dtype(config: DictConfig) -> torch.dtype:
    """Return the dtype of stored parameters.

    Weights that adapters leave frozen need no more precision than the pass that reads them.
    """
    engine = config.engine
    has_adapters = config.model.lora.rank > 0
    return getattr(torch, engine.compute_dtype if has_adapters else engine.param_dtype)


def uses_compile(engine: DictConfig, device_type: str) -> bool:
    if engine.torch_compile == "auto":
        return device_type == "cuda"
    return engine.torch_compile == "always"
