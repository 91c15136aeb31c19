"""The module that FSDP shards: a Hugging Face model with a head from engines/heads.py."""

from torch import Tensor, nn

from engines.fsdp.attention import Packing
from engines.fsdp.recurrence import StateResets
from engines.teacher import TeacherRows


class PackedModel(nn.Module):
    """A Hugging Face model with a head in place of its last matrix product.

    The head needs the output matrix, which FSDP gathers for this module's forward pass. So
    forward() calls the head.
    """

    def __init__(self, hf: nn.Module, head: nn.Module):
        super().__init__()
        self.hf = hf
        self.head = head
        self.state_resets = StateResets(hf)

    def forward(
        self,
        predicting_slots: Tensor,
        targets: Tensor,
        candidate_ids: Tensor,
        packing: Packing | None = None,
        teacher: TeacherRows | None = None,
        **inputs: Tensor,
    ):
        """Return the head's outputs for k tokens.

        Args:
            predicting_slots: [k], the index in [length * rows] of the token before each target.
            targets: [k], the tokens to predict.
            candidate_ids: [k, K], the tokens that each target was sampled from.
            packing: None if every row holds one sequence.
            teacher: a teacher's outputs for each target.
            inputs: input_ids and position_ids [rows, length] and, for images, further inputs of the
                model.
        """
        self.state_resets.offsets = packing.offsets if packing else None
        attention = packing.arguments() if packing else {}
        has_images = len(inputs) > 2
        body = self.hf.base_model if has_images else self.hf.get_decoder()
        outputs = body(use_cache=False, **attention, **inputs)
        hidden = outputs[0].transpose(0, 1).flatten(0, 1).index_select(0, predicting_slots)
        weight = self.hf.get_output_embeddings().weight.to(hidden.dtype)
        return self.head(hidden, weight, targets, candidate_ids, teacher)
