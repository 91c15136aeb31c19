"""What follows a model's last hidden state, in both engines: log-probabilities of words, or values of states.

A head has no parameters, so it changes no name in a checkpoint: it is called with the output matrix, which is the model's
(tied to the embedding, gathered, divided over ranks). It is a module so that hooks see its inputs and outputs.
"""

from enum import Enum

import torch.distributed as dist
from torch import Tensor, nn

from engines.logprobs import linear_log_probs


class Head(Enum):
    """What an engine computes from the last hidden states."""

    LOG_PROBS = "log_probs"
    """Log-probabilities of tokens: actors and references."""
    VALUES = "values"
    """Values of states: critics."""


class LogProbHead(nn.Module):
    num_outputs, num_differentiable = 3, 2

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
        """temperature divides the logits, chunk_size [tokens] bounds those in memory; group: tensor-parallel ranks, each of
        which has an equal share of the vocabulary, None for one rank; scale, softcap: the model's, see linear_log_probs."""
        super().__init__()
        self.temperature, self.chunk_size, self.compiled, self.vocab_size = (
            temperature,
            chunk_size,
            compiled,
            vocab_size,
        )
        self.scale, self.softcap = scale, softcap
        self.group = group if group is not None and group.size() > 1 else None

    def forward(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, kept_words: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [k, h], weight [this rank's words, h], next tokens `targets` [k] int64, the words that each was
        drawn from `kept_words` [k, K] int64 (K = 0: all) -> log_probs [k] fp32, entropy [k] fp32 (nats), whether the target is the
        likeliest word [k] bool; see linear_log_probs about the gradient of hidden."""
        first_word = 0
        if self.group is not None:
            first_word = self.group.rank() * len(weight)
            weight = weight[
                : max(0, self.vocab_size - first_word)
            ]  # the vocabulary's padding is no word
        return linear_log_probs(
            hidden,
            weight,
            targets,
            self.temperature,
            self.chunk_size,
            self.compiled,
            self.group,
            first_word,
            kept_words,
            self.scale,
            self.softcap,
        )


class ValueHead(nn.Module):
    num_outputs, num_differentiable = 1, 1

    def forward(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, kept_words: Tensor
    ) -> tuple[Tensor]:
        """hidden [k, h], weight [1, h] -> ([k] fp32,): the value of the state before each target. The same on all
        tensor-parallel ranks, and so is the gradient of hidden."""
        return (nn.functional.linear(hidden, weight)[:, 0].float(),)
