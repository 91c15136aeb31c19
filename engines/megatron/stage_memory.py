"""Memory of one rank of each pipeline stage of the Megatron engine, and of its checkpoints."""

import re
from collections import defaultdict
from dataclasses import dataclass

import torch
from omegaconf import DictConfig
from torch import nn

from engines.context_parallel import fixed_cp_size
from engines.heads import Head
from engines.memory import Estimate
from engines.memory_terms import keys_per_token
from engines.model import freeze, mtp
from engines.model.experts import experts_per_token
from engines.model.hf import build_on_meta, read_hf_config
from engines.model.lora import inject
from engines.model.shape import attention_widths, stage_sizes
from engines.planning import round_up

# Names in all models that Megatron supports.
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
OUTPUT_MATRIX = "lm_head.weight"
MTP = "mtp"  # stands for all layers of multi-token prediction
WHOLE_MATRICES = (".mlp.gate.weight", ".input_proj.weight")  # every tensor-parallel rank has them


@dataclass
class PartSizes:
    """How many numbers one rank has of a layer, or of a matrix outside layers.

    frozen   not trained
    learned  trained, and the same on all expert-parallel ranks
    experts  trained, divided over expert-parallel ranks
    """

    frozen: int = 0
    learned: int = 0
    experts: int = 0

    def __add__(self, other: "PartSizes") -> "PartSizes":
        return PartSizes(
            self.frozen + other.frozen,
            self.learned + other.learned,
            self.experts + other.experts,
        )


