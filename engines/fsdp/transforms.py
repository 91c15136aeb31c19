"""Everything that changes a Hugging Face model before it is sharded, in order.

A transform is a function that changes the model in place. To add one, write a function and call it
in one of these two places. build_model() applies the transforms that decide what is computed and
what is trained. They work on the meta device, so that memory estimates can use them.
prepare_layers() applies the transforms that decide how layers run. It comes last, since compiled
code captures the functions that layers call.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from omegaconf import DictConfig
from torch import nn

from engines.context_parallel import shares_sequences
from engines.fsdp.tower_attention import WINDOWS, vision_tower_configs
from engines.fsdp.vision import replace_patch_convolutions
from engines.heads import Head
from engines.model import experts, float8, freeze, lora
from engines.model.hf import build_on_meta, layer_modules, plain_attention, read_hf_config


def build_model(config: DictConfig, head: Head) -> tuple[nn.Module, list[nn.Module]]:
    """Return the transformed model on the meta device, and its layers with adapters."""
    hf_config = read_hf_config(config.model.path)
    hf = build_on_meta(hf_config, storage_dtype(config), head, images=config.model.images)
    choose_attention(hf, config)
    attend_in_windows(hf)
    replace_patch_convolutions(hf)
    disable_router_logits_output(hf)
    freeze.apply(config, hf, head)
    adapted_layers = add_adapters(hf, config, head)
    return hf, adapted_layers


def prepare_layers(hf: nn.Module, config: DictConfig, device_type: str) -> None:
    """Multiply in FP8, checkpoint activations and compile layers, as configured."""
    if float8.is_used(config):
        float8.convert_layers(hf, config, device_type)
    if config.engine.float8_cache_weights:
        from engines.fsdp import float8_cache  # imports torchao

        float8_cache.use_cache(hf)
    if config.engine.activation_checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    if uses_compile(config.engine, device_type):
        compile_layers(hf)


# -- transforms ------------------------------------------------------------------------------------


def choose_attention(hf: nn.Module, config: DictConfig) -> None:
    """Choose the decoder's attention: for packed or shared sequences, or for padded rows."""
    engine = config.engine
    packed = engine.use_remove_padding or shares_sequences(engine)
    hf.get_decoder().set_attn_implementation("packed" if packed else plain_attention(hf))


def attend_in_windows(hf: nn.Module) -> None:
    """Make vision towers compute the attention of all windows in one call per layer."""
    for tower_config in vision_tower_configs(hf):
        # Not set_attn_implementation(): for a name with "flash" it would look for a package.
        tower_config._attn_implementation = WINDOWS


def disable_router_logits_output(hf: nn.Module) -> None:
    """Stop the model from collecting its routers' logits, since experts.Routers records them."""
    hf.get_decoder().config.output_router_logits = False


def add_adapters(hf: nn.Module, config: DictConfig, head: Head) -> list[nn.Module]:
    """Add LoRA adapters, freeze everything else but a value head, and return the adapted layers."""
    settings = config.model.lora
    return lora.inject(hf, settings, head) if settings.rank else []


def compile_layers(hf: nn.Module) -> None:
    """Compile each decoder layer, except its experts.

    Floats, such as the epsilon of a norm or the scale of LoRA, become constants of the compiled
    code. With dynamic=True they would be its inputs, as tensors on the CPU. For arithmetic on
    them Inductor generates C++, and on a new machine it first spends about a minute finding out
    what the compiler can do.
    """
    torch._dynamo.config.specialize_float = True
    experts.leave_uncompiled(hf)
    for layer in layer_modules(hf, hf.get_decoder()):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def gather_in_float8(hf: nn.Module, engine: DictConfig, device_type: str, num_shards: int) -> None:
    """Make ranks gather weights in FP8, if engine.float8_all_gather is set.

    Unlike the transforms, this comes after the model is sharded and has its weights.

    Args:
        num_shards: the ranks that share a weight.
    """
    if not engine.float8_all_gather:
        return
    from engines.fsdp import float8_gather  # imports torchao

    compute_dtype = getattr(torch, engine.compute_dtype)
    is_compiled = uses_compile(engine, device_type)
    float8_gather.use_gather(hf, num_shards, compute_dtype, is_compiled)


# -- while a batch is computed ---------------------------------------------------------------------


def weights_kept_for_float8(
    model: nn.Module, config: DictConfig, device_type: str
) -> AbstractContextManager[None]:
    """Within this block, keep what FP8 needs of the weights, as configured.

    These are the rounded weights with engine.float8_cache_weights, and only their scales with
    engine.float8_all_gather.
    """
    if config.engine.float8_all_gather:
        from engines.fsdp import float8_gather  # imports torchao

        return float8_gather.scaled_once(model)
    if config.engine.float8_cache_weights:
        from engines.fsdp import float8_cache  # imports torchao

        return float8_cache.rounded_once(model, uses_compile(config.engine, device_type))
    return nullcontext()


# -- settings --------------------------------------------------------------------------------------


def storage_dtype(config: DictConfig) -> torch.dtype:
    """Return the dtype of stored parameters.

    Frozen weights need no more precision than the computation.
    """
    engine = config.engine
    has_adapters = config.model.lora.rank > 0
    return getattr(torch, engine.compute_dtype if has_adapters else engine.param_dtype)


def uses_compile(engine: DictConfig, device_type: str) -> bool:
    if engine.torch_compile == "auto":
        return device_type == "cuda"
    return engine.torch_compile == "always"


def compiles_updates(engine: DictConfig, device_type: str) -> bool:
    """Return whether updates that torch has no kernel for are compiled."""
    return uses_compile(engine, "cpu" if engine.cpu_offload else device_type)
