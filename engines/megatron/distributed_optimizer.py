"""Megatron's DDP and optimizer around a model."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    USING_PYTORCH_OPTIMIZER,
    MegatronOptimizer,
    OptimizerConfig,
    clip_grads,
    get_megatron_optimizer,
)
from omegaconf import DictConfig, OmegaConf
from torch import nn

from config import InputError

# The other fields of DistributedDataParallelConfig belong to features that the rest of the engine
# does not support, or are never read by Megatron's DDP.
DDP_FIELDS = (
    "grad_reduce_in_fp32",
    "overlap_grad_reduce",
    "use_distributed_optimizer",
    "bucket_size",
    "pad_buckets_for_high_nccl_busbw",
    "check_for_nan_in_grad",
    "check_for_large_grads",
)


def ddp_config(engine: DictConfig) -> DistributedDataParallelConfig:
    """Return the configuration of DDP.

    Gradients are reduced in fp32 unless engine.override_ddp_config changes that. It also overrides
    engine.overlap_grad_reduce, but must agree with engine.use_distributed_optimizer.

    Raises:
        InputError: if engine.override_ddp_config has invalid, contradictory or ineffective values.
    """
    override = OmegaConf.to_container(engine.override_ddp_config)
    for name, value in override.items():
        check_ddp_field(name, value)
    is_sharded = override.get("use_distributed_optimizer", engine.use_distributed_optimizer)
    if is_sharded != engine.use_distributed_optimizer:
        raise InputError(
            f"engine.override_ddp_config.use_distributed_optimizer={is_sharded} contradicts "
            f"engine.use_distributed_optimizer={engine.use_distributed_optimizer}. Set only the "
            "latter."
        )
    fields = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": engine.use_distributed_optimizer,
        "overlap_grad_reduce": engine.overlap_grad_reduce,
        **override,
    }
    if fields.get("bucket_size") is not None and not fields["overlap_grad_reduce"]:
        raise InputError(
            f"engine.override_ddp_config.bucket_size={fields['bucket_size']} has no effect without "
            "engine.overlap_grad_reduce=true. Set that too, or leave bucket_size out."
        )
    if fields.get("pad_buckets_for_high_nccl_busbw") and not is_sharded:
        raise InputError(
            "engine.override_ddp_config.pad_buckets_for_high_nccl_busbw has no effect without "
            "engine.use_distributed_optimizer=true. Set that, or leave it out."
        )
    return DistributedDataParallelConfig(**fields)


def check_ddp_field(name: str, value: Any) -> None:
    """Raise InputError for a field of engine.override_ddp_config with a wrong name or type."""
    if name not in DDP_FIELDS:
        raise InputError(
            f"engine.override_ddp_config.{name} is not supported, only {', '.join(DDP_FIELDS)}"
        )
    default = getattr(DistributedDataParallelConfig, name)
    expected_type = int if default is None else type(default)
    is_default_none = value is None and default is None
    if type(value) is not expected_type and not is_default_none:
        raise InputError(
            f"engine.override_ddp_config.{name}={value!r} must be of type {expected_type.__name__}"
        )


def wrap_in_ddp(models: list[nn.Module], engine: DictConfig) -> list[DistributedDataParallel]:
    """Wrap each virtual pipeline stage in DDP, and make the schedule reduce gradients with DDP."""
    config = models[0].config
    stages = []
    for number, model in enumerate(models):
        stage = DistributedDataParallel(
            config, ddp_config(engine), model, disable_bucketing=number > 0
        )
        stages.append(stage)
    config.finalize_model_grads_func = finalize_without_division
    if stages[0].ddp_config.overlap_grad_reduce:
        no_syncs = [stage.no_sync for stage in stages]
        config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
    return stages


def finalize_without_division(stages: list[nn.Module], num_tokens, **groups) -> None:
    """Finish reducing gradients, without dividing them by the number of tokens."""
    finalize_model_grads(stages, None, **groups)


def build_optimizer(
    stages: list[DistributedDataParallel], config: DictConfig, dtype: torch.dtype
) -> MegatronOptimizer:
    """Return an AdamW optimizer for the stages' trainable parameters.

    Args:
        dtype: the dtype of the trainable parameters.
    """
    optim = config.optim
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            adam_eps=optim.eps,
            clip_grad=optim.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=config.engine.use_distributed_optimizer,
        ),
        stages,
    )
    # If only experts are trained, Megatron returns a stub as the other parameters' optimizer.
    optimizer.chained_optimizers = [
        inner for inner in optimizer.chained_optimizers if not inner.is_stub_optimizer
    ]
    # TransformerEngine's optimizer is always fused; torch's needs a flag.
    if USING_PYTORCH_OPTIMIZER:
        for group in optimizer.param_groups:
            group["fused"] = True
    return optimizer


def apply_gradients(
    optimizer: MegatronOptimizer, optim: DictConfig, lr: float, grad_norm: float
) -> None:
    """Clip the gradients and take a step.

    Args:
        optimizer: prepare_grads() must have been called.
        grad_norm: the norm of the gradients.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
        # wd_mult is 0 for norms and biases.
        group["weight_decay"] = optim.weight_decay * group["wd_mult"]
    if optim.clip_grad > 0:
        for inner in optimizer.chained_optimizers:
            clip_grads.clip_grad_by_total_norm_fp32(
                inner.get_parameters(), optim.clip_grad, grad_norm
            )
    optimizer.step_with_ready_grads()


def smallest_stage_gradient(
    stages: list[DistributedDataParallel], pp_group: dist.ProcessGroup, device: torch.device
) -> float:
    """Return the smallest of all stages' largest absolute gradients.

    Virtual stages and the stages of other ranks are included.
    """
    largest = torch.zeros(len(stages), pp_group.size(), device=device)
    for number, stage in enumerate(stages):
        largest_of_buffers = [buffer.grad_data.abs().max() for buffer in stage.buffers]
        largest[number, pp_group.rank()] = torch.stack(largest_of_buffers).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.min().item()
