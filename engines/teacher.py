"""Distillation: a teacher's outputs for each token, and how a student's head uses them.

The teacher runs first, without a gradient. Its results wait in host memory, as fields of the batch
in which the student is trained:

    teacher_ids        [T, K] int32: the teacher's K most likely tokens
    teacher_log_probs  [T, K + 1] fp32: their log-probabilities, and the rest's log-probability
    teacher_hidden     [T, h] of the compute dtype: the teacher's last hidden states. They replace
                       the two fields above if the divergence covers the whole vocabulary. The
                       student's head then applies the teacher's output matrix to them, a chunk of
                       tokens at a time
    teacher_number     [T] int64: which of several teachers; equal for all tokens of a sequence

Entry t belongs to the prediction of token t.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engines.divergence import (
    Divergence,
    TeacherHead,
    full_divergence,
    top_k_divergence,
    top_k_log_probs,
)
from engines.logprobs import LogProbSettings
from engines.parallel.device import to_device

NUMBER = "teacher_number"
OUTPUTS = ("teacher_ids", "teacher_log_probs", "teacher_hidden")
FIELDS = (*OUTPUTS, NUMBER)


class TeacherRows:
    """The fields of m tokens, in host memory. A field that the batch does not have is None.

    This is not a dataclass: FSDP would cast the tensors in it to the compute dtype.
    """

    def __init__(
        self,
        teacher_ids: Tensor | None = None,
        teacher_log_probs: Tensor | None = None,
        teacher_hidden: Tensor | None = None,
        teacher_number: Tensor | None = None,
    ):
        self.teacher_ids = teacher_ids
        self.teacher_log_probs = teacher_log_probs
        self.teacher_hidden = teacher_hidden
        self.teacher_number = teacher_number

    @staticmethod
    def of(fields: Mapping[str, Tensor], tokens: Tensor) -> "TeacherRows | None":
        """Return the fields of these tokens; None if a batch has no results of a teacher.

        tokens: [m] int64, their indices in the batch.
        """
        rows = {name: fields[name][tokens] for name in FIELDS if name in fields}
        return TeacherRows(**rows) if rows else None


@dataclass(frozen=True)
class Distillation:
    """How a student's head compares its distributions with a teacher's.

    temperature  divides the logits of both
    num_tokens   the number of tokens that the student and all teachers have; with top_k, the
                 student's distribution covers only these, like the teachers'
    teachers     the teachers' output matrices, if the divergence covers the whole vocabulary
    """

    divergence: Divergence
    temperature: float
    num_tokens: int
    teachers: Sequence[TeacherHead] = ()

    def compare(
        self, hidden: Tensor, weight: Tensor, rows: TeacherRows, settings: LogProbSettings
    ) -> Tensor:
        """Return the divergence at each of m tokens: [m] fp32, differentiable.

        Args:
            hidden, weight: [m, h] and [V, h]: the student's, as in linear_log_probs().
            settings: the student's.
        """
        settings = with_temperature(settings, self.temperature)
        if rows.teacher_hidden is None:
            num_left = max(0, self.num_tokens - settings.first_token)
            return top_k_divergence(
                hidden,
                weight[:num_left],
                to_device(rows.teacher_ids, hidden.device),
                to_device(rows.teacher_log_probs, hidden.device),
                self.divergence,
                settings,
            )
        result = torch.zeros(len(hidden), device=hidden.device)
        for number, teacher in enumerate(self.teachers):
            taught = torch.arange(len(hidden))
            if rows.teacher_number is not None:
                taught = (rows.teacher_number == number).nonzero()[:, 0]
            # The rows are as wide as the hidden states of the widest teacher.
            hidden_size = teacher.weight.shape[1]
            teacher_hidden = rows.teacher_hidden[taught, :hidden_size]
            taught = to_device(taught, hidden.device)
            divergence = full_divergence(
                hidden[taught],
                weight,
                to_device(teacher_hidden, hidden.device),
                teacher,
                self.divergence,
                settings,
            )
            result = result.index_copy(0, taught, divergence)
        return result


def with_temperature(settings: LogProbSettings, temperature: float) -> LogProbSettings:
    """Return the settings with another temperature."""
    return replace(settings, transform=settings.transform._replace(temperature=temperature))


class HiddenHead(nn.Module):
    """The last hidden states themselves, in place of an engine's head."""

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        candidate_ids: Tensor,
        teacher: TeacherRows | None = None,
    ) -> tuple[Tensor]:
        return (hidden,)


class TopKHead(nn.Module):
    """The most likely tokens, in place of an engine's head."""

    def __init__(self, head: nn.Module, top_k: int, num_tokens: int, temperature: float):
        """
        Args:
            head: the engine's own LogProbHead, which knows how ranks divide the vocabulary.
            num_tokens: the number of tokens that the student and all teachers have. Further tokens
                are left out.
            temperature: divides the logits.
        """
        super().__init__()
        self.own_part = head.own_part
        self.top_k = top_k
        self.num_tokens = num_tokens
        self.temperature = temperature

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        candidate_ids: Tensor,
        teacher: TeacherRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens [m, K] int32 and the log-probabilities [m, K + 1] fp32."""
        weight, settings = self.own_part(weight)
        weight = weight[: max(0, self.num_tokens - settings.first_token)]
        settings = with_temperature(settings, self.temperature)
        return top_k_log_probs(hidden, weight, self.top_k, settings)
