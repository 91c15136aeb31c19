"""engine.float8_all_gather: ranks gather the weights of layers in FP8 as FP8 numbers.

Without it, FSDP2 gathers a weight in the compute dtype, and every rank rounds all of it in every
pass. Here, each rank rounds its own part, with the scale of the whole weight, and the ranks gather
the rounded parts, which have half of the bytes. The numbers are those that rounding after gathering
gives.

FSDP2 leaves it to a tensor how it is gathered, if the tensor has two methods: fsdp_pre_all_gather()
and fsdp_post_all_gather(). torchao has a class of tensors with them. Here, a rank's part of a
weight stays a plain tensor that has the two methods of its layer as attributes. So optimizers,
checkpoints and exports see no difference.

Only for engine.float8=tensorwise, where both products use the same scale for the weight. Importing
this module imports torchao.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole
from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

from engines.fsdp.recurrence import recurrent_layers
from engines.fsdp.sharding import SHARD
from engines.model import float8

DTYPE = torch.float8_e4m3fn


class GatheredFloat8Linear(Float8Linear):
    """A linear layer whose weight FSDP2 gathers in FP8.

    Attributes:
        part: this rank's part of the weight, [out_features / ranks, in_features].
        group: the ranks that have the other parts.
        compute_dtype: what the weight is cast to before it is rounded.
        is_compiled: whether to compile the rounding.
        scale: what the weight is multiplied by before it is rounded, [] fp32; None outside of
            scaled_once().
    """

    part: Tensor
    group: dist.ProcessGroup
    compute_dtype: torch.dtype
    is_compiled: bool
    scale: Tensor | None

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """Return (what FSDP2 gathers,) and what it passes to fsdp_post_all_gather()."""
        scale = self.scale
        if scale is None:
            (scale,) = common_scales([self])
        rounding = compiled_round_part if self.is_compiled else round_part
        # The cast is not compiled with the rest, which would leave it out. As bytes, because gloo
        # cannot gather FP8.
        rounded = rounding(self.part.to(self.compute_dtype), scale)
        return (rounded.view(torch.uint8),), (scale,)

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor],
        scales: tuple[Tensor],
        dtype: torch.dtype,
        *,
        out: Float8TrainingTensor | None = None,
    ) -> tuple[Float8TrainingTensor, tuple[Tensor]] | None:
        """Make a weight of what was gathered, or give `out`, which holds it already, the new scale.

        Returns:
            The weight, and the tensors whose memory FSDP2 frees when it reshards.
        """
        (content,) = gathered
        (scale,) = scales
        if out is not None:
            out._scale = scale
            return None
        weight = Float8TrainingTensor(
            content.view(DTYPE), scale, dtype, self.linear_mm_config, GemmInputRole.WEIGHT
        )
        return weight, (content,)


def round_part(part: Tensor, scale: Tensor) -> Tensor:
    """Return a part of a weight in FP8."""
    return to_fp8_saturated(part.float() * scale, DTYPE)


compiled_round_part = torch.compile(round_part, dynamic=True)


def use_gather(
    hf: nn.Module, num_shards: int, compute_dtype: torch.dtype, is_compiled: bool
) -> None:
    """Make FSDP2 gather weights of FP8 layers in FP8, in place: see float8.gathered_layers().

    The weights hold memory by now. num_shards: the ranks that share a weight.
    """
    layers = [layer for layer in hf.modules() if type(layer) is Float8Linear]
    for layer in float8.gathered_layers(layers, recurrent_layers(hf), num_shards):
        layer.__class__ = GatheredFloat8Linear
        # FSDP2 looks for the methods at this tensor; DTensor.to_local() returns another object.
        layer.part = layer.weight._local_tensor
        layer.group = layer.weight.device_mesh[SHARD].get_group()
        layer.compute_dtype = compute_dtype
        layer.is_compiled = is_compiled
        layer.scale = None
        layer.part.fsdp_pre_all_gather = layer.fsdp_pre_all_gather
        layer.part.fsdp_post_all_gather = layer.fsdp_post_all_gather


@contextmanager
def scaled_once(model: nn.Module) -> Iterator[None]:
    """Compute the scales of all weights at the beginning of this block, and keep them within it.

    Without this block, each weight that is gathered needs a message of its own for its scale.
    Nothing may change the weights within the block.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GatheredFloat8Linear)]
    try:
        for layer, scale in zip(layers, common_scales(layers)):
            layer.scale = scale
        yield
    finally:
        for layer in layers:
            layer.scale = None


@torch.no_grad()
def common_scales(layers: list[GatheredFloat8Linear]) -> list[Tensor]:
    """Return the scales of the layers' whole weights, [] fp32 each. Called by all ranks.

    The largest number of a weight becomes the largest that FP8 can represent.
    """
    if not layers:
        return []
    norms = torch._foreach_norm([layer.part for layer in layers], math.inf)
    largest = torch.stack(norms).to(layers[0].compute_dtype)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=layers[0].group)
    return list(amax_to_scale(largest, DTYPE).unbind())
