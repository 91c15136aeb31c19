"""How ranks divide a model and a batch: checks of the layout, and Megatron's process groups."""

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from omegaconf import DictConfig

from config import InputError
from engines import optimizer, schedule
from engines.context_parallel import (
    check_batch_size,
    check_micro_batch_cap,
    fixed_cp_size,
    has_dynamic_cp,
)
from engines.megatron.distributed_optimizer import ddp_config
from engines.model.experts import aux_loss_coef
from engines.pass_costs import check_pass_costs


def padding_multiple(engine: DictConfig, cp_size: int) -> int:
    """Return the padding multiple: every padded length must be a multiple of this number.

    Args:
        cp_size: the number of context-parallel ranks that share the sequence.
    """
    multiple = 2 * cp_size if cp_size > 1 else 1
    if engine.sequence_parallel:
        multiple *= engine.tensor_model_parallel_size
    return multiple


def check_layout(config: DictConfig, hf_config, world_size: int) -> None:
    """Raise InputError unless the layout fits the model, the batch and the number of ranks."""
    engine = config.engine
    schedule.check_schedule(config.optim)
    optimizer.check_optimizer(config)
    check_world_size(engine, world_size)
    check_heads(engine, hf_config)
    check_mlp(engine, hf_config, world_size)
    check_pipeline(engine, hf_config.num_hidden_layers)
    check_context_parallel(config, hf_config)
    check_pass_costs(engine)
    check_batch_size(config, world_size // model_parallel_size(engine))
    ddp_config(engine)


def model_parallel_size(engine: DictConfig) -> int:
    """Return the number of ranks that work on the same sequences."""
    return (
        engine.tensor_model_parallel_size
        * engine.pipeline_model_parallel_size
        * fixed_cp_size(engine)
    )


def check_world_size(engine: DictConfig, world_size: int) -> None:
    """Raise InputError if model_parallel_size() does not divide the number of ranks."""
    if world_size % model_parallel_size(engine):
        raise InputError(
            f"tensor ({engine.tensor_model_parallel_size}) x pipeline "
            f"({engine.pipeline_model_parallel_size}) x context ({fixed_cp_size(engine)}) parallel "
            f"ranks do not divide the {world_size} ranks. Change engine.*_parallel_size or the "
            "number of ranks."
        )


def check_heads(engine: DictConfig, hf_config) -> None:
    """Raise InputError if tensor-parallel ranks cannot divide the attention heads."""
    tp = engine.tensor_model_parallel_size
    heads = hf_config.num_attention_heads
    kv_heads = hf_config.num_key_value_heads or heads
    fits_kv_heads = kv_heads % tp == 0 or tp % kv_heads == 0
    if heads % tp or not fits_kv_heads:
        raise InputError(
            f"engine.tensor_model_parallel_size={tp} does not divide the model's {heads} attention "
            f"heads and {kv_heads} key-value heads. Lower it."
        )


def check_mlp(engine: DictConfig, hf_config, world_size: int) -> None:
    """Raise InputError if ranks cannot divide a layer's MLP or its experts."""
    num_experts = getattr(hf_config, "num_experts", None)
    if num_experts:
        check_experts(engine, num_experts, world_size)
        return
    for key, unset in (("expert_model_parallel_size", 1), ("router_aux_loss_coef", None)):
        if engine[key] != unset:
            raise InputError(
                f"engine.{key}={engine[key]} needs a mixture of experts, which "
                f"model_type={hf_config.model_type} is not. Leave it out."
            )
    tp = engine.tensor_model_parallel_size
    if hf_config.intermediate_size % tp:
        raise InputError(
            f"engine.tensor_model_parallel_size={tp} does not divide "
            f"intermediate_size={hf_config.intermediate_size}. Lower it."
        )


def check_experts(engine: DictConfig, num_experts: int, world_size: int) -> None:
    """Raise InputError if the ranks of a pipeline stage cannot divide the experts."""
    if engine.tensor_model_parallel_size > 1 and not engine.sequence_parallel:
        raise InputError(
            "a mixture of experts with engine.tensor_model_parallel_size > 1 needs "
            "engine.sequence_parallel=true"
        )
    ep = engine.expert_model_parallel_size
    ranks_per_stage = world_size // engine.pipeline_model_parallel_size
    if num_experts % ep or ranks_per_stage % ep:
        raise InputError(
            f"engine.expert_model_parallel_size={ep} does not divide the model's {num_experts} "
            f"experts and the {ranks_per_stage} ranks of a pipeline stage. Lower it."
        )


def check_pipeline(engine: DictConfig, num_layers: int) -> None:
    """Raise InputError if there are not enough layers for the pipeline stages."""
    pp = engine.pipeline_model_parallel_size
    vpp = engine.virtual_pipeline_model_parallel_size
    if vpp > 1 and pp == 1:
        raise InputError(
            f"engine.virtual_pipeline_model_parallel_size={vpp} needs "
            "engine.pipeline_model_parallel_size > 1"
        )
    if num_layers < pp * vpp:
        raise InputError(
            f"pipeline ({pp}) x virtual pipeline ({vpp}) stages are more than the model's "
            f"{num_layers} layers. Lower engine.pipeline_model_parallel_size or "
            "engine.virtual_pipeline_model_parallel_size."
        )


def check_context_parallel(config: DictConfig, hf_config) -> None:
    """Raise InputError for token caps and models that context parallelism does not support."""
    engine = config.engine
    if not has_dynamic_cp(engine):
        check_micro_batch_cap(config, padding_multiple(engine, fixed_cp_size(engine)))
        return
    check_micro_batch_cap(config, padding_multiple(engine, 2) // 2)
    if HAVE_TE:
        raise InputError(
            "engine.context_parallel_size=auto is not supported with TransformerEngine. Set it to "
            "a number."
        )
    coefficient = aux_loss_coef(engine.router_aux_loss_coef, hf_config)
    if coefficient:
        raise InputError(
            "model_engine=megatron does not support engine.context_parallel_size=auto with the "
            f"routers' auxiliary loss (coefficient {coefficient}). Set "
            "engine.context_parallel_size to a number, or engine.router_aux_loss_coef=0."
        )


def initialize(engine: DictConfig) -> None:
    """Create Megatron's process groups, unless they exist: all engines share one layout.

    The trained model's engine has to be the first. A dense model used with a mixture of
    experts has expert_model_parallel_size=1, and does not use the groups for experts.

    Raises:
        RuntimeError: the groups were created for another expert_model_parallel_size.
    """
    if mpu.model_parallel_is_initialized():
        size = mpu.get_expert_model_parallel_world_size()
        if engine.expert_model_parallel_size not in (1, size):
            raise RuntimeError(
                f"the process groups were created for expert_model_parallel_size={size}, not "
                f"{engine.expert_model_parallel_size}"
            )
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
    # Nothing draws from Megatron's own generators, but recomputation expects them to exist.
    # fork_rng() keeps the state of torch's generators.
    accelerators = []
    if torch.accelerator.is_available():
        accelerators = [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(accelerators):
        model_parallel_cuda_manual_seed(0, force_reset_rng=True)
