"""Memory of one rank of the FSDP engine, and of its checkpoints, from shapes alone."""

from dataclasses import dataclass

import torch
from omegaconf import DictConfig
from torch import nn

from data.images.processor import Reader
from engines.context_parallel import fixed_cp_size
from engines.fsdp import vision
from engines.fsdp.attention import gathers_keys
from engines.fsdp.sharding import is_replicated, is_sharded
from engines.fsdp.transforms import build_model, uses_compile
from engines.heads import Head
from engines.memory import Estimate
from engines.memory_terms import keys_per_token, root_and_layer
from engines.model.experts import expert_weights, experts_per_token
from engines.model.hf import layer_modules, read_hf_config
from engines.model.shape import attention_widths
from engines.optimizer import OPTIMIZERS


@dataclass(frozen=True)
class Subject:
    """What is estimated."""

    config: DictConfig
    world_size: int
    device_type: str
    head: Head
    is_trained: bool
    hf: nn.Module  # on the meta device
    shape: object  # the configuration of the decoder

    @property
    def layers(self) -> list[nn.Module]:
        """Decoder layers and the like; none where transformers does not say what they are."""
        return layer_modules(self.hf, self.hf)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.hf.parameters())

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.hf.parameters() if p.requires_grad]

    @property
    def compute_bytes(self) -> int:
        return getattr(torch, self.config.engine.compute_dtype).itemsize

    @property
    def num_tokens(self) -> float:
        """Tokens of a full micro-batch on this rank."""
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
    """Estimate one rank's memory at its fullest moment; there is one pipeline stage.

    In training that is when the last of several full micro-batches begins its backward pass; for a
    reference, which has none, in its forward pass. A full micro-batch has
    data.max_tokens_per_micro_batch tokens.
    """
    shape = read_hf_config(config.model.path).get_text_config()
    hf, _ = build_model(config, head)
    subject = Subject(config, world_size, device_type, head, is_trained, hf, shape)
    engine = config.engine

    num_shards = engine.fsdp_size if engine.fsdp_size > 0 else world_size
    frozen = sum(p.nbytes for p in subject.parameters if not p.requires_grad)
    if not is_replicated(config, world_size):
        frozen = frozen / num_shards
    gradients = sum(p.nbytes for p in subject.trained) / num_shards
    gathered_weights, unreduced_gradients = sharding_buffers(subject)
    image_activations = None
    if config.model.images:
        image_activations = subject.num_tokens * tower_bytes_per_token(subject)
    output_matrix = hf.get_output_embeddings().weight
    estimate = Estimate(
        parameters=frozen + gradients,
        gradients=gradients,
        optimizer=moments_per_number(subject) * gradients,
        gathered_weights=gathered_weights,
        unreduced_gradients=unreduced_gradients,
        activations=subject.num_tokens * activation_bytes_per_token(subject),
        image_activations=image_activations,
        chunk_logits=chunk_logits_bytes(subject),
        output_matrix_gradient=(
            subject.num_outputs * shape.hidden_size * 4 * output_matrix.requires_grad
        ),
        is_on_host=engine.cpu_offload,
        has_unknown_optimizer=config.optim.name not in OPTIMIZERS,
    )
    return [estimate.for_role(config, device_type, is_trained)]


def moments_per_number(subject: Subject) -> float:
    """Return how many moments the optimizer keeps of each trained number.

    Adam keeps two, Muon one for the hidden matrices. The user's own optimizer is unknown: two.
    """
    if subject.config.optim.name != "muon":
        return 2
    num_in_matrices = 0
    for layer in subject.layers:
        matrices = [p for p in layer.parameters() if p.ndim == 2 and p.requires_grad]
        num_in_matrices += sum(p.numel() for p in matrices)
    return 2 - num_in_matrices / sum(p.numel() for p in subject.trained)


