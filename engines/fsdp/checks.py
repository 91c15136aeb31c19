"""Rejects unsupported models and settings before any weights are read.

Once the model is loaded, engines/model/guard.py checks numerically that it is computed correctly.
"""

from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import nn

from common.counting import count_of
from config import InputError
from configs.environment import is_rank0
from engines import optimizer, schedule
from engines.context_parallel import (
    check_batch_size,
    check_micro_batch_cap,
    fixed_cp_size,
    has_dynamic_cp,
    shares_sequences,
)
from engines.fsdp import tracing, vision
from engines.fsdp.attention import gathers_keys
from engines.fsdp.recurrence import recurrent_layers
from engines.fsdp.sharding import is_replicated, is_sharded, num_shards
from engines.heads import Head
from engines.model import experts, float8, freeze, lora, mtp
from engines.model.hf import build_on_meta, layer_modules, read_hf_config
from engines.model.lengths import check_rope, check_windows
from engines.model.logits import logit_constants
from engines.model.model_files import is_only_described
from engines.model.replay import check_can_replay
from engines.model.shape import layer_configs
from engines.model.weights import check_files
from engines.pass_costs import check_pass_costs


def check_model_and_layout(config: DictConfig, world_size: int, head: Head, reports: bool):
    """Check a run, and return the text model's configuration.

    Args:
        reports: whether rank 0 prints what model.freeze freezes.

    Raises:
        InputError: if this engine does not support the model, the layout or the settings.
    """
    whole_config = read_hf_config(config.model.path)
    hf_config = whole_config.get_text_config()
    check_layout(config, hf_config, world_size)
    check_rope(hf_config, config)
    check_windows(hf_config, config.model.path)
    mtp.check_config(config, whole_config)
    hf = build_on_meta(whole_config, torch.float32, head, images=config.model.images)
    check_recurrence(config, hf)
    if head is not Head.VALUES:
        logit_constants(hf)
    experts.check_experts_per_token(hf, hf_config, config.model.path)
    check_can_replay(hf, config)
    if not is_only_described(config):
        check_files(hf, Path(config.model.path), head)
    tracing.check_forward_pass(hf, config)
    freeze.apply(config, hf, head, reports=reports)
    lora.check_config(config, hf)
    layers = layer_modules(hf, hf.get_decoder())
    optimizer.check_muon_parameters(config, hf, layers, head is Head.VALUES)
    float8.check(hf, config, reports)
    check_float8_cache(config, world_size)
    check_float8_gather(hf, config, world_size, reports)
    if reports and not freeze.is_critic(config, head):
        report_unused_dtype(config)
    return hf_config


def check_float8_cache(config: DictConfig, world_size: int) -> None:
    """Raise InputError if weights in FP8 are to be kept, but the weights do not stay gathered.

    The layers in FP8 are frozen beside adapters, so FSDP leaves them alone if is_replicated().
    """
    engine = config.engine
    is_divided = is_sharded(config, world_size) and not is_replicated(config, world_size)
    if not engine.float8_cache_weights or not is_divided:
        return
    for key in ("cpu_offload", "reshard_after_forward"):
        if engine[key]:
            raise InputError(
                f"engine.float8_cache_weights=true needs weights that stay gathered: set "
                f"engine.{key}=false, or leave float8_cache_weights out"
            )


def check_float8_gather(
    hf: nn.Module, config: DictConfig, world_size: int, reports: bool = False
) -> None:
    """Check whether weights can be gathered in FP8, if they are to be.

    Args:
        reports: whether rank 0 prints how many weights are gathered in the compute dtype.

    Raises:
        InputError: if no weight can be, or none has to be gathered.
    """
    engine = config.engine
    if not engine.float8_all_gather:
        return
    setting = "engine.float8_all_gather=true"
    if engine.float8 != "tensorwise":
        raise InputError(
            f"{setting} needs engine.float8=tensorwise, not {engine.float8}: set it, or leave "
            "float8_all_gather out"
        )
    if engine.cpu_offload:
        raise InputError(
            f"{setting} does not go with engine.cpu_offload=true: leave one of them out"
        )
    if engine.float8_cache_weights:
        raise InputError(
            f"{setting} rounds weights before they are gathered, so there is nothing to round "
            "for engine.float8_cache_weights=true: leave one of them out"
        )
    size = num_shards(engine, world_size)
    if size == 1:
        raise InputError(
            f"{setting} does nothing here, since every rank holds whole weights: leave it out"
        )
    chosen = float8.chosen_layers(hf, engine.float8_exclude).values()
    num_gathered = len(float8.gathered_layers(chosen, recurrent_layers(hf), size))
    reason = f"their rows do not divide evenly over {size} ranks, or recurrent layers have them"
    if not num_gathered:
        raise InputError(f"{setting}: no weight can be gathered in FP8: {reason}. Leave it out")
    num_others = len(chosen) - num_gathered
    if num_others and reports and is_rank0():
        print(
            f"{setting}: {num_others} of {count_of(len(chosen), 'weight')} in FP8 are gathered in "
            f"{engine.compute_dtype}: {reason}",
            flush=True,
        )


