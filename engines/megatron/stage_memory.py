"""Estimates the Megatron engine's memory per pipeline stage, and the size of its checkpoints."""

import re
from collections import defaultdict
from dataclasses import dataclass

import torch
from omegaconf import DictConfig
from torch import nn

from engines.context_parallel import fixed_cp_size
from engines.heads import Head
from engines.memory import Estimate
from engines.memory_terms import keys_per_token, teacher_matrix_bytes, teacher_outputs_bytes
from engines.model import freeze, mtp
from engines.model.experts import experts_per_token
from engines.model.hf import build_on_meta, read_hf_config
from engines.model.lora import inject
from engines.model.shape import attention_widths, stage_sizes
from engines.planning import round_up

# Parameter names that are the same in all models that this engine supports.
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
OUTPUT_MATRIX = "lm_head.weight"
# The key for all layers for multi-token prediction together.
MTP = "mtp"
# Matrices that tensor-parallel ranks do not divide.
WHOLE_MATRICES = (".mlp.gate.weight", ".input_proj.weight")


@dataclass
class PartSizes:
    """How many elements of parameters one rank holds in a layer, or in a matrix outside layers.

    frozen   parameters that are not trained
    dense    trained parameters that are the same on all expert-parallel ranks
    experts  trained parameters that expert-parallel ranks divide
    """

    frozen: int = 0
    dense: int = 0
    experts: int = 0

    def __add__(self, other: "PartSizes") -> "PartSizes":
        return PartSizes(
            self.frozen + other.frozen,
            self.dense + other.dense,
            self.experts + other.experts,
        )


@dataclass(frozen=True)
class Bytes:
    """Bytes per element.

    compute    for frozen weights and activations
    trained    for trained weights
    gradient   for gradients in DDP's buffers
    optimizer  for Adam's two moments and, if weights are not fp32, an fp32 copy of them
    """

    compute: int
    trained: int
    gradient: int
    optimizer: int

    @staticmethod
    def of(config: DictConfig) -> "Bytes":
        engine = config.engine
        lora = config.model.lora
        compute = getattr(torch, engine.compute_dtype).itemsize
        trained = getattr(torch, lora.dtype).itemsize if lora.rank else compute
        reduces_in_fp32 = engine.override_ddp_config.get("grad_reduce_in_fp32", True)
        gradient = 4 if reduces_in_fp32 else trained
        optimizer = 8 if trained == 4 else 12
        return Bytes(compute, trained, gradient, optimizer)


@dataclass(frozen=True)
class Setup:
    """The model, settings and layout whose memory is estimated."""

    config: DictConfig
    world_size: int
    device_type: str
    head: Head
    is_trained: bool
    shape: object  # the model's configuration
    sizes: dict[int | str, PartSizes]  # by layer number, or by name outside layers
    bytes: Bytes

    @property
    def tp(self) -> int:
        return self.config.engine.tensor_model_parallel_size

    @property
    def pp(self) -> int:
        return self.config.engine.pipeline_model_parallel_size

    @property
    def vpp(self) -> int:
        return self.config.engine.virtual_pipeline_model_parallel_size

    @property
    def sp(self) -> int:
        """The number of ranks that divide the tokens between tensor-parallel layers."""
        return self.tp if self.config.engine.sequence_parallel else 1

    @property
    def has_mtp(self) -> bool:
        return mtp.is_trained(self.config)

    @property
    def num_tokens(self) -> float:
        return self.config.data.max_tokens_per_micro_batch / fixed_cp_size(self.config.engine)

    @property
    def num_outputs(self) -> int:
        if self.head is Head.VALUES:
            return 0
        return round_up(self.shape.vocab_size, self.tp) // self.tp

    @property
    def output_matrix(self) -> str:
        is_tied = self.shape.tie_word_embeddings and self.head is not Head.VALUES
        return EMBEDDING if is_tied else OUTPUT_MATRIX


