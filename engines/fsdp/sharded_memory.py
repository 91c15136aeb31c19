"""Estimates the FSDP engine's memory per rank, and the size of its checkpoints, from shapes."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from omegaconf import DictConfig
from torch import nn

from data.images.processor import Processor
from engines.adamw import STATE_DTYPES, moment_bytes
from engines.context_parallel import fixed_cp_size
from engines.fsdp import vision
from engines.fsdp.attention import gathers_keys
from engines.fsdp.recurrence import recurrent_layers
from engines.fsdp.sharding import (
    has_replicas,
    is_one_unit,
    is_replicated,
    is_sharded,
    num_shards,
    reduces_once,
    sums_replicas_once,
)
from engines.fsdp.transforms import build_model, uses_compile
from engines.heads import Head
from engines.memory import Estimate
from engines.memory_terms import (
    keys_per_token,
    root_and_layer,
    teacher_matrix_bytes,
    teacher_outputs_bytes,
)
from engines.model import float8
from engines.model.experts import expert_weights, experts_per_token
from engines.model.hf import layer_modules, read_hf_config
from engines.model.shape import attention_widths
from engines.optimizer import OPTIMIZERS

# Linear layers that read the same input as another one of their block.
READS_INPUT_OF = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


@dataclass(frozen=True)
class Setup:
    """The model and settings whose memory is estimated."""

    config: DictConfig
    world_size: int
    device_type: str
    head: Head
    is_trained: bool
    hf: nn.Module  # on the meta device
    shape: object  # the configuration of the decoder

    @cached_property
    def layers(self) -> list[nn.Module]:
        """The layers of the decoder and vision tower; empty if transformers does not name them."""
        return layer_modules(self.hf, self.hf)

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.hf.parameters())

    @cached_property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.hf.parameters() if p.requires_grad]

    @property
    def compute_bytes(self) -> int:
        return getattr(torch, self.config.engine.compute_dtype).itemsize

    @property
    def reduce_bytes(self) -> int:
        return getattr(torch, self.config.engine.reduce_dtype).itemsize

    @property
    def num_shards(self) -> int:
        """The number of ranks that share one copy of the weights."""
        return num_shards(self.config.engine, self.world_size)

    @property
    def has_replicas(self) -> bool:
        return has_replicas(self.config.engine, self.world_size)

    @property
    def sums_replicas_once(self) -> bool:
        return sums_replicas_once(self.hf, self.config.engine, self.world_size)

    @property
    def reduces_once(self) -> bool:
        is_divided = is_sharded(self.config, self.world_size)
        return is_divided and reduces_once(self.hf, self.config.engine, self.world_size)

    @property
    def is_one_unit(self) -> bool:
        return is_one_unit(self.config, self.layers, self.world_size)

    @property
    def num_tokens(self) -> float:
        """The number of this rank's tokens in a full micro-batch."""
        return self.config.data.max_tokens_per_micro_batch / fixed_cp_size(self.config.engine)

    @property
    def num_outputs(self) -> int:
        return 0 if self.head is Head.VALUES else self.shape.vocab_size

    @property
    def is_compiled(self) -> bool:
        return uses_compile(self.config.engine, self.device_type)


def estimate_memory(
    config: DictConfig,
    world_size: int,
    device_type: str,
    head: Head = Head.LOG_PROBS,
    is_trained: bool = True,
) -> list[Estimate]:
    """Estimate one rank's peak memory. The list has one entry, for the only pipeline stage.

    In training, memory is highest at the start or at the end of the backward pass of a full
    micro-batch after the first one. At the start, all activations exist. At the end they are freed,
    but the gradients of everything outside the layers wait to be reduced. A reference model reaches
    its peak in the forward pass. A full micro-batch has data.max_tokens_per_micro_batch tokens.
    """
    shape = read_hf_config(config.model.path).get_text_config()
    hf, _ = build_model(config, head)
    return [estimate_peak(Setup(config, world_size, device_type, head, is_trained, hf, shape))]


def estimate_peak(setup: Setup) -> Estimate:
    """Estimate one rank's memory at the moment that needs the most."""
    start = at_start_of_backward(setup)
    estimates = [start]
    if setup.is_trained:
        estimates.append(at_end_of_backward(setup, start))
    peak = max(estimates, key=lambda estimate: estimate.device_total)
    return peak.for_role(setup.config, setup.device_type, setup.is_trained)


