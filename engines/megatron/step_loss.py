"""The loss of one training step, added up over its micro-batches."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from data.batching.batch import Batch
from engines.base import LossFn
from engines.megatron.outputs import TokenOutputs
from engines.microbatch import MicroBatch


@dataclass
class MTPLoss:
    """How the losses of MTP layers enter the loss of a step.

    num_targets: [layers] fp32, the tokens that each layer predicts, over all data-parallel ranks
    weight: the factor on each layer's mean loss
    sums: [layers] fp32, each layer's part of its mean loss on this rank so far
    """

    num_targets: Tensor
    weight: float
    sums: Tensor


class StepLoss:
    """Computes the loss of each micro-batch, and adds up the metrics of a step.

    amounts: name -> this rank's sum of what loss_fn returned under that name, and of the "loss"
    """

    def __init__(
        self,
        loss_fn: LossFn,
        outputs: TokenOutputs,
        counts_group: Callable[[ProcessGroup], bool],
        device: torch.device,
        mtp: MTPLoss | None,
    ):
        """Start a step with all sums at zero.

        counts_group: Engine.counts_group, whether this rank counts a micro-batch in its sums
        """
        self.loss_fn = loss_fn
        self.outputs = outputs
        self.counts_group = counts_group
        self.mtp = mtp
        self.amounts = defaultdict(lambda: torch.zeros((), device=device))
        # Megatron's schedule expects a number of tokens; gradients are not divided by it.
        self.num_tokens = torch.zeros((), dtype=torch.int, device=device)

    def __call__(self, micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, dict]:
        """Return what Megatron's schedule expects of a loss: (loss, number of tokens, metrics).

        hidden: [s, b, h] of the last stage, followed by those of each MTP layer
        """
        num_mtp_layers = 0 if self.mtp is None else len(self.mtp.sums)
        hidden, *of_mtp_layers = hidden.chunk(1 + num_mtp_layers)
        outputs = self.outputs.of_tokens(micro_batch, hidden)
        differentiable = outputs[: self.outputs.head.num_differentiable]
        loss, extra = self.loss_fn(*differentiable, micro_batch.fields)
        for name, amount in {"loss": loss, **extra}.items():
            self.amounts[name] += amount.detach() * self.counts_group(micro_batch.group)
        for layer, (ahead, of_layer) in enumerate(zip(micro_batch.ahead, of_mtp_layers)):
            layer_loss = self.outputs.mtp_loss(ahead, of_layer) / self.mtp.num_targets[layer]
            self.mtp.sums[layer] += layer_loss.detach()
            loss = loss + self.mtp.weight * layer_loss
        return loss, self.num_tokens, {}


def count_mtp_targets(batch: Batch, num_layers: int) -> Tensor:
    """Return how many tokens of a batch each MTP layer predicts, [num_layers] fp32."""
    is_trained = batch.fields.get("loss_mask", torch.ones(len(batch.input_ids))) != 0
    counts = []
    for layer in range(1, num_layers + 1):
        has_prediction = is_trained & (batch.position_ids > layer)
        counts.append(float(has_prediction.sum()))
    return torch.tensor(counts)
