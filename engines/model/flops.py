"""Counts the floating-point operations of forward and backward passes."""

from itertools import takewhile

from torch import nn

from engines.model import mtp
from engines.model.experts import expert_weights, experts_per_token
from engines.model.hf import layer_modules
from engines.model.quirks import LAYER_TYPES_WITHOUT_ATTENTION
from engines.model.shape import attention_widths, head_dim, layer_configs

# FLOPs per weight and token. The forward pass, the input's gradient and the weight's gradient take
# 2 each.
FORWARD = 2
FROZEN = 4
TRAINED = 6
# Attention takes 1.7 times as long per FLOP as a matrix product: measured on an H200, where it was
# 1.7 with a 0.5B model and 1.8 with a 1.5B model (docs/benchmarks.md).
ATTENTION_FACTOR = 1.7


def count_flops(hf: nn.Module, hf_config) -> tuple[int, int, int]:
    """Return the FLOPs of a forward and backward pass, in three parts.

    Args:
        hf: the model, with its adapters if it has any.

    Returns:
        (in layers, in the output matrix, in attention). Layers: per token, counting only the
        experts that a token is sent to. Output matrix: per token whose log-probability is computed.
        Attention: causal, per squared sequence length.
    """
    hf_config = hf_config.get_text_config()
    skipped_layers = layers_without_gradient(hf)
    skipped = {parameter for layer in skipped_layers for parameter in layer.parameters()}

    output_matrix = hf.get_output_embeddings().weight
    in_layers = layer_flops(hf, hf_config, skipped)
    in_head = matrix_flops(output_matrix, skipped)
    in_attention = attention_flops(hf_config, num_skipped_layers=len(skipped_layers))

    # Each MTP layer has attention and one more product with the output matrix, which it does not
    # train.
    num_mtp_layers = sum(isinstance(module, tuple(mtp.LAYERS.values())) for module in hf.modules())
    query_width, _ = attention_widths(hf_config)
    in_attention += TRAINED * num_mtp_layers * query_width
    in_head += FROZEN * num_mtp_layers * output_matrix.numel()
    return in_layers, in_head, in_attention


def cost_of_length(flops: tuple[int, int, int], length: int) -> float:
    """Return the time that a sequence takes: the FLOPs of matrix products that take as long.

    Args:
        flops: the result of count_flops().
        length: the number of tokens in the sequence.
    """
    in_layers, in_head, in_attention = flops
    return float((in_layers + in_head) * length + ATTENTION_FACTOR * in_attention * length**2)


def layers_without_gradient(hf: nn.Module) -> list[nn.Module]:
    """Return the decoder layers without a backward pass: nothing in or before them is trained."""
    untrained = {*takewhile(lambda parameter: not parameter.requires_grad, hf.parameters())}
    return [
        layer
        for layer in layer_modules(hf, hf.get_decoder())
        if untrained.issuperset(layer.parameters())
    ]


def matrix_flops(matrix: nn.Parameter, skipped: set[nn.Parameter]) -> int:
    """Return the FLOPs per token, forward and backward, of multiplying by a matrix.

    Args:
        skipped: the parameters of layers_without_gradient().
    """
    if matrix.requires_grad:
        per_weight = TRAINED
    elif matrix in skipped:
        per_weight = FORWARD
    else:
        per_weight = FROZEN
    return matrix.numel() * per_weight


def layer_flops(hf: nn.Module, hf_config, skipped: set[nn.Parameter]) -> int:
    """Return the FLOPs per token in the decoder's matrices, without embedding and output matrix."""
    not_in_layers = {hf.get_input_embeddings().weight, hf.get_output_embeddings().weight}
    flops = sum(
        matrix_flops(parameter, skipped)
        for name, parameter in hf.get_decoder().named_parameters()
        if parameter.ndim > 1 and not name.endswith("bias") and parameter not in not_in_layers
    )
    num_chosen = experts_per_token(hf_config)
    for _, stack in expert_weights(hf):
        # A token skips the experts that its router does not choose.
        num_experts = len(stack)
        flops -= matrix_flops(stack, skipped) * (num_experts - num_chosen) // num_experts
    return flops


def attention_flops(hf_config, num_skipped_layers: int) -> int:
    """Return the FLOPs of causal attention in all decoder layers, per squared length."""
    layer_types = getattr(hf_config, "layer_types", None)
    layer_types = layer_types or ["full_attention"] * hf_config.num_hidden_layers
    layers = layer_configs(hf_config)
    if not hf_config.is_heterogeneous:
        layers = layers * len(layer_types)

    flops = 0
    for number, (layer, layer_type) in enumerate(zip(layers, layer_types)):
        if layer_type in LAYER_TYPES_WITHOUT_ATTENTION:
            continue
        has_backward = number >= num_skipped_layers
        per_channel = TRAINED if has_backward else FORWARD
        flops += layer.num_attention_heads * head_dim(layer) * per_channel
    return flops