def at_start_of_backward(setup: Setup) -> Estimate:
    """Estimate the memory when a full micro-batch starts its backward pass."""
    config = setup.config
    engine = config.engine
    frozen = sum(p.nbytes for p in setup.parameters if not p.requires_grad)
    if not is_replicated(config, setup.world_size):
        frozen = frozen / setup.num_shards
    trained = sum(p.nbytes for p in setup.trained) / setup.num_shards
    image_activations = None
    if config.model.images:
        image_activations = setup.num_tokens * tower_bytes_per_token(setup)
    output_matrix = setup.hf.get_output_embeddings().weight
    return Estimate(
        parameters=frozen + trained,
        gradients=waiting_gradient_bytes(setup),
        optimizer=optimizer_bytes(setup) / setup.num_shards,
        gathered_weights=gathered_bytes(setup),
        rounded_weights=rounded_bytes(setup),
        unreduced_gradients=unreduced_bytes(setup),
        activations=setup.num_tokens * activation_bytes_per_token(setup),
        image_activations=image_activations,
        chunk_logits=chunk_logits_bytes(setup),
        output_matrix_gradient=(
            setup.num_outputs * setup.shape.hidden_size * 4 * output_matrix.requires_grad
        ),
        teacher_matrix=teacher_matrix_bytes(config),
        teacher_outputs=teacher_outputs_bytes(config, setup.world_size),
        is_on_host=engine.cpu_offload,
        has_unknown_optimizer=config.optim.name not in OPTIMIZERS,
    )


def at_end_of_backward(setup: Setup, start: Estimate) -> Estimate:
    """Estimate the memory when only the gradients outside the layers are left to reduce.

    Args:
        start: the estimate at the start of the backward pass.
    """
    gathered_weights = 0
    unreduced_gradients = 0
    if is_sharded(setup.config, setup.world_size):
        unreduced_gradients = last_unreduced_bytes(setup) + kept_all_reduced_bytes(setup)
        gathered_weights = start.gathered_weights
        if setup.config.engine.reshard_after_forward:
            in_root, _ = root_and_layer(sharded_parameters(setup), setup.layers)
            gathered_weights = in_root * setup.compute_bytes
    return replace(
        start,
        gradients=last_gradient_bytes(setup),
        gathered_weights=gathered_weights,
        unreduced_gradients=unreduced_gradients,
        activations=0,
        image_activations=None if start.image_activations is None else 0,
        chunk_logits=0,
        output_matrix_gradient=0,
        is_after_backward=True,
    )


def optimizer_bytes(setup: Setup) -> int:
    """Return the bytes of all moments.

    Adam keeps two per element. Muon keeps one for matrices in layers. For the user's own optimizer,
    two are assumed.
    """
    in_layers = set()
    if setup.config.optim.name == "muon":
        for layer in setup.layers:
            in_layers |= {p for p in layer.parameters() if p.ndim == 2}
    state_dtype = STATE_DTYPES[setup.config.optim.state_dtype]
    num_bytes = 0
    for parameter in setup.trained:
        num_moments = 1 if parameter in in_layers else 2
        num_bytes += num_moments * moment_bytes(parameter, state_dtype)
    return num_bytes


def sharded_parameters(setup: Setup) -> list[nn.Parameter]:
    """Return the parameters that FSDP divides and gathers."""
    has_only_adapters = is_replicated(setup.config, setup.world_size)
    return setup.trained if has_only_adapters else setup.parameters


def gathered_bytes(setup: Setup) -> float:
    """Return the bytes of gathered weights at the start of the backward pass.

    These are the root's and two layers', since one layer computes while the next one is gathered.
    Without resharding, they are the weights of all layers.
    """
    if not is_sharded(setup.config, setup.world_size):
        return 0
    layers = setup.layers
    num_layers = 2 if setup.config.engine.reshard_after_forward else len(layers)
    in_root, in_layer = root_and_layer(sharded_parameters(setup), layers)
    num_bytes = (in_root + num_layers * in_layer) * setup.compute_bytes
    return num_bytes - saved_by_float8_gather(setup, num_layers)


def saved_by_float8_gather(setup: Setup, num_layers: int) -> float:
    """Return the bytes that engine.float8_all_gather saves while so many layers are gathered.

    With compiled layers, a run of 7B needed more memory than without it, so nothing is counted.
    """
    engine = setup.config.engine
    if not engine.float8_all_gather or setup.is_compiled:
        return 0
    chosen = float8.chosen_layers(setup.hf, engine.float8_exclude).values()
    gathered = float8.gathered_layers(chosen, recurrent_layers(setup.hf), setup.num_shards)
    num_rounded = sum(layer.weight.numel() for layer in gathered)
    num_decoder_layers = len(layer_modules(setup.hf, setup.hf.get_decoder()))
    share_gathered = min(num_layers, num_decoder_layers) / num_decoder_layers
    return share_gathered * num_rounded * (setup.compute_bytes - 1)


