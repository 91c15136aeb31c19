"""Write the trainer's weights into vLLM's FP8 layers, in place.

vLLM can do this itself: reload_weights rebuilds every layer from its weights, and quantizes it
again. That takes a quarter of a second even for a small model. But each row of a matrix has its own
scale, so it can be quantized alone. To find out where the rows belong, vLLM's loaders run once on
stand-ins for the layers' matrices, and their copies are recorded instead of made.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rollout.vllm.adapters import LayoutError
from rollout.vllm.copies import CopyRecorder, storage_id

# The class of vLLM's method for weights with one scale per output channel.
METHOD = "Fp8PtpcOnlineLinearMethod"
# Scales are at least 1 / (SMALLEST_SCALE_DIVISOR * largest number in FP8), as in vLLM.
SMALLEST_SCALE_DIVISOR = 512


@dataclass(frozen=True)
class Rows:
    """Rows of a matrix in FP8, and the part of a weight that they hold.

    Attributes:
        layer: vLLM's layer. Its weight is [in, out] FP8, transposed in memory, and its
            weight_scale is [out, 1] fp32.
        start: The number of the first row, in [out, in].
        part: A view of the weight, on the meta device. Only its shape, strides and offset matter.
    """

    layer: nn.Module
    start: int
    part: Tensor

    def write(self, weight: Tensor) -> None:
        """Quantize the part of a weight, and write it into the layer.

        Args:
            weight: Contiguous, in 16 bits.
        """
        part = self.part
        rows = weight.as_strided(part.size(), part.stride(), part.storage_offset())
        codes, scales = quantize_rows(rows)
        stop = self.start + len(rows)
        self.layer.weight.data.t()[self.start : stop] = codes
        self.layer.weight_scale.data[self.start : stop] = scales


class Fp8Weights:
    """Knows where the weights of the model's files belong in vLLM's FP8 layers."""

    def __init__(self, vllm_model: nn.Module, shapes: dict[str, torch.Size], dtype: torch.dtype):
        """
        Args:
            shapes: {name in vLLM: shape} of all weights of the model.
            dtype: The dtype of the weights.

        Raises:
            LayoutError: vLLM stores its FP8 weights in a form that is not known here.
        """
        layers = fp8_layers(vllm_model)
        with stand_ins(layers) as layer_of_storage:
            recorder = CopyRecorder(shapes, dtype)
            with recorder:
                vllm_model.load_weights(iter(recorder.weights.items()))
        self.rows: dict[str, list[Rows]] = {}
        for name, copies in recorder.copies.items():
            rows = []
            for copy in copies:
                layer = layer_of_storage.get(storage_id(copy.destination))
                if layer is not None:
                    rows.append(rows_of(layer, copy))
            if rows:
                self.rows[name] = rows
        check_complete(layers, self.rows)
        for layer in {tuple(layer.weight.shape): layer for layer in layers}.values():
            check_form(layer)

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Write the weights of FP8 layers into vLLM, and yield all others."""
        for name, weight in weights:
            if name not in self.rows:
                yield name, weight
                continue
            contiguous = weight.contiguous()
            for rows in self.rows[name]:
                rows.write(contiguous)


# -- quantizing -----------------------------------------------------------------------------------


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [n, in] in FP8 and scales [n, 1] fp32, with rows [n, in] = codes * scales.

    The results equal vLLM's own quantization.
    """
    if rows.is_cuda:
        from vllm import _custom_ops

        return _custom_ops.scaled_fp8_quant(rows, scale=None, use_per_token_if_dynamic=True)
    largest = torch.tensor(torch.finfo(torch.float8_e4m3fn).max)
    scales = rows.abs().amax(1, keepdim=True).float() / largest
    scales = scales.clamp_min(1 / (largest * SMALLEST_SCALE_DIVISOR))
    codes = (rows / scales).clamp_(-largest, largest).to(torch.float8_e4m3fn)
    return codes, scales


# -- finding places -------------------------------------------------------------------------------


def fp8_layers(vllm_model: nn.Module) -> list[nn.Module]:
    """Return vLLM's linear layers that multiply in FP8."""
    return [
        module
        for module in vllm_model.modules()
        if type(getattr(module, "quant_method", None)).__name__ == METHOD
    ]


