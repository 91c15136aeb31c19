"""engine.float8_cache_weights: weights are rounded to FP8 once per batch, not in every micro-batch.

Within rounded_once(), each layer keeps two FP8 copies of its weight: one as it is stored, for the
forward pass, and one transposed, because FP8 instructions need it in this order for the gradient of
the input. The numbers are those that rounding in every pass gives. A compiled layer also keeps its
inputs in FP8 for the backward pass, instead of rounding them again.

Only for engine.float8=tensorwise, where both products use the same scale for the weight. Importing
this module imports torchao.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
)
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

from engines.fsdp import sharding

FORWARD_DTYPE = torch.float8_e4m3fn  # of weights and inputs
GRADIENT_DTYPE = torch.float8_e5m2


class CachedFloat8Linear(Float8Linear):
    """A linear layer that multiplies by its rounded weight while it has one.

    Attributes:
        rounded: the weight in FP8, [out_features, in_features]; None outside of rounded_once().
        rounded_transpose: the same, [in_features, out_features].
        scale: what the weight was multiplied by before it was rounded, [] fp32.
    """

    rounded: Tensor | None = None
    rounded_transpose: Tensor | None = None
    scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.rounded is None:
            return super().forward(x)
        output = RoundedProduct.apply(
            x, self.weight, self.rounded, self.rounded_transpose, self.scale, self.linear_mm_config
        )
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        return output

    def keep_rounded(self, rounding: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]) -> None:
        """Round the weight. rounding: round_weight() or compiled_round_weight()."""
        # Detached, since torch.compile would compile anew for every shape of an nn.Parameter.
        self.rounded, self.rounded_transpose, self.scale = rounding(self.weight.detach())

    def drop_rounded(self) -> None:
        """Free the memory of the rounded weight."""
        self.rounded = None
        self.rounded_transpose = None
        self.scale = None


@torch._dynamo.allow_in_graph
class RoundedProduct(torch.autograd.Function):
    """The product of x with a weight that is already in FP8; the weight itself gets the gradient.

    Like torchao's matmul_with_hp_or_float8_args, which rounds the weight in both passes.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        rounded: Tensor,
        rounded_transpose: Tensor,
        scale: Tensor,
        mm_config: LinearMMConfig,
    ) -> Tensor:
        ctx.save_for_backward(x, rounded_transpose, scale)
        ctx.mm_config = mm_config
        factor = weight_factor(rounded.t(), scale, x.dtype, mm_config)
        output = torch.mm(input_factor(x, mm_config), factor)
        return output.reshape(*x.shape[:-1], output.shape[-1])

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, rounded_transpose, scale = ctx.saved_tensors
        mm_config = ctx.mm_config
        of_output = hp_tensor_to_float8_dynamic(
            gradient.reshape(-1, gradient.shape[-1]),
            GRADIENT_DTYPE,
            mm_config,
            gemm_input_role=GemmInputRole.GRAD_OUTPUT,
        )
        factor = weight_factor(rounded_transpose.t(), scale, x.dtype, mm_config)
        of_input = torch.mm(of_output, factor).reshape(x.shape)
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = torch.mm(of_output.t(), input_factor(x, mm_config))
        return of_input, of_weight, None, None, None, None


def input_factor(x: Tensor, mm_config: LinearMMConfig) -> Float8TrainingTensor:
    """Round a layer's input, [..., in_features], to FP8: [tokens, in_features]."""
    return hp_tensor_to_float8_dynamic(
        x.reshape(-1, x.shape[-1]), FORWARD_DTYPE, mm_config, gemm_input_role=GemmInputRole.INPUT
    )


def weight_factor(
    rounded: Tensor, scale: Tensor, dtype: torch.dtype, mm_config: LinearMMConfig
) -> Float8TrainingTensor:
    """Return a rounded weight as a factor of a product whose result has this dtype."""
    return Float8TrainingTensor(rounded, scale, dtype, mm_config, GemmInputRole.WEIGHT, None)


def round_weight(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weight in FP8, its transpose in FP8, and the scale."""
    scale = tensor_to_scale(weight, FORWARD_DTYPE)
    rounded = to_fp8_saturated(weight.float() * scale, FORWARD_DTYPE)
    return rounded, rounded.t().contiguous(), scale


compiled_round_weight = torch.compile(round_weight, dynamic=True)


def use_cache(hf: nn.Module) -> None:
    """Make all of a model's FP8 layers able to keep their rounded weights, in place."""
    for layer in hf.modules():
        if type(layer) is Float8Linear:
            layer.__class__ = CachedFloat8Linear


@contextmanager
def rounded_once(model: nn.Module, is_compiled: bool) -> Iterator[None]:
    """Round all weights at the beginning of this block, and free the results at its end.

    Nothing may change the weights within the block, or reshard them before its last micro-batch.

    Args:
        is_compiled: whether to compile the rounding.
    """
    rounding = compiled_round_weight if is_compiled else round_weight
    layers = [layer for layer in model.modules() if isinstance(layer, CachedFloat8Linear)]
    sharding.gather(model)
    try:
        with torch.no_grad():
            for layer in layers:
                layer.keep_rounded(rounding)
        yield
    finally:
        for layer in layers:
            layer.drop_rounded()