def rounded_bytes(setup: Setup) -> int | None:
    """Return the bytes of both FP8 copies of weights, if engine.float8_cache_weights keeps them."""
    engine = setup.config.engine
    if not engine.float8_cache_weights:
        return None
    layers = float8.chosen_layers(setup.hf, engine.float8_exclude).values()
    return 2 * sum(layer.weight.numel() for layer in layers)


def unreduced_bytes(setup: Setup) -> float:
    """Return the bytes of unreduced gradients at the start of the backward pass.

    These are the gradient of the output matrix, which is the first one, and those of one layer with
    a copy that is being reduced.
    """
    if not is_sharded(setup.config, setup.world_size):
        return 0
    output_matrix = setup.hf.get_output_embeddings().weight
    num_in_matrix = output_matrix.numel() * output_matrix.requires_grad
    _, in_layer = root_and_layer(setup.trained, setup.layers)
    bytes_in_layer = in_layer * (setup.compute_bytes + setup.reduce_bytes)
    return num_in_matrix * setup.compute_bytes + bytes_in_layer


def last_unreduced_bytes(setup: Setup) -> float:
    """Return the bytes of unreduced gradients at the end of the backward pass.

    These are the gradients outside the layers with a copy that is being reduced. If the whole model
    is one unit, it is a copy of all gradients.
    """
    if setup.is_one_unit:
        return sum(p.numel() for p in setup.trained) * setup.reduce_bytes
    in_root, _ = root_and_layer(setup.trained, setup.layers)
    return in_root * (setup.compute_bytes + setup.reduce_bytes)


def waiting_gradient_bytes(setup: Setup) -> float:
    """Return the bytes of this rank's gradients at the start of a backward pass.

    If ranks or replicas sum theirs only in a step's last micro-batch, FSDP keeps them in
    reduce_dtype until then, and ranks keep those of all weights. Otherwise they have the dtype of
    the weights.
    """
    in_reduce_dtype = sum(p.numel() for p in setup.trained) * setup.reduce_bytes
    if setup.reduces_once:
        return in_reduce_dtype
    if setup.sums_replicas_once:
        return in_reduce_dtype / setup.num_shards
    return sum(p.nbytes for p in setup.trained) / setup.num_shards


def last_gradient_bytes(setup: Setup) -> float:
    """Return the bytes of this rank's gradients when only those outside the layers wait.

    If the whole model is one unit, all of them wait.
    """
    if setup.is_one_unit:
        return waiting_gradient_bytes(setup)
    in_layers = {p for layer in setup.layers for p in layer.parameters()}
    waiting = [p for p in setup.trained if p not in in_layers]
    if setup.reduces_once:
        waiting_bytes = sum(p.numel() for p in waiting) * setup.reduce_bytes
    elif setup.sums_replicas_once:
        waiting_bytes = sum(p.numel() for p in waiting) * setup.reduce_bytes / setup.num_shards
    else:
        waiting_bytes = sum(p.nbytes for p in waiting) / setup.num_shards
    reduced = [p for p in setup.trained if p in in_layers]
    return waiting_bytes + sum(p.nbytes for p in reduced) / setup.num_shards


def kept_all_reduced_bytes(setup: Setup) -> float:
    """Return the bytes of reduced gradients that FSDP keeps in addition to the final gradients.

    After all replicas have summed the gradients of a layer, FSDP keeps the result to the end of the
    backward pass. If both dtypes are the same and nothing has to be added, the result is itself the
    gradient, and needs no memory of its own.
    """
    if not setup.has_replicas:
        return 0
    in_root, _ = root_and_layer(setup.trained, setup.layers)
    has_own_dtype = all(p.element_size() == setup.reduce_bytes for p in setup.trained)
    if (setup.sums_replicas_once or setup.reduces_once) and has_own_dtype:
        return 0
    num_in_layers = sum(p.numel() for p in setup.trained) - in_root
    return num_in_layers * setup.reduce_bytes / setup.num_shards


def activation_bytes_per_token(setup: Setup) -> float:
    """Return the bytes of activations per token that all decoder layers keep.

    This overestimates layers without a backward pass, where nothing in or before them is trained.
    """
    num_decoder_layers = len(layer_modules(setup.hf, setup.hf.get_decoder()))
    num_layers = num_decoder_layers or setup.shape.num_hidden_layers
    in_one_layer = layer_bytes_per_token(setup)
    if not setup.is_trained:
        return in_one_layer
    if setup.config.engine.activation_checkpointing:
        inputs = setup.shape.hidden_size * setup.compute_bytes * num_layers
        return inputs + in_one_layer
    return in_one_layer * num_layers


