"""The heads of a model: log-probabilities of tokens, or values of states, from hidden states.

A head has no parameters, so it adds no names to a checkpoint. It is called with the model's output
matrix, which may be tied to the embedding, gathered, or divided over ranks. A head is a module so
that hooks see its inputs and outputs.
"""

from dataclasses import replace
from enum import Enum

import torch.distributed as dist
from torch import Tensor, nn

from engines.logprobs import LogitTransform, LogProbSettings, linear_log_probs


class Head(Enum):
    """The kind of result that an engine computes from the last hidden states."""

    LOG_PROBS = "log_probs"
    """Log-probabilities of tokens: actors and references."""
    VALUES = "values"
    """Values of states: critics."""


class LogProbHead(nn.Module):
    """Log-probabilities, entropies, and whether tokens are the most likely ones."""

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
        self.vocab_size = vocab_size
        is_divided = group is not None and group.size() > 1
        self.settings = LogProbSettings(
            LogitTransform(temperature, scale, softcap),
            chunk_size,
            compiled,
            group if is_divided else None,
        )

    def forward(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, candidate_ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log_probs [k] fp32, entropy [k] fp32 (nats) and is_greedy [k] bool.

        Args:
            hidden: [k, h]. See linear_log_probs about its gradient.
            weight: [this rank's share of the vocabulary, h].
            targets: [k] int64, the tokens to predict.
            candidate_ids: [k, K] int64, the tokens that each target was sampled from; K = 0: all.
        """
        settings = self.settings
        if settings.group is not None:
            first_token = settings.group.rank() * len(weight)
            num_tokens = max(0, self.vocab_size - first_token)
            weight = weight[:num_tokens]  # without the rows that pad the vocabulary
            settings = replace(settings, first_token=first_token)
        return linear_log_probs(hidden, weight, targets, settings, candidate_ids)


class ValueHead(nn.Module):
    """Values of states. All tensor-parallel ranks compute the same values and gradients."""

    num_outputs = 1
    num_differentiable = 1

    def forward(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, candidate_ids: Tensor
    ) -> tuple[Tensor]:
        """Return the value [k] fp32 of the state before each target; weight is [1, h]."""
        values = nn.functional.linear(hidden, weight)[:, 0]
        return (values.float(),)
