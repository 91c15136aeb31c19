"""What follows a model's last hidden state: log-probabilities of tokens, or values of states.

A head has no parameters, so it adds no name to a checkpoint: it is called with the model's output
matrix, which may be tied to the embedding, gathered, or divided over ranks. It is a module so that
hooks see its inputs and outputs.
"""

from dataclasses import replace
from enum import Enum

import torch.distributed as dist
from torch import Tensor, nn

from engines.logprobs import LogitTransform, LogProbSettings, linear_log_probs


class Head(Enum):
    """What an engine computes from the last hidden states."""

    LOG_PROBS = "log_probs"
    """Log-probabilities of tokens: actors and references."""
    VALUES = "values"
    """Values of states: critics."""


class LogProbHead(nn.Module):
    """Log-probabilities, entropies, and whether tokens are the most likely ones."""

    num_outputs = 3
    num_differentiable = 2  # the first outputs, which a loss is called with

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
            chunk_size: tokens whose logits are in memory at once.
            compiled: fuse the passes over the logits with torch.compile.
            vocab_size: number of tokens, without the padding of a divided output matrix.
            group: tensor-parallel ranks, each with an equal share of the vocabulary. None: one.
            scale, softcap: of the model, see LogitTransform.
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
        self, hidden: Tensor, weight: Tensor, targets: Tensor, kept_words: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log_probs [k] fp32, entropy [k] fp32 (nats) and is_greedy [k] bool.

        Args:
            hidden: [k, h]. About its gradient see linear_log_probs.
            weight: [this rank's tokens, h].
            targets: [k] int64, the tokens that follow.
            kept_words: [k, K] int64, the tokens that sampling kept for each target; K = 0: all.
        """
        settings = self.settings
        if settings.group is not None:
            first_token = settings.group.rank() * len(weight)
            num_tokens = max(0, self.vocab_size - first_token)
            weight = weight[:num_tokens]  # without the rows that pad the vocabulary
            settings = replace(settings, first_token=first_token)
        return linear_log_probs(hidden, weight, targets, settings, kept_words)


class ValueHead(nn.Module):
    """Values of states. Tensor-parallel ranks all compute the same, and the same gradient."""

    num_outputs = 1
    num_differentiable = 1

    def forward(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, kept_words: Tensor
    ) -> tuple[Tensor]:
        """Return the value [k] fp32 of the state before each target; weight is [1, h]."""
        values = nn.functional.linear(hidden, weight)[:, 0]
        return (values.float(),)