def layer_bytes_per_token(setup: Setup) -> float:
    """Return the bytes of activations per token in one Llama-like layer.

    These are the residual and normalized inputs; q, k, v and the attention output; gate, up and
    their product. With experts, the last three exist for each expert that a token is sent to, and
    so do a copy of the token and the expert's output. Without torch.compile, there are also the
    fp32 copies in both norms and the gate's activation. With products in FP8, a compiled layer
    computes the normalized inputs and the product of gate and up again in its backward pass; with
    engine.float8_cache_weights, it keeps the inputs of all products in FP8.
    """
    shape = setup.shape
    hidden = shape.hidden_size
    intermediate = shape.intermediate_size
    num_experts_per_token = 0
    if expert_weights(setup.hf):
        num_experts_per_token = experts_per_token(shape)
        expert_size = getattr(shape, "moe_intermediate_size", None) or intermediate
        intermediate = num_experts_per_token * expert_size
    query_width, key_width = attention_widths(shape)
    num_keys = keys_per_token(
        setup.config,
        shape,
        setup.world_size,
        lambda size: gathers_keys(setup.config.engine, shape, size),
    )
    num_numbers = (
        4 * hidden
        + 3 * query_width
        + (1 + 2 * num_keys) * key_width
        + 3 * intermediate
        + 2 * num_experts_per_token * hidden
    )
    if recomputes_inputs(setup) and not num_experts_per_token:
        num_numbers -= 2 * hidden + intermediate
    num_bytes = num_numbers * setup.compute_bytes
    num_bytes += rounded_input_bytes(setup)
    if not setup.is_compiled:
        num_bytes += 2 * hidden * (4 + 4) + intermediate * setup.compute_bytes
    return num_bytes


def rounded_input_bytes(setup: Setup) -> float:
    """Return the bytes per token and layer of the inputs that compiled layers keep in FP8.

    They keep them with engine.float8_cache_weights.
    """
    engine = setup.config.engine
    if not (engine.float8_cache_weights and setup.is_compiled):
        return 0
    widths = {}
    for name, layer in float8.chosen_layers(setup.hf, engine.float8_exclude).items():
        block, _, kind = name.rpartition(".")
        widths[block, READS_INPUT_OF.get(kind, kind)] = layer.in_features
    return sum(widths.values()) / len(layer_modules(setup.hf, setup.hf.get_decoder()))


def recomputes_inputs(setup: Setup) -> bool:
    """Return whether layers compute the inputs of their products again in the backward pass.

    Measured with compiled layers whose products are all in FP8; other cases may keep some inputs.
    """
    config = setup.config
    has_only_float8 = float8.is_used(config) and not config.engine.float8_exclude
    return has_only_float8 and setup.is_compiled and config.model.lora.rank == 0


def tower_bytes_per_token(setup: Setup) -> float:
    """Return the bytes that the vision tower keeps per token if all tokens are image tokens."""
    config = setup.config
    processor = Processor(config.model.path, dropped=config.data.drop_processor_keys)
    if not setup.is_trained:
        return 0
    return vision.kept_bytes_per_token(
        setup.hf, processor, setup.compute_bytes, config.engine.activation_checkpointing
    )


def chunk_logits_bytes(setup: Setup) -> float:
    """Return the bytes of a chunk's logits and gradient, and of fp32 copies if not compiled."""
    bytes_per_logit = 2 * setup.compute_bytes
    if not setup.is_compiled:
        bytes_per_logit += 8
    num_tokens = min(setup.num_tokens, setup.config.engine.log_prob_chunk_size)
    return num_tokens * setup.num_outputs * bytes_per_logit


def checkpoint_bytes(config: DictConfig, head: Head = Head.LOG_PROBS) -> int:
    """Return the size of a checkpoint in bytes: weights and Adam's two moments.

    With adapters, only the adapters and their moments are saved.
    """
    hf, adapted_layers = build_model(config, head)
    trained = [p for p in hf.parameters() if p.requires_grad]
    saved = trained if adapted_layers else hf.state_dict().values()
    state_dtype = STATE_DTYPES[config.optim.state_dtype]
    of_moments = 2 * sum(moment_bytes(p, state_dtype) for p in trained)
    return sum(tensor.nbytes for tensor in saved) + of_moments
