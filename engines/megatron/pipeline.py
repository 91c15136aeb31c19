"""Megatron's schedule of forward and backward passes over pipeline stages and micro-batches."""

from collections.abc import Callable, Iterator
from functools import partial

from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from engines.megatron.moe import add_routes
from engines.microbatch import MicroBatch


def run_schedule(
    stages: list[nn.Module],
    micro_batches: list[MicroBatch],
    use_hidden: Callable,
    forward_only: bool,
    on_forward: Callable[[MicroBatch], None],
) -> None:
    """Run the forward passes and, unless forward_only, the backward passes of micro-batches.

    Args:
        stages: this rank's virtual pipeline stages, wrapped in DDP if they are trained.
        use_hidden: called on the last stage with each micro-batch and its hidden states. For
            training, it returns the loss like StepLoss. With forward_only, it is also passed
            non_loss_data=True.
        on_forward: called with each micro-batch before its forward pass on one of the stages.
    """

    def forward(remaining: Iterator[MicroBatch], stage: nn.Module) -> tuple[Tensor, Callable]:
        micro_batch = next(remaining)
        on_forward(micro_batch)
        hidden = stage(
            micro_batch.input_ids,
            None,
            None,
            packed_seq_params=micro_batch.packing,
            padding_mask=add_routes(micro_batch.padding, micro_batch.routes),
            labels=[ahead.input_ids for ahead in micro_batch.ahead],
        )
        return hidden, partial(use_hidden, micro_batch)

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(micro_batches) for _ in stages],
        model=stages,
        num_microbatches=len(micro_batches),
        # These two are not used, since stages send each other the actual shapes.
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
