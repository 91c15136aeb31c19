"""A check that adapters learn: if the loss has a gradient, every adapter must receive one.

Activation recomputation can silently lose the gradient, and some kernels read a layer's weight
directly, which bypasses its adapter. Training would then continue and learn nothing. The guard
watches the first steps and raises an error instead.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from engines.base import LossFn


class AdapterGuard:
    """Watches training until a gradient has reached the adapters, then does nothing.

    is_active  True until a gradient has reached the adapters; always False without adapters
    """

    def __init__(self, device: torch.device, is_active: bool):
        self.device = device
        self.is_active = is_active
        self._loss_gradient = torch.zeros((), device=device)

    def watch(self, loss_fn: LossFn) -> LossFn:
        """Wrap loss_fn so that the guard records the size of its gradient."""
        if not self.is_active:
            return loss_fn
        self._loss_gradient = torch.zeros((), device=self.device)

        def record(gradient: Tensor) -> None:
            self._loss_gradient += gradient.abs().sum()

        def watched_loss(outputs: Tensor, *arguments):
            # If recomputation has broken the graph, the outputs do not require a gradient yet.
            outputs.requires_grad_().register_hook(record)
            return loss_fn(outputs, *arguments)

        return watched_loss

    def check(self, grad_norm: float, without_gradient: Iterable[str] = ()) -> None:
        """Check that the gradient of the loss has reached the adapters.

        All ranks call it together, after the backward passes of a step.

        Args:
            grad_norm: the gradient norm over all adapters.
            without_gradient: names of adapter matrices that received no gradient.

        Raises:
            RuntimeError: the loss has a gradient, but some or all adapters have none.
        """
        if not self.is_active:
            return
        dist.all_reduce(self._loss_gradient)
        loss_has_gradient = bool(self._loss_gradient > 0)
        name = min(without_gradient, default=None)
        if grad_norm == 0 and loss_has_gradient:
            raise RuntimeError(
                "the gradient of every adapter is exactly 0, but the gradient of the loss is not: "
                "model.lora learns nothing with this configuration"
            )
        if name and loss_has_gradient:
            raise RuntimeError(
                f"no gradient reaches {name}, because the model does not call that layer: "
                "leave it out with model.lora.exclude_modules"
            )
        self.is_active = grad_norm == 0
