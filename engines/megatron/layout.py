"""How Megatron divides a model and a batch over ranks: which layouts fit, the process groups, the configuration of DDP."""

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from omegaconf import DictConfig, OmegaConf

from config import InputError
from engines import optimizer, schedule
from engines.context_parallel import (
    check_batch_size,
    check_micro_batch_cap,
    fixed_cp_size,
    has_dynamic_cp,
)
from engines.model.experts import aux_loss_coef

# The other fields concern features that the rest of the engine does not support, or are never read by Megatron's DDP.
IN_DDP = (
    "grad_reduce_in_fp32",
    "overlap_grad_reduce",
    "use_distributed_optimizer",
    "bucket_size",
    "pad_buckets_for_high_nccl_busbw",
    "check_for_nan_in_grad",
    "check_for_large_grads",
)


def multiple_of(engine: DictConfig, cp: int) -> int:
    """The length of every sequence that `cp` ranks share is padded to a multiple of this number of tokens."""
    return (engine.tensor_model_parallel_size if engine.sequence_parallel else 1) * (
        2 * cp if cp > 1 else 1
    )


def check_layout(config: DictConfig, hf_config, world_size: int) -> None:
    """Raise InputError for a layout that does not fit the model, the batch or the number of ranks."""
    engine = config.engine
    tp, pp, cp = (
        engine.tensor_model_parallel_size,
        engine.pipeline_model_parallel_size,
        fixed_cp_size(engine),
    )
    vpp, model_parallel = engine.virtual_pipeline_model_parallel_size, tp * pp * cp
    heads, layers = hf_config.num_attention_heads, hf_config.num_hidden_layers
    kv_heads = hf_config.num_key_value_heads or heads
    schedule.check(config.optim)
    optimizer.check(config)
    if world_size % model_parallel:
        raise InputError(
            f"tensor ({tp}) x pipeline ({pp}) x context ({cp}) parallel ranks do not divide the "
            f"{world_size} ranks: change engine.*_parallel_size or the number of ranks"
        )
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        raise InputError(
            f"engine.tensor_model_parallel_size={tp} does not divide the model's {heads} attention heads "
            f"and {kv_heads} key-value heads"
        )
    check_experts(engine, hf_config, world_size)
    if vpp > 1 and pp == 1:
        raise InputError(
            f"engine.virtual_pipeline_model_parallel_size={vpp} needs "
            "engine.pipeline_model_parallel_size > 1"
        )
    if layers < pp * vpp:
        raise InputError(
            f"pipeline ({pp}) x virtual pipeline ({vpp}) stages are more than the model's {layers} layers"
        )
    check_micro_batch_cap(
        config, multiple_of(engine, 2) // 2 if has_dynamic_cp(engine) else multiple_of(engine, cp)
    )
    if has_dynamic_cp(engine) and HAVE_TE:
        raise InputError(
            "engine.context_parallel_size=auto is not supported with TransformerEngine: give a number"
        )
    if has_dynamic_cp(engine) and (
        coefficient := aux_loss_coef(engine.router_aux_loss_coef, hf_config)
    ):
        raise InputError(
            f"engine.context_parallel_size=auto is not supported with routers' auxiliary loss ({coefficient}) by "
            "model_engine=megatron: give a number, or engine.router_aux_loss_coef=0"
        )
    check_batch_size(config, world_size // model_parallel)
    ddp_config(engine)


def check_experts(engine: DictConfig, hf_config, world_size: int) -> None:
    """The same for what follows the attention in a layer: an MLP or experts."""
    tp, ep = engine.tensor_model_parallel_size, engine.expert_model_parallel_size
    num_experts, ranks = (
        getattr(hf_config, "num_experts", None),
        world_size // engine.pipeline_model_parallel_size,
    )
    if not num_experts:
        for key, harmless in (("expert_model_parallel_size", 1), ("router_aux_loss_coef", None)):
            if engine[key] != harmless:
                raise InputError(
                    f"engine.{key}={engine[key]} needs a mixture of experts, which model_type="
                    f"{hf_config.model_type} is not: leave it out"
                )
        if hf_config.intermediate_size % tp:
            raise InputError(
                f"engine.tensor_model_parallel_size={tp} does not divide intermediate_size="
                f"{hf_config.intermediate_size}"
            )
        return
    if tp > 1 and not engine.sequence_parallel:
        raise InputError(
            "a mixture of experts with engine.tensor_model_parallel_size > 1 needs "
            "engine.sequence_parallel=true"
        )
    if num_experts % ep or ranks % ep:
        raise InputError(
            f"engine.expert_model_parallel_size={ep} does not divide the model's {num_experts} experts and "
            f"the {ranks} ranks of a pipeline stage"
        )


def ddp_config(engine: DictConfig) -> DistributedDataParallelConfig:
    """Gradients reduced in fp32, then engine.use_distributed_optimizer and overlap_grad_reduce, then override_ddp_config."""
    override = OmegaConf.to_container(engine.override_ddp_config)
    for name, value in override.items():
        if name not in IN_DDP:
            raise InputError(
                f"engine.override_ddp_config.{name} is not supported, only {', '.join(IN_DDP)}"
            )
        default = getattr(DistributedDataParallelConfig, name)
        kind = int if default is None else type(default)
        if type(value) is not kind and not (value is None and default is None):
            raise InputError(
                f"engine.override_ddp_config.{name}={value!r} must be of type {kind.__name__}"
            )
    sharded = override.get("use_distributed_optimizer", engine.use_distributed_optimizer)
    if sharded != engine.use_distributed_optimizer:
        raise InputError(
            f"engine.override_ddp_config.use_distributed_optimizer={sharded} contradicts "
            f"engine.use_distributed_optimizer={engine.use_distributed_optimizer}, which the optimizer "
            "follows: set the latter alone"
        )
    settings = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": engine.use_distributed_optimizer,
        "overlap_grad_reduce": engine.overlap_grad_reduce,
        **override,
    }
    if settings.get("bucket_size") is not None and not settings["overlap_grad_reduce"]:
        raise InputError(
            "engine.override_ddp_config.bucket_size has no effect without engine.overlap_grad_reduce=true"
        )
    if settings.get("pad_buckets_for_high_nccl_busbw") and not sharded:
        raise InputError(
            "engine.override_ddp_config.pad_buckets_for_high_nccl_busbw has no effect without "
            "engine.use_distributed_optimizer=true"
        )
    return DistributedDataParallelConfig(**settings)


def initialize(engine: DictConfig) -> None:
    """Make Megatron's process groups, once: all engines of a process share one layout."""
    if mpu.model_parallel_is_initialized():
        return
    vpp = engine.virtual_pipeline_model_parallel_size
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=engine.tensor_model_parallel_size,
        pipeline_model_parallel_size=engine.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        context_parallel_size=fixed_cp_size(engine),
        expert_model_parallel_size=engine.expert_model_parallel_size,
        expert_tensor_parallel_size=1,
    )
    # Nothing draws from these generators, but recomputation expects them to exist; the user's stay as they are.
    accelerators = (
        [torch.accelerator.current_device_index()] if torch.accelerator.is_available() else []
    )
    with torch.random.fork_rng(accelerators):
        model_parallel_cuda_manual_seed(0, force_reset_rng=True)