def sharding_buffers(subject: Subject) -> tuple[float, float]:
    """Return the bytes of gathered weights and of unreduced gradients.

    Gathered are the root's matrices and two layers, since one computes while the next is gathered;
    without resharding all layers. Unreduced are the gradients of the root and of one layer, and the
    copy that is reduced.
    """
    config = subject.config
    if not is_sharded(config, subject.world_size):
        return 0, 0
    has_only_adapters = is_replicated(config, subject.world_size)
    sharded = subject.trained if has_only_adapters else subject.parameters
    layers = subject.layers
    num_layers = 2 if config.engine.reshard_after_forward else len(layers)
    in_root, in_layer = root_and_layer(sharded, layers)
    gathered_weights = (in_root + num_layers * in_layer) * subject.compute_bytes
    reduce_bytes = getattr(torch, config.engine.reduce_dtype).itemsize
    num_unreduced = sum(root_and_layer(subject.trained, layers))
    return gathered_weights, num_unreduced * (subject.compute_bytes + reduce_bytes)


def activation_bytes_per_token(subject: Subject) -> float:
    """Return the bytes of activations that are kept of each token, in all decoder layers.

    Less is kept of layers that no gradient passes, because they and all before them are frozen.
    """
    num_decoder_layers = len(layer_modules(subject.hf, subject.hf.get_decoder()))
    num_layers = num_decoder_layers or subject.shape.num_hidden_layers
    in_one_layer = layer_bytes_per_token(subject)
    if not subject.is_trained:
        return in_one_layer
    if subject.config.engine.activation_checkpointing:
        inputs = subject.shape.hidden_size * subject.compute_bytes * num_layers
        return inputs + in_one_layer
    return in_one_layer * num_layers


def layer_bytes_per_token(subject: Subject) -> float:
    """Return the bytes of activations in one Llama-like layer.

    They are residual and normalized inputs; q, k, v and the attention's output; gate, up and their
    product, for each expert that a token goes to, with the expert's copy of the token and its
    output. Without torch.compile there are also the fp32 copies in both norms and the gate's
    activation.
    """
    shape = subject.shape
    hidden = shape.hidden_size
    intermediate = shape.intermediate_size
    num_experts_per_token = 0
    if expert_weights(subject.hf):
        num_experts_per_token = experts_per_token(shape)
        expert_size = getattr(shape, "moe_intermediate_size", None) or intermediate
        intermediate = num_experts_per_token * expert_size
    query_width, key_width = attention_widths(shape)
    num_keys = keys_per_token(
        subject.config,
        shape,
        subject.world_size,
        lambda size: gathers_keys(subject.config.engine, shape, size),
    )
    num_numbers = (
        4 * hidden
        + 3 * query_width
        + (1 + 2 * num_keys) * key_width
        + 3 * intermediate
        + 2 * num_experts_per_token * hidden
    )
    num_bytes = num_numbers * subject.compute_bytes
    if not subject.is_compiled:
        num_bytes += 2 * hidden * (4 + 4) + intermediate * subject.compute_bytes
    return num_bytes


def tower_bytes_per_token(subject: Subject) -> float:
    """Return the bytes kept in the vision tower, as if every token stood for a part of an image."""
    config = subject.config
    reader = Reader(config.model.path, dropped=config.data.drop_processor_keys)
    if not subject.is_trained:
        return 0
    return vision.count_kept(
        subject.hf, reader, subject.compute_bytes, config.engine.activation_checkpointing
    )


def chunk_logits_bytes(subject: Subject) -> float:
    """Return the bytes of a chunk's logits and their gradient, with fp32 copies if not compiled."""
    bytes_per_logit = 2 * subject.compute_bytes
    if not subject.is_compiled:
        bytes_per_logit += 8
    num_tokens = min(subject.num_tokens, subject.config.engine.log_prob_chunk_size)
    return num_tokens * subject.num_outputs * bytes_per_logit


def checkpoint_bytes(config: DictConfig, head: Head = Head.LOG_PROBS) -> int:
    """Return the bytes of a checkpoint: weights and Adam's moments; with adapters, theirs alone."""
    hf, adapted_layers = build_model(config, head)
    trained = [p for p in hf.parameters() if p.requires_grad]
    saved = trained if adapted_layers else hf.state_dict().values()
    return sum(tensor.nbytes for tensor in saved) + 2 * sum(p.nbytes for p in trained)