def estimate_memory(
    config: DictConfig,
    world_size: int,
    device_type: str,
    head: Head = Head.LOG_PROBS,
    is_trained: bool = True,
) -> list[Estimate]:
    """Estimate one rank's peak memory in each pipeline stage.

    The sizes of parameters, gradients and optimizer state are exact, except that the padding of
    buffers is ignored and uneven shares are averaged over ranks. Activations are counted for all
    micro-batches that wait for their backward pass on the stage. All experts are assumed to get
    equally many tokens.
    """
    shape = read_hf_config(config.model.path)
    sizes = part_sizes(build_model(config, head), config, shape)
    bytes_per_number = Bytes.of(config)
    setup = Setup(config, world_size, device_type, head, is_trained, shape, sizes, bytes_per_number)
    layers = torch.arange(shape.num_hidden_layers)
    chunks = layers.split(stage_sizes(shape.num_hidden_layers, setup.pp * setup.vpp))
    estimates = []
    for stage in range(setup.pp):
        layers_of_stage = torch.cat(chunks[stage :: setup.pp]).tolist()
        estimate = estimate_stage(setup, stage, layers_of_stage)
        estimates.append(estimate.for_role(config, device_type, is_trained))
    return estimates


def build_model(config: DictConfig, head: Head) -> nn.Module:
    """Build the model on the meta device, with adapters and frozen parameters as configured."""
    hf = build_on_meta(
        read_hf_config(config.model.path),
        torch.float32,
        head,
        with_mtp=mtp.is_trained(config),
    )
    if config.model.lora.rank:
        inject(hf, config.model.lora, head)
    freeze.apply(config, hf, head)
    return hf


def part_sizes(hf: nn.Module, config: DictConfig, shape) -> dict[int | str, PartSizes]:
    """Count the parameters that one rank holds, per layer and per matrix outside layers."""
    sizes = defaultdict(PartSizes)
    for name, parameter in hf.named_parameters():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if layer:
            part = int(layer[1])
        elif ".mtp_layers." in name:
            part = MTP
        else:
            part = name
        number = elements_on_rank(name, parameter, config.engine, shape)
        if not parameter.requires_grad:
            sizes[part].frozen += number
        elif ".experts." in name:
            sizes[part].experts += number
        else:
            sizes[part].dense += number
    return sizes


def elements_on_rank(name: str, parameter: nn.Parameter, engine: DictConfig, shape) -> int:
    """Return how many of a parameter's elements one tensor- and expert-parallel rank holds."""
    tp = engine.tensor_model_parallel_size
    is_row_parallel = ".o_proj." in name or ".down_proj." in name
    if ".lora_" in name:
        # Ranks divide A in row-parallel layers, and B in column-parallel layers.
        is_divided = is_row_parallel is (".lora_A." in name)
        return parameter.numel() // (tp if is_divided else 1)
    if name in (EMBEDDING, OUTPUT_MATRIX):
        return round_up(len(parameter), tp) // tp * shape.hidden_size
    if ".experts." in name:
        return parameter.numel() // engine.expert_model_parallel_size
    # Norms, routers and the biases of row-parallel layers are whole on every rank.
    is_whole_vector = parameter.ndim == 1 and (is_row_parallel or not name.endswith(".bias"))
    if is_whole_vector or name.endswith(WHOLE_MATRICES):
        return parameter.numel()
    return parameter.numel() // tp


def estimate_stage(setup: Setup, stage: int, layers: list[int]) -> Estimate:
    """Estimate one rank's memory in a pipeline stage with these layers."""
    engine = setup.config.engine
    hidden = setup.shape.hidden_size
    is_last = stage == setup.pp - 1
    held = PartSizes()
    for part in parts_of_stage(setup, stage, layers):
        held = held + setup.sizes[part]
    num_optimizer_shards = 1
    num_expert_shards = 1
    if engine.use_distributed_optimizer:
        num_optimizer_shards = setup.world_size // (setup.pp * setup.tp)
        num_expert_shards = setup.world_size // (setup.pp * engine.expert_model_parallel_size)
    trained = held.dense + held.experts
    in_optimizer = held.dense / num_optimizer_shards + held.experts / num_expert_shards
    activations = activation_bytes(setup, stage, len(layers))
    head_input = is_last * setup.num_tokens * hidden * setup.bytes.compute
    is_output_trained = not setup.sizes[setup.output_matrix].frozen
    return Estimate(
        parameters=held.frozen * setup.bytes.compute + trained * setup.bytes.trained,
        gradients=trained * setup.bytes.gradient,
        optimizer=setup.bytes.optimizer * in_optimizer,
        activations=activations + head_input,
        chunk_logits=is_last * chunk_logits_bytes(setup),
        output_matrix_gradient=is_last * setup.num_outputs * hidden * 4 * is_output_trained,
        teacher_matrix=teacher_matrix_bytes(setup.config) if is_last else None,
        teacher_outputs=(
            teacher_outputs_bytes(setup.config, setup.world_size) if is_last else None
        ),
    )


