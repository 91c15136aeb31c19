"""Estimates the FSDP engine's memory per rank, and the size of its checkpoints, from shapes."""

from dataclasses import dataclass

import torch
from omegaconf import DictConfig
from torch import nn

from data.images.processor import Processor
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
class Setup:
    """The model and settings whose memory is estimated."""

    config: DictConfig
    world_size: int
    device_type: str
    head: Head
    is_trained: bool
    hf: nn.Module  # on the meta device
    shape: object  # the configuration of the decoder

    @property
    def layers(self) -> list[nn.Module]:
        """The layers of the decoder and vision tower; empty if transformers does not name them."""
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

    In training, the peak is when the last of several full micro-batches starts its backward pass. A
    reference model reaches it in the forward pass. A full micro-batch has
    data.max_tokens_per_micro_batch tokens.
    """
    shape = read_hf_config(config.model.path).get_text_config()
    hf, _ = build_model(config, head)
    setup = Setup(config, world_size, device_type, head, is_trained, hf, shape)
    engine = config.engine

    num_shards = engine.fsdp_size if engine.fsdp_size > 0 else world_size
    frozen = sum(p.nbytes for p in setup.parameters if not p.requires_grad)
    if not is_replicated(config, world_size):
        frozen = frozen / num_shards
    gradients = sum(p.nbytes for p in setup.trained) / num_shards
    gathered_weights, unreduced_gradients = sharding_buffers(setup)
    image_activations = None
    if config.model.images:
        image_activations = setup.num_tokens * tower_bytes_per_token(setup)
    output_matrix = hf.get_output_embeddings().weight
    estimate = Estimate(
        parameters=frozen + gradients,
        gradients=gradients,
        optimizer=moments_per_element(setup) * gradients,
        gathered_weights=gathered_weights,
        unreduced_gradients=unreduced_gradients,
        activations=setup.num_tokens * activation_bytes_per_token(setup),
        image_activations=image_activations,
        chunk_logits=chunk_logits_bytes(setup),
        output_matrix_gradient=(
            setup.num_outputs * shape.hidden_size * 4 * output_matrix.requires_grad
        ),
        is_on_host=engine.cpu_offload,
        has_unknown_optimizer=config.optim.name not in OPTIMIZERS,
    )
    return [estimate.for_role(config, device_type, is_trained)]


def moments_per_element(setup: Setup) -> float:
    """Return the mean number of moments that the optimizer keeps per trained element.

    Adam keeps two. Muon keeps one for matrices in layers, and two for other parameters. For the
    user's own optimizer, two are assumed.
    """
    if setup.config.optim.name != "muon":
        return 2
    num_in_matrices = 0
    for layer in setup.layers:
        matrices = [p for p in layer.parameters() if p.ndim == 2 and p.requires_grad]
        num_in_matrices += sum(p.numel() for p in matrices)
    return 2 - num_in_matrices / sum(p.numel() for p in setup.trained)


def sharding_buffers(setup: Setup) -> tuple[float, float]:
    """Return the bytes of gathered weights and of unreduced gradients.

    The gathered weights are the root's and two layers', since one layer computes while the next one
    is gathered. Without resharding, they are the weights of all layers. The unreduced gradients are
    the root's and one layer's, each with a copy that is being reduced.
    """
    config = setup.config
    if not is_sharded(config, setup.world_size):
        return 0, 0
    has_only_adapters = is_replicated(config, setup.world_size)
    sharded = setup.trained if has_only_adapters else setup.parameters
    layers = setup.layers
    num_layers = 2 if config.engine.reshard_after_forward else len(layers)
    in_root, in_layer = root_and_layer(sharded, layers)
    gathered_weights = (in_root + num_layers * in_layer) * setup.compute_bytes
    reduce_bytes = getattr(torch, config.engine.reduce_dtype).itemsize
    num_unreduced = sum(root_and_layer(setup.trained, layers))
    return gathered_weights, num_unreduced * (setup.compute_bytes + reduce_bytes)


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
    fp32 copies in both norms and the gate's activation.
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
    num_bytes = num_numbers * setup.compute_bytes
    if not setup.is_compiled:
        num_bytes += 2 * hidden * (4 + 4) + intermediate * setup.compute_bytes
    return num_bytes


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
    """Return the size of a checkpoint in bytes: weights and Adam's moments.

    With adapters, only the adapters and their moments are saved.
    """
    hf, adapted_layers = build_model(config, head)
    trained = [p for p in hf.parameters() if p.requires_grad]
    saved = trained if adapted_layers else hf.state_dict().values()
    return sum(tensor.nbytes for tensor in saved) + 2 * sum(p.nbytes for p in trained)
