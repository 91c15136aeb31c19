"""The loss of one training step, summed over its micro-batches."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor
from torch.distributed import ProcessGroup

from data.batching.batch import Batch
from engines.base import LossFn
from engines.heads import call_loss
from engines.megatron.outputs import TokenOutputs
from engines.microbatch import MicroBatch


@dataclass
class MTPLoss:
    """The MTP layers' part of a step's loss.

    num_targets: [layers] fp32, the number of tokens that each layer predicts, over all
        data-parallel ranks
    weight: the factor of each layer's mean loss
    sums: [layers] fp32, this rank's part of each layer's mean loss so far
    """

    num_targets: Tensor
    weight: float
    sums: Tensor

    @staticmethod
    def begin(
        batch: Batch,
        num_layers: int,
        scaling_factor: float,
        sum_over_dp: Callable[[Tensor], Tensor],
    ) -> "MTPLoss | None":
        """Return the state at the beginning of a step; None without MTP layers.

        Args:
            batch: the sequences that this rank reports, see Engine.reported_sequences().
            sum_over_dp: see Engine.sum_over_dp().
        """
        if not num_layers:
            return None
        num_targets = sum_over_dp(count_mtp_targets(batch, num_layers)).clamp(min=1)
        return MTPLoss(num_targets, scaling_factor / num_layers, torch.zeros_like(num_targets))


class StepLoss:
    """Computes the loss of each micro-batch, and sums the metrics of a step.

    amounts: name -> this rank's sum of an amount that loss_fn reports, or of the "loss"
    """

    def __init__(
        self,
        loss_fn: LossFn,
        outputs: TokenOutputs,
        reports_group: Callable[[ProcessGroup], bool],
        device: torch.device,
        mtp: MTPLoss | None,
    ):
        """Start a step with all sums at zero.

        Args:
            reports_group: Engine.reports_group. It returns whether this rank adds a group's
                micro-batches to its sums.
        """
        self.loss_fn = loss_fn
        self.outputs = outputs
        self.reports_group = reports_group
        self.mtp = mtp
        self.device = device
        self.amounts = defaultdict(lambda: torch.zeros((), device=device))
        # Megatron's schedule expects a number of tokens; gradients are not divided by it.
        self.num_tokens = torch.zeros((), dtype=torch.int, device=device)

    def __call__(self, micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, dict]:
        """Return (loss, number of tokens, metrics), as Megatron's schedule expects.

        Args:
            hidden: [(1 + layers) * s, b, h], the hidden states of the last stage, followed by those
                of each MTP layer.
        """
        num_mtp_layers = 0 if self.mtp is None else len(self.mtp.sums)
        hidden, *mtp_outputs = hidden.chunk(1 + num_mtp_layers)
        outputs = self.outputs.compute(micro_batch, hidden)
        loss, reported = call_loss(self.loss_fn, self.outputs.head, outputs, micro_batch.fields)
        for name, amount in {"loss": loss, **reported}.items():
            self.amounts[name] += amount.detach() * self.reports_group(micro_batch.group)
        for layer, (ahead, mtp_hidden) in enumerate(zip(micro_batch.ahead, mtp_outputs)):
            layer_loss = self.outputs.mtp_loss(ahead, mtp_hidden) / self.mtp.num_targets[layer]
            self.mtp.sums[layer] += layer_loss.detach()
            loss = loss + self.mtp.weight * layer_loss
        return loss, self.num_tokens, {}

    def reduce_metrics(
        self, sum_over_dp: Callable[[Tensor], Tensor], pp_group: ProcessGroup
    ) -> dict[str, float]:
        """Return the step's metrics, summed over data-parallel ranks, on all pipeline stages.

        Args:
            sum_over_dp: see Engine.sum_over_dp().
            pp_group: the ranks of all pipeline stages.
        """
        metrics = {}
        if mpu.is_pipeline_last_stage(ignore_virtual=True):
            sums = sum_over_dp(torch.stack(list(self.amounts.values())))
            metrics = dict(zip(self.amounts, sums.tolist()))
            if self.mtp is not None:
                group = mpu.get_data_parallel_group(with_context_parallel=True)
                dist.all_reduce(self.mtp.sums, group=group)
                for layer, loss in enumerate(self.mtp.sums.tolist(), 1):
                    metrics[f"mtp/loss_{layer}"] = loss
        if pp_group.size() > 1:
            box = [metrics]
            last_rank = mpu.get_pipeline_model_parallel_last_rank()
            dist.broadcast_object_list(box, last_rank, pp_group, self.device)
            metrics = box[0]
        return metrics


def count_mtp_targets(batch: Batch, num_layers: int) -> Tensor:
    """Return the number of tokens in a batch that each MTP layer predicts, [num_layers] fp32."""
    is_trained = batch.fields.get("loss_mask", torch.ones(len(batch.input_ids))) != 0
    counts = []
    for layer in range(1, num_layers + 1):
        has_prediction = is_trained & (batch.position_ids > layer)
        counts.append(float(has_prediction.sum()))
    return torch.tensor(counts)
