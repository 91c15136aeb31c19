"""Turns the last pipeline stage's hidden states into the head's outputs for each token."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn

from engines.heads import ValueHead
from engines.megatron.gpt import HiddenStates
from engines.microbatch import MicroBatch, TokensAhead
from engines.parallel.collectives import gather_tensor


class TokenOutputs:
    """Applies a head to hidden states that tensor- and context-parallel ranks divide."""

    def __init__(
        self,
        model: HiddenStates,
        head: nn.Module,
        tp_group: dist.ProcessGroup,
        sequence_parallel: bool,
    ):
        self.model = model
        self.head = head
        self.tp_group = tp_group
        self.sequence_parallel = sequence_parallel
        self.has_value_head = isinstance(head, ValueHead)

    def compute(self, micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the head's outputs, each [T], from hidden states [s, b, h]."""
        outputs = self.head(
            self.gather_hidden(hidden).index_select(0, micro_batch.predicting_slots),
            self.output_matrix().to(hidden.dtype),
            micro_batch.targets,
            micro_batch.candidate_ids,
            micro_batch.teacher,
        )
        return tuple(micro_batch.to_tokens(output) for output in outputs)

    def mtp_loss(self, ahead: TokensAhead, hidden: Tensor) -> Tensor:
        """Return the sum of an MTP layer's cross-entropies on this rank.

        The output matrix gets no gradient from this loss.

        Args:
            hidden: [s, b, h], the MTP layer's hidden states.
        """
        full_vocabulary = ahead.targets.new_empty(len(ahead.targets), 0)
        log_probs = self.head(
            self.gather_hidden(hidden).index_select(0, ahead.predicting_slots),
            self.output_matrix().detach().to(hidden.dtype),
            ahead.targets,
            full_vocabulary,
        )[0]
        return -log_probs.sum()

    def gather_hidden(self, hidden: Tensor) -> Tensor:
        """Return hidden states [s, b, h] as [positions, h], whole on every tensor-parallel rank.

        If ranks divide the vocabulary, each rank computes a part of the hidden states' gradient.
        With a value head, each rank computes all of it.
        """
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=not self.has_value_head, group=self.tp_group
            )
        elif not self.has_value_head:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        return hidden.flatten(0, 1)

    def output_matrix(self) -> Tensor:
        """Return this rank's rows of the output matrix, which may be tied to the embedding."""
        if self.model.output_layer.weight is None:
            return self.model.shared_embedding_or_output_weight()
        return self.model.output_layer.weight

    def whole_output_matrix(self, vocab_size: int, dtype: torch.dtype) -> Tensor:
        """Return the rows of all tensor-parallel ranks, without padding: [V, h].

        On other pipeline stages than the last: an empty tensor.
        """
        if not self.model.post_process:
            return torch.empty(0, dtype=dtype)
        own = self.output_matrix().detach().to(dtype).contiguous()
        whole = own.new_empty(len(own) * self.tp_group.size(), own.shape[1])
        gather_tensor(whole, own, group=self.tp_group)
        return whole[:vocab_size]


def on_all_stages(
    results: tuple[Tensor, ...],
    shape: tuple[int, int],
    pp_group: dist.ProcessGroup,
    device: torch.device,
) -> Tensor:
    """Stack the last pipeline stage's results [T], and return them on all stages.

    results: empty on other stages. shape: the shape of the stacked results.
    """
    outputs = torch.stack([x.float() for x in results]) if results else torch.zeros(shape)
    outputs = outputs.to(device)
    if pp_group.size() > 1:
        dist.broadcast(outputs, mpu.get_pipeline_model_parallel_last_rank(), pp_group)
    return outputs