@dataclass(frozen=True)
class Bytes:
    """Bytes per number.

    compute    of frozen weights and activations
    trained    of trained weights
    gradient   of gradients in DDP's buffers
    optimizer  Adam's two moments, and an fp32 master of weights that are not fp32
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
class Subject:
    """What is estimated: a model on a layout."""

    config: DictConfig
    world_size: int
    device_type: str
    head: Head
    is_trained: bool
    shape: object  # the model's configuration
    sizes: dict[int | str, PartSizes]  # by number of a layer, or by name
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
    """Estimate the memory of one rank of each pipeline stage at its fullest moment.

    Parameters, gradients and optimizer are exact except for the padding of buffers, and for parts
    of unequal size, which are means over the ranks that share them. Activations are those of as
    many micro-batches as wait for their backward pass on the stage; experts get equal shares.
    """
    shape = read_hf_config(config.model.path)
    sizes = part_sizes(build_model(config, head), config, shape)
    bytes_per_number = Bytes.of(config)
    subject = Subject(
        config, world_size, device_type, head, is_trained, shape, sizes, bytes_per_number
    )
    layers = torch.arange(shape.num_hidden_layers)
    chunks = layers.split(stage_sizes(shape.num_hidden_layers, subject.pp * subject.vpp))
    estimates = []
    for stage in range(subject.pp):
        layers_of_stage = torch.cat(chunks[stage :: subject.pp]).tolist()
        estimate = estimate_stage(subject, stage, layers_of_stage)
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
    """Count what one rank has of every layer and of every other matrix."""
    sizes = defaultdict(PartSizes)
    for name, parameter in hf.named_parameters():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if layer:
            part = int(layer[1])
        elif ".mtp_layers." in name:
            part = MTP
        else:
            part = name
        number = numbers_on_rank(name, parameter, config.engine, shape)
        if not parameter.requires_grad:
            sizes[part].frozen += number
        elif ".experts." in name:
            sizes[part].experts += number
        else:
            sizes[part].learned += number
    return sizes


def numbers_on_rank(name: str, parameter: nn.Parameter, engine: DictConfig, shape) -> int:
    """Return how many numbers of a parameter one tensor- and expert-parallel rank has."""
    tp = engine.tensor_model_parallel_size
    is_row_parallel = ".o_proj." in name or ".down_proj." in name
    if ".lora_" in name:
        # Of a row-parallel layer A is divided, of the others B.
        is_divided = is_row_parallel is (".lora_A." in name)
        return parameter.numel() // (tp if is_divided else 1)
    if name in (EMBEDDING, OUTPUT_MATRIX):
        return round_up(len(parameter), tp) // tp * shape.hidden_size
    if ".experts." in name:
        return parameter.numel() // engine.expert_model_parallel_size
    # Whole on every rank: norms, biases of row-parallel layers, routers.
    is_whole_vector = parameter.ndim == 1 and (is_row_parallel or not name.endswith(".bias"))
    if is_whole_vector or name.endswith(WHOLE_MATRICES):
        return parameter.numel()
    return parameter.numel() // tp


def estimate_stage(subject: Subject, stage: int, layers: list[int]) -> Estimate:
    """Estimate one rank of a pipeline stage that has these layers."""
    engine = subject.config.engine
    hidden = subject.shape.hidden_size
    is_last = stage == subject.pp - 1
    held = PartSizes()
    for part in parts_of_stage(subject, stage, layers):
        held = held + subject.sizes[part]
    num_optimizer_shards = 1
    num_expert_shards = 1
    if engine.use_distributed_optimizer:
        num_optimizer_shards = subject.world_size // (subject.pp * subject.tp)
        num_expert_shards = subject.world_size // (subject.pp * engine.expert_model_parallel_size)
    trained = held.learned + held.experts
    in_optimizer = held.learned / num_optimizer_shards + held.experts / num_expert_shards
    activations = activation_bytes(subject, stage, len(layers))
    head_input = is_last * subject.num_tokens * hidden * subject.bytes.compute
    is_output_trained = not subject.sizes[subject.output_matrix].frozen
    return Estimate(
        parameters=held.frozen * subject.bytes.compute + trained * subject.bytes.trained,
        gradients=trained * subject.bytes.gradient,
        optimizer=subject.bytes.optimizer * in_optimizer,
        activations=activations + head_input,
        chunk_logits=is_last * chunk_logits_bytes(subject),
        output_matrix_gradient=is_last * subject.num_outputs * hidden * 4 * is_output_trained,
    )


def parts_of_stage(subject: Subject, stage: int, layers: list[int]) -> set[int | str]:
    """Return the keys of Subject.sizes that a stage holds."""
    parts = {*layers}
    if stage == 0:
        parts.add(EMBEDDING)
    if stage == subject.pp - 1:
        parts |= {NORM, subject.output_matrix}
        if subject.has_mtp:  # with a copy of the embedding
            parts |= {MTP, EMBEDDING}
    return parts


def activation_bytes(subject: Subject, stage: int, num_layers: int) -> float:
    """Return the bytes of activations of all micro-batches that wait for their backward pass."""
    in_layer = layer_activation_bytes(subject)
    if not subject.is_trained:
        return in_layer
    pp = subject.pp
    vpp = subject.vpp
    num_waiting = pp - stage if vpp == 1 else 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
    num_kept_layers = num_waiting * num_layers // vpp
    if subject.config.engine.recompute == "full":
        hidden = subject.shape.hidden_size
        inputs = num_kept_layers * subject.num_tokens * subject.bytes.compute * hidden / subject.sp
        kept = inputs + in_layer
    else:
        kept = num_kept_layers * in_layer
    if stage == pp - 1 and subject.has_mtp:
        kept += mtp.num_layers(subject.shape) * in_layer
    return kept


def layer_activation_bytes(subject: Subject) -> float:
    """Return the bytes of activations of one micro-batch in one Llama-like layer."""
    shape = subject.shape
    tp = subject.tp
    hidden = shape.hidden_size
    num_experts_per_token = experts_per_token(shape)
    if num_experts_per_token:
        expert_size = getattr(shape, "moe_intermediate_size", shape.intermediate_size)
        in_mlp = num_experts_per_token * (2 * hidden + 4 * expert_size) / subject.sp
    else:
        in_mlp = 3 * shape.intermediate_size / tp
    query_width, key_width = attention_widths(shape)
    num_dp_ranks = subject.world_size // (tp * subject.pp)
    num_keys = keys_per_token(subject.config, shape, num_dp_ranks, lambda size: True)
    in_attention = (3 * query_width + (1 + 2 * num_keys) * key_width) / tp
    num_numbers = 4 * hidden / subject.sp + in_attention + in_mlp
    return subject.num_tokens * subject.bytes.compute * num_numbers


def chunk_logits_bytes(subject: Subject) -> float:
    """Return the bytes of a chunk's logits and gradient, with fp32 copies if not compiled."""
    bytes_per_logit = 2 * subject.bytes.compute
    if subject.device_type != "cuda":
        bytes_per_logit += 8
    num_tokens = min(subject.num_tokens, subject.config.engine.log_prob_chunk_size)
    return num_tokens * subject.num_outputs * bytes_per_logit


def checkpoint_bytes(config: DictConfig, head: Head = Head.LOG_PROBS) -> int:
    """Return the bytes of a checkpoint, without what file formats add.

    Weights, Adam's moments, and masters of trained weights that are not fp32. With adapters, the
    frozen model is not saved.
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