def report_unused_dtype(config: DictConfig) -> None:
    """Print on rank 0 that engine.param_dtype does not apply to adapters, if it is set."""
    lora_dtype = config.model.lora.dtype
    engine = config.engine
    is_unused = config.model.lora.rank > 0 and engine.param_dtype not in ("float32", lora_dtype)
    if is_unused and is_rank0():
        print(
            f"engine.param_dtype={engine.param_dtype} does not apply with model.lora: the adapters "
            f"have model.lora.dtype={lora_dtype}, and the frozen weights "
            f"engine.compute_dtype={engine.compute_dtype}",
            flush=True,
        )


def check_layout(config: DictConfig, hf_config, world_size: int) -> None:
    """Raise InputError for an invalid optimizer, learning rate schedule or number of ranks."""
    engine = config.engine
    cp = fixed_cp_size(engine)
    schedule.check_schedule(config.optim)
    optimizer.check_optimizer(config)
    check_attention_heads(config, hf_config)
    if world_size % cp:
        raise InputError(
            f"engine.context_parallel_size={cp} does not divide the number of ranks, "
            f"{world_size}: lower it, or start other ranks with torchrun --nproc-per-node"
        )
    if engine.fsdp_size > 0 and world_size % engine.fsdp_size:
        raise InputError(
            f"engine.fsdp_size={engine.fsdp_size} does not divide the number of ranks, "
            f"{world_size}: lower it, or start other ranks with torchrun --nproc-per-node"
        )
    check_gradient_sync(engine)
    if config.model.images:
        vision.check_images(config)
    check_batch_size(config, world_size // cp)
    check_pass_costs(engine)
    check_token_cap(config, hf_config, world_size)
    experts.aux_loss_coef(engine.router_aux_loss_coef, hf_config)


def check_gradient_sync(engine: DictConfig) -> None:
    """Raise InputError if gradients cannot wait for a step's last micro-batch, but should."""
    if engine.sync_each_micro_batch:
        return
    if engine.cpu_offload:
        raise InputError(
            "engine.sync_each_micro_batch=false keeps the gradients of all weights on the GPU, "
            "engine.cpu_offload=true moves them to the host: set one of them to its default"
        )
    if engine.reduce_dtype != "float32":
        raise InputError(
            "engine.sync_each_micro_batch=false adds up micro-batches in engine.reduce_dtype="
            f"{engine.reduce_dtype}, which would round their sum: set engine.reduce_dtype=float32"
        )


def check_attention_heads(config: DictConfig, hf_config) -> None:
    """Raise InputError if the model has a layer without attention heads."""
    for layer_config in layer_configs(hf_config):
        if getattr(layer_config, "num_attention_heads", None) is None:
            raise InputError(
                f"model.path={config.model.path}: model_type={hf_config.model_type} has no "
                "attention heads (num_attention_heads in config.json), which is not supported"
            )


def check_token_cap(config: DictConfig, hf_config, world_size: int) -> None:
    """Raise InputError for a token cap that a sequence could exceed once it is padded.

    Sequences are padded if a group of ranks gathers their keys and values.
    """
    engine = config.engine
    if has_dynamic_cp(engine):
        group_sizes = [1 << level for level in range(world_size.bit_length())]
    else:
        group_sizes = [fixed_cp_size(engine)]
    if any(size > 1 and gathers_keys(engine, hf_config, size) for size in group_sizes):
        padding_multiple = 2 if has_dynamic_cp(engine) else 2 * fixed_cp_size(engine)
        check_micro_batch_cap(config, padding_multiple)


def check_recurrence(config: DictConfig, hf: nn.Module) -> None:
    """Raise InputError if ranks would share sequences although the model has recurrent layers."""
    if shares_sequences(config.engine) and recurrent_layers(hf):
        raise InputError(
            f"engine.context_parallel_size={config.engine.context_parallel_size}: layers of "
            f"{type(hf).__name__} carry a state from token to token, so ranks cannot share a "
            "sequence: set engine.context_parallel_size=1"
        )
