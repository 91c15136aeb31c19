"""The heads of a model: log-probabilities of tokens, or values of states, from hidden states.

A head has no parameters, so it adds no names to a checkpoint. It is called with the model's output
matrix, which may be tied to the embedding, gathered, or divided over ranks. A head is a module so
that hooks see its inputs and outputs.
"""

from collections.abc import Callable
from dataclasses import replace
from enum import Enum

import torch.distributed as dist
from torch import Tensor, nn

from engines.logprobs import LogitTransform, LogProbSettings, linear_log_probs
from engines.teacher import Distillation, TeacherRows


class Head(Enum):
    """The kind of result that an engine computes from the last hidden states."""

    LOG_PROBS = "log_probs"
    """Log-probabilities of tokens: actors and references."""
    VALUES = "values"
    """Values of states: critics."""


class LogProbHead(nn.Module):
    """Log-probabilities, entropies, and whether tokens are the most likely ones.

    distillation: how to compare with a teacher while the model is trained; None: no teacher
    """

    num_outputs = 3
    num_differentiable = 2  # only this many outputs, the first ones, are passed to the loss

    def __init__(
        self,
        temperature: float,
        chunk_size: int,
        compiled: bool,
        vocab_size: int,
        group: dist.ProcessGroup | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
    ):
        """
        Args:
            temperature: divides the logits.
            chunk_size: number of tokens whose logits are in memory at once.
            compiled: fuse the passes over the logits with torch.compile.
            vocab_size: number of tokens, without the padding of a divided output matrix.
            group: tensor-parallel ranks, each with an equal share of the vocabulary. None: this
                rank has the whole vocabulary.
            scale, softcap: the model's own, see LogitTransform.
        """
        super().__init__()
        self.distillation: Distillation | None = None
        self.vocab_size = vocab_size
        is_divided = group is not None and group.size() > 1
        self.settings = LogProbSettings(
            LogitTransform(temperature, scale, softcap),
            chunk_size,
            compiled,
            group if is_divided else None,
        )

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        candidate_ids: Tensor,
        teacher: TeacherRows | None = None,
    ) -> tuple[Tensor, ...]:
        """Return log_probs [k] fp32, entropy [k] fp32 (nats) and is_greedy [k] bool.

        With distillation, also the divergence from the teacher [k] fp32, which is differentiable.

        Args:
            hidden: [k, h]. See linear_log_probs about its gradient.
            weight: [this rank's share of the vocabulary, h].
            targets: [k] int64, the tokens to predict.
            candidate_ids: [k, K] int64, the tokens that each target was sampled from; K = 0: all.
            teacher: the teacher's outputs for each target.
        """
        weight, settings = self.own_part(weight)
        outputs = linear_log_probs(hidden, weight, targets, settings, candidate_ids)
        if self.distillation is None or teacher is None:
            return outputs
        return *outputs, self.distillation.compare(hidden, weight, teacher, settings)

    def own_part(self, weight: Tensor) -> tuple[Tensor, LogProbSettings]:
        """Return this rank's rows of the output matrix without padding, and where they begin."""
        settings = self.settings
        if settings.group is None:
            return weight, settings
        first_token = settings.group.rank() * len(weight)
        num_tokens = max(0, self.vocab_size - first_token)
        return weight[:num_tokens], replace(settings, first_token=first_token)


class ValueHead(nn.Module):
    """Values of states. All tensor-parallel ranks compute the same values and gradients."""

    num_outputs = 1
    num_differentiable = 1

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        candidate_ids: Tensor,
        teacher: TeacherRows | None = None,
    ) -> tuple[Tensor]:
        """Return the value [k] fp32 of the state before each target; weight is [1, h]."""
        values = nn.functional.linear(hidden, weight)[:, 0]
        return (values.float(),)


def call_loss(
    loss_fn: Callable, head: nn.Module, outputs: tuple[Tensor, ...], fields: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Call a loss function (engines.base.LossFn) with a head's outputs, each [T].

    With distillation, the loss function gets the divergence from the teacher as a field.
    """
    if len(outputs) > head.num_outputs:
        fields = fields | {"divergence": outputs[head.num_outputs]}
    return loss_fn(*outputs[: head.num_differentiable], fields)