def parts_of_stage(setup: Setup, stage: int, layers: list[int]) -> set[int | str]:
    """Return the keys of Setup.sizes for the parts that a stage holds."""
    parts = {*layers}
    if stage == 0:
        parts.add(EMBEDDING)
    if stage == setup.pp - 1:
        parts |= {NORM, setup.output_matrix}
        if setup.has_mtp:
            # MTP layers need their own copy of the embedding.
            parts |= {MTP, EMBEDDING}
    return parts


def activation_bytes(setup: Setup, stage: int, num_layers: int) -> float:
    """Return the bytes of activations for all micro-batches that wait for their backward pass."""
    in_layer = layer_activation_bytes(setup)
    if not setup.is_trained:
        return in_layer
    pp = setup.pp
    vpp = setup.vpp
    num_waiting = pp - stage if vpp == 1 else 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
    num_kept_layers = num_waiting * num_layers // vpp
    if setup.config.engine.recompute == "full":
        hidden = setup.shape.hidden_size
        inputs = num_kept_layers * setup.num_tokens * setup.bytes.compute * hidden / setup.sp
        kept = inputs + in_layer
    else:
        kept = num_kept_layers * in_layer
    if stage == pp - 1 and setup.has_mtp:
        kept += mtp.num_layers(setup.shape) * in_layer
    return kept


def layer_activation_bytes(setup: Setup) -> float:
    """Return the bytes of activations for one micro-batch in one Llama-like layer."""
    shape = setup.shape
    tp = setup.tp
    hidden = shape.hidden_size
    num_experts_per_token = experts_per_token(shape)
    if num_experts_per_token:
        expert_size = getattr(shape, "moe_intermediate_size", shape.intermediate_size)
        in_mlp = num_experts_per_token * (2 * hidden + 4 * expert_size) / setup.sp
    else:
        in_mlp = 3 * shape.intermediate_size / tp
    query_width, key_width = attention_widths(shape)
    num_dp_ranks = setup.world_size // (tp * setup.pp)
    num_keys = keys_per_token(setup.config, shape, num_dp_ranks, lambda size: True)
    in_attention = (3 * query_width + (1 + 2 * num_keys) * key_width) / tp
    num_numbers = 4 * hidden / setup.sp + in_attention + in_mlp
    return setup.num_tokens * setup.bytes.compute * num_numbers


def chunk_logits_bytes(setup: Setup) -> float:
    """Return the bytes of a chunk's logits and gradient, and of fp32 copies if not compiled."""
    bytes_per_logit = 2 * setup.bytes.compute
    if setup.device_type != "cuda":
        bytes_per_logit += 8
    num_tokens = min(setup.num_tokens, setup.config.engine.log_prob_chunk_size)
    return num_tokens * setup.num_outputs * bytes_per_logit


def checkpoint_bytes(config: DictConfig, head: Head = Head.LOG_PROBS) -> int:
    """Return the size of a checkpoint in bytes, without the overhead of file formats.

    It contains the weights, Adam's moments and, for trained weights that are not fp32, fp32 copies.
    With adapters, the frozen model is not saved.
    """
    lora = config.model.lora
    dtype = getattr(torch, lora.dtype if lora.rank else config.engine.compute_dtype)
    trained_bytes = 12 if dtype is torch.float32 else 14
    frozen_bytes = 0 if lora.rank else dtype.itemsize
    total = 0
    for parameter in build_model(config, head).parameters():
        per_number = trained_bytes if parameter.requires_grad else frozen_bytes
        total += parameter.numel() * per_number
    return total