@contextmanager
def stand_ins(layers: list[nn.Module]) -> Iterator[dict[int, nn.Module]]:
    """Within this block, the layers have weights in 16 bits, as when vLLM's loaders fill them.

    The stand-ins are in host memory, which is never written to.

    Yields:
        {id of a stand-in's storage: layer}
    """
    weights = [layer._parameters["weight"] for layer in layers]
    layer_of_storage = {}
    for layer in layers:
        stand_in = make_stand_in(layer)
        layer._parameters["weight"] = stand_in
        layer_of_storage[storage_id(stand_in)] = layer
    try:
        yield layer_of_storage
    finally:
        for layer, weight in zip(layers, weights):
            layer._parameters["weight"] = weight


def make_stand_in(layer: nn.Module) -> Tensor:
    """Return a matrix [out, in] with the loader of the layer's weight."""
    # vLLM-private: the only record of a layer's weights before it quantized them.
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    described = get_layerwise_info(layer).restore_metadata[0]["weight"]
    stand_in = torch.empty(described.shape, dtype=described.dtype, device="cpu")
    stand_in.__class__ = described.__class__
    stand_in.__dict__ = described.__dict__.copy()
    restore_layer_refs(stand_in, layer)
    loader = stand_in.weight_loader
    while hasattr(loader, "__wrapped__"):  # by vLLM, to quantize a layer that is complete
        loader = loader.__wrapped__
    stand_in.weight_loader = loader
    return stand_in


def rows_of(layer: nn.Module, copy) -> Rows:
    """Return the rows that a recorded copy fills.

    Raises:
        LayoutError: It does not fill whole rows.
    """
    destination = copy.destination
    width = layer.weight.shape[0]
    is_whole = destination.ndim == 2 and destination.shape[1] == width
    if not is_whole or destination.stride() != (width, 1):
        raise LayoutError("vLLM fills only parts of the rows of a matrix")
    return Rows(layer, destination.storage_offset() // width, copy.source)


# -- checking -------------------------------------------------------------------------------------


def check_complete(layers: list[nn.Module], rows_of_weights: dict[str, list[Rows]]) -> None:
    """Raise LayoutError unless the weights fill every row of every layer."""
    num_filled = {layer: 0 for layer in layers}
    for rows_of_weight in rows_of_weights.values():
        for rows in rows_of_weight:
            num_filled[rows.layer] += len(rows.part)
    if any(number != layer.weight.shape[1] for layer, number in num_filled.items()):
        raise LayoutError("vLLM has rows in FP8 that no weight of the model fills")


def check_form(layer: nn.Module) -> None:
    """Let vLLM quantize a random matrix, and compare the result with quantize_rows().

    Raises:
        LayoutError: They differ in shape, memory layout or value.
    """
    weight = layer._parameters["weight"]
    scale = layer._parameters["weight_scale"]
    generator = torch.Generator(weight.device).manual_seed(0)
    matrix = torch.randn(
        weight.shape[::-1], generator=generator, device=weight.device, dtype=torch.bfloat16
    )
    codes, scales = quantize_rows(matrix)
    layer._parameters["weight"] = nn.Parameter(matrix, requires_grad=False)
    layer._already_called_process_weights_after_loading = False
    try:
        layer.quant_method.process_weights_after_loading(layer)
        theirs = layer._parameters["weight"], layer._parameters["weight_scale"]
    finally:
        layer._parameters["weight"] = weight
        layer._parameters["weight_scale"] = scale
    has_form = all(
        (new.shape, new.stride(), new.dtype) == (old.shape, old.stride(), old.dtype)
        for new, old in zip(theirs, (weight, scale))
    )
    has_values = has_form and torch.equal(theirs[0].t().float(), codes.float())
    if not has_values or not torch.equal(theirs[1], scales):
        raise LayoutError("vLLM stores FP8 matrices in a form that is not known here")
